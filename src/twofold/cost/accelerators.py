"""Accelerators: data-sheet figures, dense and per device, with their sources."""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec

from twofold.cost.errors import CostError


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device. None: not known. Links are per direction; `usd_per_hour` is a published price."""

    name: str
    aliases: tuple[str, ...]
    bf16_tflops: float
    fp8_tflops: float | None
    memory_gb: float
    memory_tb_per_s: float
    nvlink_gb_per_s: float | None
    nic_gb_per_s: float
    pcie_gb_per_s: float
    tdp_w: int
    usd_per_hour: float | None = None
    source: str

    def flops(self, weight_item_bytes: float) -> float:
        """Peak operations/s for weights of that many bytes: FP8's where stored so and known."""
        tflops = self.bf16_tflops
        if weight_item_bytes <= 1.0 and self.fp8_tflops is not None:
            tflops = self.fp8_tflops
        return tflops * 1e12

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory."""
        return round(self.memory_gb * 1e9)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Peak bytes/s of device memory."""
        return self.memory_tb_per_s * 1e12

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes/s one way between devices of a node: NVLink or its like, else PCIe."""
        return (self.nvlink_gb_per_s or self.pcie_gb_per_s) * 1e9

    @property
    def nic_bytes_per_s(self) -> int:
        """Bytes/s one way between nodes, per device, as such machines are usually built."""
        return round(self.nic_gb_per_s * 1e9)


class _AcceleratorFile(msgspec.Struct):
    accelerators: list[Accelerator]


@cache
def known_accelerators() -> dict[str, Accelerator]:
    """Accelerators shipped with the package, by name. Treat as read-only."""
    text = resources.files("twofold.cost").joinpath("data/accelerators.json").read_bytes()
    return {a.name: a for a in msgspec.json.decode(text, type=_AcceleratorFile).accelerators}


def accelerator(name: str) -> Accelerator:
    """An accelerator by name or alias, such as "h100"; case does not matter. Raises CostError."""
    wanted = name.lower()
    for entry in known_accelerators().values():
        if wanted == entry.name.lower() or wanted in entry.aliases:
            return entry
    names = ", ".join(entry.aliases[0] for entry in known_accelerators().values())
    raise CostError(f"{name}: not a known accelerator; known are {names}")
