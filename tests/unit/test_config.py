"""Settings: which source wins, what is refused and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.config import (
    EngineSettings,
    GatewaySettings,
    ServeSettings,
    SettingsError,
    Sources,
    WorkerAddress,
    WorkerSettings,
    as_flags,
    options,
    parse_address,
    read_gateway,
    read_serve,
    read_worker,
)
from twofold.config.options import Table
from twofold.config.values import format_address


def serve(
    flags: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    file: str = "",
) -> ServeSettings:
    return read_serve(Sources(flags=flags or {}, environ=environ or {}, file=file))[0]


def refusal(
    flags: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    file: str = "",
) -> str:
    with pytest.raises(SettingsError) as caught:
        serve(flags, environ, file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flags_of(words: list[str], tables: tuple[Table, ...]) -> dict[str, Any]:
    """The flags in a command line that `as_flags` wrote, by key."""
    known = [option for table in tables for option in options(table)]
    found: dict[str, Any] = {}
    for word in words:
        flag, _, value = word.partition("=")
        if not word.startswith("--"):
            found["model"] = word
            continue
        option = next(o for o in known if o.flag == flag.replace("--no-", "--", 1))
        if option.is_bool:
            found[option.key] = not flag.startswith("--no-")
        elif option.is_list:
            found.setdefault(option.key, []).append(value)
        else:
            found[option.key] = value
    return found


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "twofold.toml"
        path.write_text(text)
        return str(path)

    return write


def test_without_any_source_the_defaults_hold() -> None:
    assert serve() == ServeSettings(engine=EngineSettings(model="builtin"))


def test_flags_win_over_environment_over_file_over_defaults(toml: Any) -> None:
    file = toml("[engine]\nblock_size = 8\nkv_blocks = 10\nthreads = 2\n[serve]\nport = 1\n")
    environ = {"TWOFOLD_BLOCK_SIZE": "32", "TWOFOLD_KV_BLOCKS": "20"}
    settings, given_keys = read_serve(
        Sources(flags={"block_size": "64"}, environ=environ, file=file)
    )
    engine = settings.engine
    assert (engine.block_size, engine.kv_blocks, engine.threads) == (64, 20, 2)
    assert (engine.max_num_seqs, settings.port) == (64, 1)
    assert given_keys == {"block_size", "kv_blocks", "threads", "port"}


def test_limits_of_the_gateway_reach_serve_from_its_own_table(toml: Any) -> None:
    file = toml('[gateway]\nmax_inflight = 3\nhost = "10.0.0.1"\n')
    settings = serve(file=file)
    assert (settings.limits.max_inflight, settings.host) == (3, "127.0.0.1")


def test_switches_are_read_from_every_source(toml: Any) -> None:
    file = toml("[engine]\nprefix_caching = false\n")
    assert serve().engine.prefix_caching
    assert not serve(file=file).engine.prefix_caching
    assert serve(environ={"TWOFOLD_PREFIX_CACHING": "true"}, file=file).engine.prefix_caching
    assert not serve({"prefix_caching": False}).engine.prefix_caching


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"port": "99999"}, "--port 99999: must be a whole number from 0 to 65535"),
        ({"port": "http"}, "--port http: must be a whole number from 0 to 65535"),
        ({"port": ""}, "--port '': must be a whole number from 0 to 65535"),
        ({"prefill": "-1"}, "--prefill -1: must be a whole number from 0 to 64"),
        ({"block_size": "17"}, "--block-size 17: must be a power of two from 1 to 256"),
        ({"block_size": "0"}, "--block-size 0: must be a power of two from 1 to 256"),
        ({"block_size": "512"}, "--block-size 512: must be a power of two from 1 to 256"),
        ({"kv_blocks": "0"}, "--kv-blocks 0: must be a whole number, 1 or more"),
        (
            {"max_num_batched_tokens": "0"},
            "--max-num-batched-tokens 0: must be a whole number, 1 or more",
        ),
        ({"lease_s": "0"}, "--lease-s 0: must be a number above 0"),
        ({"lease_s": "inf"}, "--lease-s inf: must be a number above 0"),
        ({"lease_s": "nan"}, "--lease-s nan: must be a number above 0"),
        ({"handoff": "give"}, "--handoff give: must be one of layerwise, pull, push"),
        ({"transport": "rdma"}, "--transport rdma: must be one of mooncake, nixl, shm, tcp"),
        ({"dtype": "int4"}, "--dtype int4: must be one of float32, float16, bfloat16"),
        ({"host": ""}, "--host '': must be text that is not empty"),
        ({"model": ""}, "MODEL '': must be text that is not empty"),
    ],
)
def test_a_flag_out_of_range_is_refused(flags: dict[str, str], line: str) -> None:
    assert refusal(flags) == line


def test_a_variable_out_of_range_is_refused() -> None:
    line = refusal(environ={"TWOFOLD_PORT": "tcp://10.0.0.1:80"})
    assert line == "TWOFOLD_PORT=tcp://10.0.0.1:80: must be a whole number from 0 to 65535"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {"prefill": "2", "decode": "0"},
            "--prefill 2, --decode 0: prefill workers need a decode or a mixed worker as well",
        ),
        ({"prefill": "0"}, "--prefill 0: decode workers need a prefill or a mixed worker as well"),
        (
            {"prefill": "0", "decode": "0"},
            "--prefill 0, --decode 0: there must be at least one worker",
        ),
    ],
)
def test_pools_that_cannot_serve_are_refused(flags: dict[str, str], line: str) -> None:
    assert refusal(flags) == line


@pytest.mark.parametrize(
    ("flags", "pools"),
    [
        ({}, (1, 1, 0)),
        ({"mixed": "2"}, (0, 0, 2)),
        ({"mixed": "1", "prefill": "2", "decode": "0"}, (2, 0, 1)),
        ({"mixed": "1", "decode": "3"}, (1, 3, 1)),
        ({"mixed": "0"}, (1, 1, 0)),
    ],
)
def test_mixed_alone_means_mixed_only(flags: dict[str, str], pools: tuple[int, ...]) -> None:
    settings = serve(flags)
    assert (settings.prefill, settings.decode, settings.mixed) == pools


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[serve]\nprot = 1\n", "[serve] prot: unknown key; did you mean port?"),
        ("[serve]\nblock_size = 1\n", "[serve] block_size: unknown key; it belongs in [engine]"),
        ("[server]\nport = 1\n", "[server]: unknown table; did you mean serve?"),
        ("[x]\n", "[x]: unknown table; tables are engine, serve, gateway, worker"),
        ("serve = 1\n", "serve: must be a table, [serve]"),
        (
            "[serve]\nport = 99999\n",
            "[serve] port = 99999: must be a whole number from 0 to 65535",
        ),
        (
            '[serve]\nport = "80"\n',
            '[serve] port = "80": must be a whole number from 0 to 65535',
        ),
        (
            "[engine]\nprefix_caching = 1\n",
            "[engine] prefix_caching = 1: must be true or false",
        ),
        (
            "[worker]\nrole = 'x'\n",
            '[worker] role = "x": must be one of decode, mixed, prefill',
        ),
    ],
)
def test_a_file_is_refused_with_its_name_table_and_key(toml: Any, text: str, line: str) -> None:
    file = toml(text)
    assert refusal(file=file) == f"{file}: {line}"


def test_a_file_that_cannot_be_read_is_refused(toml: Any, tmp_path: Path) -> None:
    assert refusal(file="absent.toml") == "--config absent.toml: no such file or directory"
    assert refusal(file=str(tmp_path)) == f"--config {tmp_path}: is a directory"
    broken = toml("[serve\nport = 1\n")
    assert refusal(file=broken).startswith(f"--config {broken}: must be TOML: ")
    assert "line 1" in refusal(file=broken)
    (tmp_path / "latin").write_bytes(b"# \xff\n")
    assert refusal(file=str(tmp_path / "latin")).endswith("must be a TOML file in UTF-8")


def test_a_misspelt_variable_is_refused_and_a_platforms_own_is_not() -> None:
    line = refusal(environ={"TWOFOLD_BLOCKSIZE": "32"})
    assert line == "TWOFOLD_BLOCKSIZE: unknown variable; did you mean TWOFOLD_BLOCK_SIZE?"
    platform = {"TWOFOLD_SERVICE_HOST": "10.0.0.1", "TWOFOLD_SERVICE_PORT": "80", "PATH": ""}
    assert serve(environ=platform) == serve()


def test_a_worker_must_have_a_name_a_role_and_a_model() -> None:
    flags = {"model": "m", "name": "a", "role": "mixed"}
    settings = read_worker(Sources(flags=flags))
    assert (settings.host, settings.port, settings.engine.model) == ("127.0.0.1", 0, "m")
    for key, name in (("model", "MODEL"), ("name", "--name"), ("role", "--role")):
        rest = {k: v for k, v in flags.items() if k != key}
        with pytest.raises(SettingsError, match=f"^{name} is missing: "):
            read_worker(Sources(flags=rest))


def test_a_gateway_must_have_workers_with_different_names(toml: Any) -> None:
    with pytest.raises(SettingsError, match=r"^--worker is missing: "):
        read_gateway(Sources())
    twice = ["a=mixed@h:1", "a=mixed@h:2"]
    with pytest.raises(SettingsError, match="two workers are named a"):
        read_gateway(Sources(flags={"workers": twice}))
    expected = (WorkerAddress("a", "mixed", "h", 1), WorkerAddress("b", "decode", "::1", 2))
    as_text = ["a=mixed@h:1", "b=decode@[::1]:2"]
    assert read_gateway(Sources(flags={"workers": as_text})).workers == expected
    in_variable = {"TWOFOLD_WORKERS": "a=mixed@h:1, b=decode@[::1]:2"}
    assert read_gateway(Sources(environ=in_variable)).workers == expected
    tables = (
        "[[gateway.workers]]\nname = 'a'\nrole = 'mixed'\nhost = 'h'\nport = 1\n"
        "[[gateway.workers]]\nname = 'b'\nrole = 'decode'\nhost = '::1'\nport = 2\n"
    )
    assert read_gateway(Sources(file=toml(tables))).workers == expected


@pytest.mark.parametrize(
    "text", ["", "a", "a=mixed", "a=mixed@h", "a=x@h:1", "=mixed@h:1", "a=mixed@h:0"]
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"must be NAME=ROLE@HOST:PORT"):
        parse_address(text)


NAMES = st.text("abcxyz-_.0189", min_size=1, max_size=8)
HOSTS = st.sampled_from(["127.0.0.1", "::1", "worker.local"])
ADDRESSES = st.builds(
    WorkerAddress,
    NAMES,
    st.sampled_from(["prefill", "decode", "mixed"]),
    HOSTS,
    st.integers(1, 65535),
)
ENGINES = st.builds(
    EngineSettings,
    model=st.sampled_from(["m", "some dir/model", "a=b"]),
    served_model_name=st.sampled_from(["", "name", "a=b"]),
    block_size=st.sampled_from([1, 16, 256]),
    kv_blocks=st.integers(1, 10**6),
    prefix_caching=st.booleans(),
    transport=st.sampled_from(["shm", "tcp"]),
    lease_s=st.floats(1e-3, 1e3),
)


@given(address=ADDRESSES)
def test_an_address_reads_back(address: WorkerAddress) -> None:
    assert parse_address(format_address(address)) == address


@given(engine=ENGINES, name=NAMES, port=st.integers(0, 65535))
def test_a_workers_command_line_reads_back(engine: EngineSettings, name: str, port: int) -> None:
    settings = WorkerSettings(
        name=name, role="decode", host="::1", port=port, handoff_port=1, engine=engine
    )
    flags = flags_of(as_flags(settings), ("engine", "worker"))
    assert read_worker(Sources(flags=flags)) == settings


@given(workers=st.lists(ADDRESSES, min_size=1, max_size=4, unique_by=lambda a: a.name))
def test_a_gateways_command_line_reads_back(workers: list[WorkerAddress]) -> None:
    settings = GatewaySettings(
        host="0.0.0.0", port=1, admin_host="h", admin_port=2, workers=tuple(workers), max_inflight=7
    )
    flags = flags_of(as_flags(settings), ("gateway",))
    assert read_gateway(Sources(flags=flags)) == settings


def test_every_setting_says_what_it_is() -> None:
    tables: tuple[Table, ...] = ("engine", "serve", "gateway", "worker")
    for table in tables:
        for option in options(table):
            assert option.description, option.key


def test_a_default_is_itself_within_bounds() -> None:
    defaults = msgspec.structs.asdict(serve().engine)
    flags = {k: v if isinstance(v, bool) else str(v) for k, v in defaults.items()}
    assert serve(flags) == serve()
