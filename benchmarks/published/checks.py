"""All checks in the table's order: a name, and what gives its rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from benchmarks.published import (
    arithmetic,
    distserve,
    distserve_curves,
    distserve_parallelism,
    h100,
    mooncake,
    mooncake_reuse,
    prefill_queue,
    prefixes,
    sarathi,
    silicon,
    splitwise,
    splitwise_costs,
    splitwise_pools,
    transfers,
)
from benchmarks.published.data import Data
from benchmarks.published.rows import Row

Check = Callable[[Data], list[Row]]

ARITHMETIC: Final[dict[str, Check]] = {
    "kv-bytes": arithmetic.kv_rows,
    "sizing": arithmetic.sizing_rows,
    "paging": arithmetic.paging_rows,
    "traces": arithmetic.trace_rows,
    "distserve-arithmetic": arithmetic.distserve_rows,
    "distserve-memory": distserve_parallelism.memory_rows,
    "mooncake-arithmetic": arithmetic.mooncake_rows,
}

_CURVES: Final[dict[str, Check]] = {
    f"distserve-{case.name}": partial(distserve_curves.case_rows, case=case)
    for case in distserve_curves.CASES
}

_SPLITS: Final[dict[str, Check]] = {
    f"splitwise-{trace}-bloom": partial(splitwise_pools.winner_rows, trace=trace)
    for trace in splitwise.TRACES
}

CHECKS: Final[dict[str, Check]] = {
    **ARITHMETIC,
    "distserve-queues": distserve_parallelism.queue_rows,
    "distserve-toy": distserve.toy_rows,
    "distserve-example": distserve.example_rows,
    **_CURVES,
    "distserve-table2": distserve_curves.table2_rows,
    "distserve-unchecked": distserve_curves.unchecked_rows,
    "splitwise-single": splitwise.table_rows,
    "splitwise-costs": splitwise_costs.cost_rows,
    **_SPLITS,
    "splitwise-cheapest": splitwise_pools.cheapest_rows,
    "splitwise-claims": splitwise_pools.claim_rows,
    "splitwise-transfers": splitwise.transfer_rows,
    "splitwise-unchecked": splitwise.unchecked_rows,
    "mooncake-reuse": mooncake_reuse.reuse_rows,
    "mooncake-scheduling": mooncake.scheduling_rows,
    "mooncake-queue": prefill_queue.queue_rows,
    "mooncake-capacity": mooncake.capacity_rows,
    "mooncake-capacity-rate": mooncake.capacity_rate_rows,
    "mooncake-ratio": mooncake.pd_ratio_rows,
    "mooncake-unchecked": mooncake.unchecked_rows,
    "push-pull-slots": transfers.slots_rows,
    "push-pull-modes": transfers.mode_rows,
    "push-pull-unchecked": transfers.unchecked_rows,
    "h100": h100.rows_of,
    "silicon": silicon.silicon_rows,
    "prefixes": prefixes.rows_of,
    "sarathi-chunks": sarathi.chunk_rows,
    "others-unchecked": sarathi.unchecked_rows,
}
