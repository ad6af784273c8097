"""What processes a deployment on one machine consists of, and where each of them listens."""

from __future__ import annotations

import os
import sys
from typing import Final

import msgspec

from twofold.config import (
    GatewaySettings,
    Role,
    ServeSettings,
    WorkerAddress,
    WorkerSettings,
    as_flags,
)
from twofold.live.ports import free_ports
from twofold.live.supervisor import Child

LOOPBACK: Final = "127.0.0.1"

SHM_VARIABLES: Final = (("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=131072"),)
"""What workers over shared memory start with. Copies of 128 KiB or more then go past the caches,
which made those of blocks 1.5 times faster; else glibc does so only for hundreds of MiB at once."""


class Deployment(msgspec.Struct, frozen=True):
    """Settings of every process. Their ports are fixed, so that a restart changes no address."""

    workers: tuple[WorkerSettings, ...]
    gateway: GatewaySettings

    def children(self) -> list[Child]:
        """The processes, for a supervisor in this very process: they die with it."""
        found = [
            Child(
                name=worker.name,
                command=_command("worker", as_flags(worker)),
                variables=SHM_VARIABLES if worker.engine.transport == "shm" else (),
            )
            for worker in self.workers
        ]
        command = _command("gateway", as_flags(self.gateway))
        return [*found, Child(name="gateway", command=command, stage=1)]


def plan_deployment(settings: ServeSettings) -> Deployment:
    """Name the workers and find them ports; `port` 0 and `admin_port` 0 are chosen as well.

    Raises OSError when there are no free ports.
    """
    pools: tuple[tuple[Role, int], ...] = (
        ("prefill", settings.prefill),
        ("decode", settings.decode),
        ("mixed", settings.mixed),
    )
    names = [(role, f"{role}-{i}") for role, count in pools for i in range(count)]
    avoid = (settings.port, settings.admin_port)
    public, admin, *ports = free_ports(2 + 2 * len(names), avoid)
    workers = tuple(
        WorkerSettings(
            name=name,
            role=role,
            host=LOOPBACK,
            port=ports[2 * i],
            handoff_port=ports[2 * i + 1],
            engine=settings.engine,
        )
        for i, (role, name) in enumerate(names)
    )
    gateway = GatewaySettings(
        host=settings.host,
        port=settings.port or public,
        admin_host=LOOPBACK,
        admin_port=settings.admin_port or admin,
        handoff=settings.engine.handoff,
        workers=tuple(WorkerAddress(w.name, w.role, w.host, w.port) for w in workers),
        **msgspec.structs.asdict(settings.limits),
    )
    return Deployment(workers, gateway)


def _command(name: str, flags: list[str]) -> tuple[str, ...]:
    # -P: a file of the current folder must not stand in for one of Python's own modules.
    start = (sys.executable, "-P", "-m", "twofold", name)
    return (*start, *flags, f"--parent-pid={os.getpid()}")
