from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from tests.unit.published import published
from twofold.trace import TraceError, TraceRequest, head, open_trace, write_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def put(tmp_path: Path, text: str, name: str = "t.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, newline="")
    return path


def pairs(path: Path) -> list[tuple[int, int, int]]:
    return [(r.arrival_ns, r.input_tokens, r.output_tokens) for r in open_trace(path)]


ROWS = {
    "azure2023_code.csv": (8819, True, "azure"),
    "azure2023_conv.csv": (19366, True, "azure"),
    "mooncake_conversation_trace.jsonl": (12031, True, "mooncake"),
    "mooncake_synthetic_trace.jsonl": (3993, True, "mooncake"),
    "arxiv_summarization_4k_lengths_llama2.csv.gz": (28257, False, "lengths-csv"),
    "sharegpt_8k_lengths_llama2.csv.gz": (30731, False, "lengths-csv"),
    "llmservingsim_sharegpt_llama31_8b_300_sps10.csv": (300, True, "csv"),
    "llmservingsim_sharegpt_llama_req300_rate10.csv": (300, True, "csv"),
    "llmservingsim_sharegpt_mixtral_req300_rate10.csv": (300, True, "csv"),
    "llmservingsim_sharegpt_pulse_req50_n6_delay15.csv": (300, True, "csv"),
    "llmservingsim_sharegpt_qwen3_32b_300_sps10.csv": (300, True, "csv"),
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_published_trace_reads_whole(name: str) -> None:
    rows, timed, kind = ROWS[name]
    trace = open_trace(published(f"traces/{name}"))
    count = sum(1 for _ in trace) if timed else sum(1 for _ in trace.lengths())
    assert (count, trace.info.rows, trace.info.bad) == (rows, rows, 0)
    assert (trace.info.timed, trace.info.format) == (timed, kind)


def test_azure_2023_is_exact_to_the_tenth_of_a_microsecond() -> None:
    rows = list(head(open_trace(published("traces/azure2023_conv.csv")), 2))
    # 18:15:46.6805900 and 18:15:50.9951690.
    assert rows == [TraceRequest(0, 374, 44), TraceRequest(4_314_579_000, 396, 109)]


def test_mooncake_keeps_prefix_hashes() -> None:
    first = next(iter(open_trace(published("traces/mooncake_conversation_trace.jsonl"))))
    assert first == TraceRequest(0, 6758, 500, tuple(range(14)), 512)


def test_azure_2024_mixes_zones_and_fractions(tmp_path: Path) -> None:
    path = put(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01+00:00,2399,6\n"
        "2024-05-10T02:00:01.5+02:00,76,15\n"
        "2024-05-11 00:00:00Z,1,1\n",
    )
    assert [a for a, _, _ in pairs(path)] == [0, 990_070_000, 1_490_070_000, 86_399_990_070_000]


@pytest.mark.parametrize(
    ("header", "values", "arrivals", "said"),
    [
        ("arrival_s,input_tokens,output_tokens", ("0.046927", "0.347939"), 301_012_000, "s"),
        ("arrival_ms,prompt_tokens,completion_tokens", ("5", "7.25"), 2_250_000, "relative, ms"),
        ("timestamp,input,output", ("1700000000", "1700000001"), 10**9, "epoch, s"),
        ("timestamp,input,output", ("1700000000000", "1700000000001"), 10**6, "epoch, ms"),
        (
            "timestamp,input,output",
            ("1700000000000000001", "1700000000000000003"),
            2,
            "epoch, ns",
        ),
        ("timestamp,input,output", ("1.0", "2.5"), 1_500_000_000, "relative, s (assumed)"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens", ("0", "3"), 3 * 10**9, "assumed"),
        ("arrival_timestamp,prompt_size,token_size", ("0", "3"), 3 * 10**9, "assumed"),
    ],
)
def test_time_units_are_found_and_said(
    tmp_path: Path, header: str, values: tuple[str, str], arrivals: int, said: str
) -> None:
    path = put(tmp_path, f"{header}\n{values[0]},10,20\n{values[1]},11,21\n")
    trace = open_trace(path)
    assert [r.arrival_ns for r in trace] == [0, arrivals]
    assert said in trace.info.times
    assert said in trace.info.describe()


def test_burstgpt_counts_failures_and_keeps_log_type(tmp_path: Path) -> None:
    path = put(
        tmp_path,
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n"
        "5,1,2,ChatGPT,472,18,490,Conversation log\n"
        "45,1,2,ChatGPT,1087,0,1087,API log\n"
        "118,1,2,GPT-4,417,276,693,API log\n",
    )
    trace = open_trace(path, skip_bad=True)
    assert list(trace) == [
        TraceRequest(0, 472, 18, klass="Conversation log"),
        TraceRequest(113 * 10**9, 417, 276, klass="API log"),
    ]
    assert (trace.info.format, trace.info.bad, trace.info.rows) == ("burstgpt", 1, 2)
    assert trace.info.bad_reasons == [
        f"{path}:3:Response tokens: 0 tokens; a request has at least 1"
    ]
    with pytest.raises(TraceError, match=r":3:Response tokens: 0 tokens"):
        list(open_trace(path))


def test_sharegpt_estimates_and_says_so(tmp_path: Path) -> None:
    chats = [
        {
            "id": "a",
            "conversations": [
                {"from": "human", "value": "x" * 9},
                {"from": "gpt", "value": "y" * 8},
            ],
        },
        {"id": "b", "conversations": [{"from": "gpt", "value": "hello"}]},
        {
            "id": "c",
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "[q],{", "num_tokens": 40},
                {"from": "gpt", "value": "z" * 200_000},
            ],
        },
    ]
    for name, text in (
        ("a.json", json.dumps(chats, indent=1)),
        ("a.jsonl", "\n".join(json.dumps(chat) for chat in chats)),
    ):
        trace = open_trace(put(tmp_path, text, name), skip_bad=True)
        rows = list(trace.lengths())
        assert [(r.input_tokens, r.output_tokens) for r in rows] == [(3, 2), (40, 50_000)]
        assert "estimated: characters / 4" in trace.info.lengths
        assert trace.info.bad == 1
        with pytest.raises(TraceError, match="has no arrival times"):
            iter(trace)
    lines = json.dumps(chats, indent=1).split("\n")
    bad = next(i for i, line in enumerate(lines, 1) if '"b"' in line) - 1
    with pytest.raises(TraceError, match=rf"a\.json:{bad}:conversations: no human turn"):
        list(open_trace(tmp_path / "a.json").lengths())


def test_broken_sharegpt_ends_in_one_error(tmp_path: Path) -> None:
    good = json.dumps(
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    )
    path = put(tmp_path, f"[{good},\n{{broken", "x.json")
    with pytest.raises(TraceError, match=r"x\.json:2: not a JSON object"):
        list(open_trace(path).lengths())


def test_own_record_round_trips_with_64_bit_hashes(tmp_path: Path) -> None:
    requests = [
        TraceRequest(0, 33, 5, (0, 2**32 + 7, 2**64 - 1), 16, "chat"),
        TraceRequest(7, 1, 1),
    ]
    path = tmp_path / "own.jsonl"
    assert write_trace(path, requests) == 2
    assert list(open_trace(path)) == requests
    assert open_trace(path).info.format == "twofold"


def test_gzip_reads_alike(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"arrival_s,input,output\n0,1,2\n1,3,4\n"))
    assert pairs(path) == [(0, 1, 2), (10**9, 3, 4)]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(TraceError, match="cannot read"):
        pairs(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.csv: the trace is empty"),
        ("\n\n", r"t\.csv: the trace is empty"),
        (AZURE, r"t\.csv: the trace is empty"),
        (AZURE + "2023-11-16 18:15:46.68,0,5\n", r":2:ContextTokens: 0 tokens"),
        (AZURE + "2023-11-16 18:15:46.68,5,0\n", r":2:GeneratedTokens: 0 tokens"),
        (AZURE + "2023-11-16 18:15:46.68,5,-3\n", r":2:GeneratedTokens: -3 is negative"),
        (AZURE + "2023-11-16 18:15:46.68,5\n", r":2: the row has 2 columns; the header has 3"),
        (AZURE + "2023-11-16 18:15:46.68,5,\n", r":2:GeneratedTokens: missing"),
        (AZURE + "2023-11-16 18:15:46.68,5,x\n", r":2:GeneratedTokens: 'x' is not a whole number"),
        (AZURE + "2023-11-16 18:15:46.68,5.5,1\n", r":2:ContextTokens: '5.5' is not a whole"),
        (AZURE + "2023-11-16 18:15:46.68,9999999999,1\n", r":2:ContextTokens: .* out of range"),
        (AZURE + ",5,6\n", r":2:TIMESTAMP: the time is missing"),
        (AZURE + "2023-13-16 18:15:46,5,6\n", r":2:TIMESTAMP: 2023-13-16 is not a date"),
        (AZURE + "2023-11-16 25:15:46,5,6\n", r":2:TIMESTAMP: .*time of day"),
        (AZURE + "2023-11-16 18:15:46,5,6\n17,5,6\n", r":3:TIMESTAMP: '17' is not a date"),
        (AZURE + "nan,5,6\n", r":2:TIMESTAMP: nan is not a time"),
        (AZURE + "-1,5,6\n", r":2:TIMESTAMP: -1 is not a time"),
        (AZURE + "9,5,6\n3,5,6\n", r":3:TIMESTAMP: 3 is before the row above"),
        (AZURE + "9,5,6\n\n3\0,5,6\n", r":4:TIMESTAMP: '3.x00' is not a time"),
        ("arrival_s,input_tokens\n", r":1: the header .* has no column of output tokens"),
        ("arrival_s,output\n", r":1: the header .* has no column of input tokens"),
        ("arrival_s,timestamp,input,output\n", r":1: 'arrival_s' and 'timestamp' could both"),
        ('{"a": 1}\n', r":1: fields a are of no known trace"),
        ("{nope\n", r":1: the first line is not JSON"),
        ("arrival_ms,input,output\n2023-11-16 18:15:46,5,6\n", r":2:arrival_ms: .* is a date"),
    ],
)
def test_bad_input_names_file_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        list(open_trace(put(tmp_path, text)))


def mooncake(**change: object) -> str:
    row: dict[str, object] = {
        "timestamp": 0,
        "input_length": 1024,
        "output_length": 5,
        "hash_ids": [1, 2],
    }
    row.update(change)
    return json.dumps({key: value for key, value in row.items() if value != "gone"}) + "\n"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (mooncake(hash_ids=[1]), r":2:hash_ids: 1 hashes for 1024 tokens; .* need 2"),
        (mooncake(hash_ids=[1, 2, 3]), r":2:hash_ids: 3 hashes"),
        (mooncake(hash_ids=[1, -2]), r":2:hash_ids: a hash is outside"),
        (mooncake(hash_ids=[1, 2**64]), r":2:hash_ids"),
        (mooncake(hash_ids=["1", "2"]), r":2:hash_ids"),
        (mooncake(timestamp="gone"), r":2:timestamp: the time is missing"),
        (mooncake(timestamp=None), r":2:timestamp: the time is missing"),
        (mooncake(input_length="gone"), r":2:input_length: missing"),
        (mooncake(output_length=0), r":2:output_length: 0 tokens"),
        (mooncake(output_length=True), r":2:output_length: 'True' is not a whole"),
        ("[1]\n", r":2: .*one object a line is"),
        ("{\n", r":2: not JSON"),
    ],
)
def test_bad_mooncake_rows(tmp_path: Path, bad: str, message: str) -> None:
    path = put(tmp_path, mooncake() + bad + mooncake(timestamp=9), "m.jsonl")
    with pytest.raises(TraceError, match=message):
        list(open_trace(path))
    trace = open_trace(path, skip_bad=True)
    assert [r.arrival_ns for r in trace] == [0, 9_000_000]
    assert (trace.info.rows, trace.info.bad) == (2, 1)


def test_hash_ids_above_32_bits_are_kept(tmp_path: Path) -> None:
    path = put(tmp_path, mooncake(hash_ids=[2**32 + 1, 2**64 - 1]), "m.jsonl")
    assert next(iter(open_trace(path))).hash_ids == (2**32 + 1, 2**64 - 1)


def test_sort_is_asked_for_and_stable(tmp_path: Path) -> None:
    path = put(tmp_path, "arrival_s,input,output\n9,1,1\n3,2,2\n9,3,3\n3,4,4\n")
    trace = open_trace(path, sort=True)
    assert [(r.arrival_ns, r.input_tokens) for r in trace] == [
        (0, 2),
        (0, 4),
        (6 * 10**9, 1),
        (6 * 10**9, 3),
    ]
    assert "sorted" in trace.info.describe()


def test_all_rows_bad_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    path = put(tmp_path, AZURE + "2023-11-16 18:15:46.68,0,5\n")
    with pytest.raises(TraceError, match="no good row; the first bad one"):
        list(open_trace(path, skip_bad=True))


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read: No such file"):
        open_trace(tmp_path / "none.csv")


def test_memory_stays_flat(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    with path.open("w") as out:
        out.write("arrival_s,input,output\n")
        out.writelines(f"{i},{i % 999 + 1},{i % 99 + 1}\n" for i in range(60_000))
    tracemalloc.start()
    try:
        assert sum(1 for _ in open_trace(path)) == 60_000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
