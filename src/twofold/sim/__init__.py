"""Virtual-time driver: the same cores as a live deployment, under a simulated clock and network."""

from twofold.sim.audit import Audit
from twofold.sim.cluster import Cluster
from twofold.sim.errors import StuckError
from twofold.sim.faults import Crash, Faults, SeededFaults
from twofold.sim.pools import PoolsError, WorkerPlan, plan_pools

__all__ = [
    "Audit",
    "Cluster",
    "Crash",
    "Faults",
    "PoolsError",
    "SeededFaults",
    "StuckError",
    "WorkerPlan",
    "plan_pools",
]
