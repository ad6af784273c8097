"""A pair that cannot hand over is refused before any prefill is paid for."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests import tiny
from tests.live.stack import running, until
from twofold.live.worker import Worker


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transport", "tcp"),
        ("dtype", "float16"),
        ("block_size", 32),
        ("handoff", "push"),
        ("checksum", "off"),
    ],
)
def test_differing_pair_is_refused_and_the_field_is_named(
    field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = Worker.identity

    def other(self: Worker) -> dict[str, Any]:
        found = identity(self)
        if self.role == "decode":
            layout = msgspec.structs.replace(self.layout, **{field: value})
            found["layout"] = msgspec.to_builtins(layout)
        return found

    monkeypatch.setattr(Worker, "identity", other)

    async def main() -> None:
        async with running(tiny.cached_model("llama"), "1P1D", wait_ready=False) as stack:
            workers = stack.gateway.router.workers
            await until(lambda: len(workers) == 2, what="workers seen")
            answer = await stack.complete(prompt="hello", max_tokens=2)
            assert answer.status == 503
            assert f"{field} differs" in answer.error["message"]
            assert stack.worker("prefill").driver.core.engine.n_steps == 0  # type: ignore[union-attr]

    asyncio.run(main())
