"""A worker has the memory of its KV pool before it serves, or says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.live.stack import HOST
from tests.unit.transport_support import mapped_bytes
from twofold.config import EngineSettings, WorkerSettings
from twofold.device.weights import load_model
from twofold.live.tokeniser import Tokeniser
from twofold.live.worker import Worker


def _worker(path: Path, kv_blocks: int) -> Worker:
    settings = WorkerSettings(
        name="decode-0",
        role="decode",
        host=HOST,
        port=0,
        handoff_port=0,
        engine=EngineSettings(model=str(path), kv_blocks=kv_blocks),
        record="",
    )
    return Worker(settings, load_model(path), Tokeniser(path))


def test_every_page_is_there_before_the_first_request() -> None:
    worker = _worker(tiny.cached_model("llama"), 1024)
    assert mapped_bytes(worker.memory) >= worker.memory.n_bytes
    worker._runner.close()
    worker.memory.close()


def test_a_pool_beyond_memory_names_the_flag_and_the_bytes() -> None:
    said = r"--kv-blocks 4000000000, of \d+ bytes each: needs \d+ bytes of memory, and \d+ can be"
    with pytest.raises(ValueError, match=said):
        _worker(tiny.cached_model("llama"), 4_000_000_000)
