"""One request's ledger, where its time went, for people and for `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from twofold.metrics.ledger import PHASES, parse_server_timing
from twofold.types import ns_to_ms

if TYPE_CHECKING:
    from rich.console import Console

UNATTRIBUTED: Final = "unattributed"
_BAR_WIDTH: Final = 30
_MIB: Final = 1024 * 1024


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time up to the first token went.

    `phases_ms` sums to `ttft_ms`; the part that no phase explains is `unattributed`. It keeps
    the names of the gateway's admin API. `e2e_ms` is None while the answer goes on.
    """

    request_id: str
    phases_ms: dict[str, float]
    ttft_ms: float | None = None
    transferred_bytes: int = 0
    outcome: str = ""
    e2e_ms: float | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    why: str = ""
    routed: tuple[str, ...] = ()
    recoveries: tuple[str, ...] = ()


def ledger_of_answer(headers: Mapping[str, str], ttft_ms: float, e2e_ms: float) -> Ledger:
    """The ledger in an answer's headers (lower-case names), as seen by the client.

    What the client waited on top of the gateway's own TTFT counts as unattributed.
    """
    timings_ns = parse_server_timing(headers.get("server-timing", ""))
    named = (name for name in PHASES if name != UNATTRIBUTED)
    phases = {name: ns_to_ms(timings_ns.get(name, 0)) for name in named}
    phases[UNATTRIBUTED] = ttft_ms - sum(phases.values())
    transferred = headers.get("x-twofold-transferred", "0")
    return Ledger(
        request_id=headers.get("x-request-id", ""),
        phases_ms=phases,
        ttft_ms=ttft_ms,
        transferred_bytes=int(transferred) if transferred.isdecimal() else 0,
        outcome="finished",
        e2e_ms=e2e_ms,
    )


def show_ledger(console: Console, ledger: Ledger) -> None:
    """Print `ledger` as a table with shares of the TTFT, at most 100 columns wide."""
    from rich.table import Table

    total_ms = ledger.ttft_ms or sum(ledger.phases_ms.values())
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    if console.is_terminal:
        table.add_column("", style="cyan")
    for name in sorted(ledger.phases_ms, key=_position):
        ms = ledger.phases_ms[name]
        share = ms / total_ms if total_ms else 0.0
        bar = "█" * round(max(0.0, min(1.0, share)) * _BAR_WIDTH)
        row = [name.replace("_", " "), f"{ms:.2f}", f"{share:.1%}"]
        table.add_row(*row, *([bar] if console.is_terminal else []))
    summed_ms = sum(ledger.phases_ms.values())
    table.add_row("sum", f"{summed_ms:.2f}", f"{summed_ms / total_ms if total_ms else 0:.1%}")
    title = f"where the time to the first token went, request {ledger.request_id}"
    for line in (title, "", table, "", *_facts(ledger)):
        console.print(line, highlight=False, soft_wrap=isinstance(line, str), markup=False)


def _facts(ledger: Ledger) -> list[str]:
    lines: list[str] = []
    if ledger.ttft_ms is None:
        lines.append("no first token")
    else:
        total = "" if ledger.e2e_ms is None else f", {ledger.e2e_ms:.1f} ms to the last"
        lines.append(f"{ledger.ttft_ms:.2f} ms to the first token{total}")
    route = " -> ".join(name for name in (ledger.prefill_worker, ledger.decode_worker) if name)
    n_bytes = ledger.transferred_bytes
    lines.append(
        f"transferred {n_bytes} KV bytes ({n_bytes / _MIB:.2f} MiB)" + (f", {route}" * bool(route))
    )
    if ledger.outcome:
        lines.append(f"outcome {ledger.outcome}")
    if ledger.why:
        lines.append(f"why {ledger.why}")
    lines += [f"failed leg: {line}" for line in ledger.recoveries]
    lines += [f"routed {line}" for line in ledger.routed]
    return lines


def _position(name: str) -> tuple[int, str]:
    return (PHASES.index(name) if name in PHASES else len(PHASES), name)
