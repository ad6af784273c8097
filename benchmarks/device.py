"""Decode step time and prefill speed of our Runner against transformers' own generate.

python benchmarks/device.py [MODEL] [--threads N] [--rounds N] [--prompt-tokens N]

Both run the same weights in this process, in turns, and medians are compared. A decode step of
transformers is the time that `generate` takes for one more token, over a batch of prompts of
equal length (which suits it: it would pad others). A ratio above 1 says that ours is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from twofold.device.builtin import BUILTIN, resolve_model
from twofold.device.runner import Row, Runner
from twofold.device.weights import load_model, quiet
from twofold.types import SamplingParams, ceil_div

BLOCK_SIZE = 16
BATCHES = (1, 8, 16)
N_DECODE = 8
GREEDY = SamplingParams(temperature=0.0)


def prompt(length: int, seed: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
    return ids


def ours(runner: Runner, prompts: list[list[int]]) -> tuple[float, float]:
    """Seconds for the prefill of all prompts, and per decode step after it."""
    width = ceil_div(len(prompts[0]) + N_DECODE + 1, BLOCK_SIZE)
    tables = [range(i * width, (i + 1) * width) for i in range(len(prompts))]
    started = time.perf_counter()
    rows = [
        Row(ids, 0, table, True, GREEDY, ids, len(ids))
        for ids, table in zip(prompts, tables, strict=True)
    ]
    sampled = runner.run(rows)
    prefilled = time.perf_counter()
    sequences = [list(ids) for ids in prompts]
    for _ in range(N_DECODE):
        rows = []
        for ids, table, one in zip(sequences, tables, sampled, strict=True):
            assert one is not None
            ids.append(one.token)
            rows.append(Row(ids[-1:], len(ids) - 1, table, True, GREEDY, ids, len(prompts[0])))
        sampled = runner.run(rows)
    return prefilled - started, (time.perf_counter() - prefilled) / N_DECODE


def theirs(model: Any, prompts: list[list[int]]) -> tuple[float, float]:
    """The same by `generate`: one token for the prefill, then `N_DECODE` more."""
    ids = torch.tensor(prompts)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    started = time.perf_counter()
    model.generate(ids, max_new_tokens=1, **options)
    prefill = time.perf_counter() - started
    started = time.perf_counter()
    model.generate(ids, max_new_tokens=1 + N_DECODE, **options)
    return prefill, (time.perf_counter() - started - prefill) / N_DECODE


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=BUILTIN)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path, length = resolve_model(arguments.model), arguments.prompt_tokens

    from transformers import AutoModelForCausalLM

    with quiet():
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    loaded = load_model(path)
    blocks = max(BATCHES) * ceil_div(length + N_DECODE + 1, BLOCK_SIZE)
    runner = Runner(loaded, num_blocks=blocks, block_size=BLOCK_SIZE)
    print(
        f"{path.name}, {arguments.threads} threads, prompts of {length}, {arguments.rounds} rounds"
    )
    print(f"{'batch':>5} {'what':>16} {'ours':>10} {'generate':>10} {'ratio':>6}")
    for batch in BATCHES:
        prompts = [prompt(length, seed, loaded.vocab_size) for seed in range(batch)]
        ours(runner, prompts)
        pairs = [
            (ours(runner, prompts), theirs(reference, prompts)) for _ in range(arguments.rounds)
        ]
        speeds = [
            statistics.median(batch * length / pair[side][0] for pair in pairs) for side in (0, 1)
        ]
        steps = [statistics.median(pair[side][1] * 1e3 for pair in pairs) for side in (0, 1)]
        print(
            f"{batch:>5} {'prefill tok/s':>16} {speeds[0]:>10.0f} {speeds[1]:>10.0f} "
            f"{speeds[0] / speeds[1]:>6.2f}"
        )
        print(
            f"{batch:>5} {'decode ms/step':>16} {steps[0]:>10.2f} {steps[1]:>10.2f} "
            f"{steps[1] / steps[0]:>6.2f}"
        )


if __name__ == "__main__":
    main()
