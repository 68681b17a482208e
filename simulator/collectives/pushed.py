"""FSDP's exchanges by copy engines (executor/overlap/fsdp_exchange.py): seconds, and what kernels alongside lose.

    pushed_all_gather      copies a shard to each other rank in turn
    pushed_reduce_scatter  copies a part to each other rank in turn; sums of what came are kernels of their own

Copies hold no SMs, but share memory and power with kernels.
"""

from __future__ import annotations

from simulator.collectives.curves import Floats
from simulator.collectives.times import COPY_ENGINE_BASE_S, COPY_ENGINE_CALL_S, COPY_ENGINE_EFFICIENCY, steps_and_share

# The collective that each exchange stands for.
PUSHED = {"pushed_all_gather": "all_gather", "pushed_reduce_scatter": "reduce_scatter"}
SUM_PASSES = 3  # over a part, for every other rank: a sum reads two parts and writes one
# Seconds that products lose for each second of concurrent copies: fitted to the executor's tensor-parallel products
# next to copies, two and four H200 (examples/profiles/h200x4.json).
COPY_SLOWDOWN = 0.07


def pushed_s(nbytes: Floats, *, ranks: int, pair_bytes_per_s: float) -> Floats:
    """Return the seconds of copies of `nbytes` over all ranks, where two GPUs are joined by `pair_bytes_per_s`."""
    share = steps_and_share("all_gather", ranks)[1]
    started_s = COPY_ENGINE_BASE_S + COPY_ENGINE_CALL_S * (ranks - 1)
    return started_s + nbytes * share / (COPY_ENGINE_EFFICIENCY * pair_bytes_per_s)


def host_calls(op: str, ranks: Floats | float) -> Floats | float:
    """Return the host's calls for an exchange, of which NCCL's is one: for every other rank a copy, a flag and a wait,
    and at the end the count of the watch; a call of the driver is a third of one of torch (`simulator.overlap.modes`:
    HOST_CALLS). Each sum is one.
    """
    each = 2.0 if PUSHED[op] == "reduce_scatter" else 1.0
    return 1.0 / 3.0 + each * (ranks - 1)
