"""The results as tables in Markdown, put between the markers of a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _conditions(part: dict[str, Any]) -> str:
    """One line under a table: on what, and what else ran."""
    at = part["conditions"]
    load = at["load_average"][0]
    text = (
        f"{at['cpu']}, {at['cpus']} cores; load average {load:g} before and "
        f"{at['load_average_after'][0]:g} after; also running: {at['also_running']}; "
        f"Python {at['python']}, torch {at['torch']}; took {at['seconds']:g} s"
    )
    return text + ("; a quick run." if at["quick"] else ".")


def bandwidth(result: dict[str, Any]) -> str:
    """GB/s and shares, by size."""
    rows = []
    for size in result["sizes"]:
        shares = size["of_memcpy"] | size["of_raw_socket"]
        for name, speed in size["gbytes_per_s"].items():
            share = _share(shares[name]) if name in shares else ""
            rows.append([f"{size['bytes'] >> 20} MiB", name, f"{speed:.2f}", share])
    return _table(["size", "what", "GB/s", "of memcpy (shm) or raw socket (tcp)"], rows)


def residual(result: list[dict[str, Any]]) -> str:
    """Residual in ms and as a share of prefill, by tokens; modes side by side."""
    cases = {(row["tokens"], row["handoff"], row["transport"]): row for row in result}
    columns = list(dict.fromkeys((row["handoff"], row["transport"]) for row in result))
    rows = []
    for tokens in dict.fromkeys(row["tokens"] for row in result):
        found = [cases[tokens, *column] for column in columns]
        prefill = sorted(row["prefill_ms"] for row in found)[len(found) // 2]
        cells = [f"{row['residual_ms']:.1f} ({_share(row['of_prefill'])})" for row in found]
        rows.append([f"{tokens:,}", f"{prefill:.0f}", *cells])
    heads = ["tokens", "prefill ms", *(f"{mode}, {transport}" for mode, transport in columns)]
    return _table(heads, rows)


def slots(result: dict[str, Any]) -> str:
    """Time averages on the decode side."""
    rows = [
        [
            row["handoff"],
            row["transport"],
            f"{row['slots_waiting']:.3f}",
            f"{row['blocks_waiting']:.1f}",
            f"{row['reserved_ms']:.1f}",
            f"{row['residual_ms']:.1f}",
            f"{row['blocks']:g} in {row['ranges']:g}",
        ]
        for row in result["rows"]
    ]
    about = (
        f"{result['rate_per_s']:g} requests a second, {result['prompt_tokens']} tokens in and "
        f"{result['output_tokens']} out; {result['from']}.\n\n"
    )
    heads = ["mode", "transport", "slots waiting", "blocks waiting", "reserved ms"]
    return about + _table([*heads, "residual ms", "blocks in ranges"], rows)


def loop(result: dict[str, Any]) -> str:
    """CPU time on decode's event loop."""
    rows = [
        [
            f"{row['tokens']:,}",
            row["handoff"],
            row["transport"],
            f"{row['local_us']}",
            f"{row['handoff_us']}",
            f"{row['own_us']}",
            f"{row['own_us_all_threads']}",
            _share(row["loop_time_lost"]),
        ]
        for row in result["rows"]
    ]
    heads = ["tokens", "mode", "transport", "local us", "handoff us", "difference us"]
    return _table([*heads, "all threads us", f"loop at {result['rate_per_s']}/s"], rows)


def interference(result: dict[str, Any]) -> str:
    """Step time of the probe streams by kind of window."""
    rows = [
        [
            row["handoff"],
            row["transport"],
            f"{row['idle_ms']:.2f}",
            f"{row['local_ms']:.2f}",
            f"{row['handoff_ms']:.2f}",
            _signed(row["handoff_over_local"]),
            " to ".join(_signed(value) for value in row["handoff_over_local_interval"]),
            " to ".join(_signed(value) for value in row["handoff_over_local_range"]),
        ]
        for row in result["rows"]
    ]
    about = (
        f"{result['probe_streams']} streams of {result['probe_prompt']} tokens and what they have "
        f"written; {result['rate_per_s']} arrivals a second of {result['handoff_tokens']} tokens; "
        f"windows of {result['window_tokens']} steps; "
        f"{len(result['rows'])} configurations, {result['rows'][0]['cycles']} cycles each.\n\n"
    )
    heads = ["mode", "transport", "idle ms", "local ms", "handoff ms", "handoff over local"]
    return about + _table([*heads, "95 % of its median", "range of cycles"], rows)


def fragments(result: dict[str, Any]) -> str:
    """Ranges by age."""
    rows = [
        [
            "yes" if row["prefix_caching"] else "no",
            f"{row['up_to_handoffs']:,}",
            f"{row['blocks']:g}",
            f"{row['ranges']:g}",
            f"{row['blocks_per_range']:g}",
        ]
        for row in result["rows"]
    ]
    heads = ["prefix caches", "handoffs so far", "blocks", "ranges", "blocks per range"]
    return _table(heads, rows)


TABLES: Final[dict[str, Callable[[Any], str]]] = {
    "bandwidth": bandwidth,
    "residual": residual,
    "slots": slots,
    "loop": loop,
    "interference": interference,
    "fragments": fragments,
}


def write_tables(page: Path, results: dict[str, Any]) -> None:
    """Put each part's table, and on what it was measured, between its markers in `page`.

    Raises ValueError for a page without a part's markers.
    """
    text = page.read_text()
    for name, part in results.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"{page}: has no markers {begin} and {end}")
        body = f"{begin}\n{TABLES[name](part['result'])}\n\n{_conditions(part)}\n{end}"
        before, _, rest = text.partition(begin)
        text = before + body + rest.partition(end)[2]
    page.write_text(text)
