"""Find the rank that keeps the others waiting: in the profiled step it waits least in collectives, while its peers
wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from simulator.config.plan import Plan, rank_grid
from simulator.program import trace as tr
from simulator.program.trace import Trace

LEAST_SHARE = 0.1  # share of the step by which the others wait longer; below it is random variation
LONGER = 1.05  # ratio to the others' kernel time above which kernels, not the host, make a rank late


def slow_ranks(plan: Plan, traces: Mapping[int, Trace]) -> list[str]:
    """Return a line for each rank that is later than the other ranks of its stage, which do the same work.

    Judged by kernels of NCCL, which last from their launch until all ranks have joined; empty where there are none.
    """
    lines = []
    for stage in rank_grid(plan):
        ranks = [int(rank) for rank in stage.flat if int(rank) in traces]
        if len(ranks) < 2 or len(ranks) < stage.size:
            continue
        waits = {rank: traces[rank].exposed_s(rank) for rank in ranks}
        computes = {rank: traces[rank].busy_s(rank, tr.COMPUTE) for rank in ranks}
        late = min(ranks, key=lambda rank: waits[rank])
        others = [rank for rank in ranks if rank != late]
        step_s, waited_s = max(traces[rank].end_s for rank in ranks), median(waits[rank] for rank in others)
        if waited_s - waits[late] < LEAST_SHARE * step_s or not all(waits.values()):
            continue
        slower = computes[late] / max(median(computes[rank] for rank in others), 1e-12)
        cause = f"its kernels took {slower:.2f} times as long" if slower >= LONGER else "its host was late"
        lines.append(
            f"rank {late} kept others waiting: {waited_s:.3g} s of a step in collectives, itself {waits[late]:.3g} s;"
            f" {cause}"
        )
    return lines
