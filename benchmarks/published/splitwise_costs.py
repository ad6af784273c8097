"""Splitwise: what its tables say of cost, energy, the power cap and large batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.published.data import Data
from benchmarks.published.rows import Row, close, exact
from benchmarks.published.splitwise import MACHINES, SOURCE, step
from twofold.types import NS_PER_MS

USD_PER_GPU_HOUR: Final[Mapping[str, float]] = {"A": 2.21, "H": 4.76}
"""splitwise-sim's configuration."""
GPUS: Final = 8


def cost_rows(data: Data) -> list[Row]:
    """Table 4's cost and energy from its own times, and two figures of the perf model."""
    table = data.paper("splitwise")["table4_p50_llama70b_no_batching"]
    rows = []
    for name in ("coding", "conversation"):
        figures = table[name]
        for column, machine in enumerate(("A", "H")):
            cents = figures["E2E_ms"][column] / 3.6e6 * GPUS * USD_PER_GPU_HOUR[machine] * 100
            rows.append(
                exact(
                    SOURCE,
                    f"Table 4, {name}, {MACHINES[machine]}: cost of a request",
                    f"{figures['cost_usd'][column]:g}",
                    cents,
                    unit="cents",
                    conditions=(
                        f"the printed E2E on {GPUS} GPUs at {USD_PER_GPU_HOUR[machine]} dollars "
                        "an hour, as in splitwise-sim; printed without a unit"
                    ),
                )
            )
    for column, machine in enumerate(("A", "H")):
        coding, conversation = table["coding"], table["conversation"]
        wh = coding["energy_wh"][column] / coding["E2E_ms"][column]
        rows.append(
            exact(
                SOURCE,
                f"Table 4, conversation, {MACHINES[machine]}: energy of a request",
                f"{conversation['energy_wh'][column]:g}",
                wh * conversation["E2E_ms"][column],
                unit="Wh",
                conditions="the power that coding's printed energy and E2E imply, over this E2E",
            )
        )
    return rows + _table_rows(data)


def _table_rows(data: Data) -> list[Row]:
    capped, free = step(data, "Hcap"), step(data, "H")
    prompt = [model.step_ns([(2048, 0)], 0, 0) for model in (capped, free)]
    token = [model.step_ns((), 16, 16 * 512) for model in (capped, free)]
    bloom = step(data, "A", model="bloom-176b")
    batch = [bloom.step_ns((), n, n * 512) / NS_PER_MS for n in (1, 64)]
    source = "perf model, TP8"
    return [
        exact(
            SOURCE,
            "50 % power cap: prompts slower",
            "1.30",
            prompt[0] / prompt[1],
            unit="times",
            conditions=f"{source}, Llama2-70B on H100, a prompt of 2,048 tokens",
        ),
        exact(
            SOURCE,
            "50 % power cap: tokens slower",
            "1.00",
            token[0] / token[1],
            unit="times",
            conditions=f"{source}, Llama2-70B on H100, 16 sequences; published as unaffected",
        ),
        close(
            SOURCE,
            "time between tokens of 64 sequences, against one",
            2.0,
            batch[1] / batch[0],
            unit="times",
            conditions=f"{source}, BLOOM-176B on A100, prompts of 512 tokens",
        ),
    ]
