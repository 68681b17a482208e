"""What the engine costs: processor seconds and memory by stages, micro batches and ranks.

Run as `python tests/bench/engine_scale.py`. The last rows are the aim: Llama-3-405B-like steps on 16,384 GPUs (tp 8,
cp 2, pp 16), one action per stage and micro batch with its layers collapsed, and the same with layers spelled out.
Each row runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from simulator.check import check
from simulator.costs import Cost, GpuLimits, LinkUse
from simulator.engine import simulate
from simulator.pipeline import pipeline_program
from simulator.plan import Plan, rank_grid
from simulator.program import CodeWriter, Kernel, Launch, Program
from simulator.schedule_tables import build_schedule
from simulator.schedules import Action, Schedule
from tests.simulator.engine_toys import SimpleCosts, mesh_groups
from tests.simulator.makespan import pipeline_makespan

# name, plan, micro batches, layers per stage spelled out (0: collapsed), links modelled
CASES: dict[str, tuple[Plan, int, int, bool]] = {
    "8 ranks tp8": (Plan(tp=8), 1, 32, False),
    "64 ranks pp8": (Plan(pp=8, tp=8), 32, 0, False),
    "1024 ranks pp16": (Plan(pp=16, tp=8, dp_shard=8), 64, 0, False),
    "16384 ranks pp16": (Plan(pp=16, dp_shard=64, cp=2, tp=8), 64, 0, False),
    "16384 ranks pp16 v4": (
        Plan(pp=16, dp_shard=64, cp=2, tp=8, schedule="Interleaved1F1B", virtual_stages=4),
        64,
        0,
        False,
    ),
    "16384 ranks pp16, shared NICs": (Plan(pp=16, dp_shard=64, cp=2, tp=8), 64, 0, True),
    "16384 ranks pp16, 8 layers": (Plan(pp=16, dp_shard=64, cp=2, tp=8), 64, 8, False),
}


class SharedNics(SimpleCosts):
    """Eight GPUs to a node; every transfer between nodes crosses the NIC of each of its ranks."""

    def routes(self, ranks: tuple[int, ...]) -> tuple[LinkUse, ...]:
        between = len({rank // 8 for rank in ranks}) > 1
        return tuple(LinkUse(link=rank) for rank in ranks) if between else ()

    def link_bytes_per_s(self, link: object) -> float:
        return 50e9


def duration(instruction: Kernel) -> Cost:
    if isinstance(instruction, Launch):
        return Cost(seconds=1e-3, sms=132, hbm_bytes_per_s=1e12)
    return Cost(seconds=2e-4, sms=16, hbm_bytes_per_s=1e11, link_bytes_per_s=40e9)


def step(plan: Plan, micro_batches: int, layers: int) -> tuple[Program, Schedule]:
    grid = rank_grid(plan)
    schedule = build_schedule(
        plan.schedule or "1F1B", ranks=plan.pp, micro_batches=micro_batches, stages_per_rank=plan.virtual_stages
    )
    left = {rank: len(row) for rank, row in enumerate(schedule.table)}

    def body(code: CodeWriter, action: Action, rank: int) -> None:
        if layers == 0:
            code.launch(f"stage {action.kind}", [action.stage])
        for _ in range(layers):
            for kernel in ("attention", "mlp"):
                code.launch(kernel)
                code.after("tp", "compute")
                code.collective("all_reduce", "tp", 1 << 26, stream="tp")
                code.after("compute", "tp")
        left[rank] -= 1
        if left[rank] == 0:
            code.after("fsdp", "compute")
            code.collective("reduce_scatter", "dp_shard", 1 << 30, stream="fsdp")
            code.after("compute", "fsdp")
            code.launch("optimizer")

    program = pipeline_program(
        schedule, body, message_bytes=1 << 26, groups=mesh_groups(plan), ranks_of=lambda s: grid[s].reshape(-1).tolist()
    )
    return program, schedule


def timed(work: Callable[[], object]) -> tuple[float, object]:
    begin = time.process_time()  # not the wall clock: benches share their cores
    result = work()
    return time.process_time() - begin, result


def measure(name: str) -> None:
    plan, micro_batches, layers, links = CASES[name]
    build_s, (program, schedule) = timed(lambda: step(plan, micro_batches, layers))  # type: ignore[misc]  # a pair
    costs = (SharedNics if links else SimpleCosts)(duration, 5e-6, GpuLimits(sms=132, hbm_bytes_per_s=4e12))
    run_s, run = timed(lambda: simulate(program, costs))
    bare_s, _ = timed(lambda: simulate(program, costs, spans=False))
    check_s, problems = timed(lambda: check(program))
    assert problems == []
    ones = [1.0] * schedule.stages
    pipeline_makespan(schedule, ones, ones)
    path_s, _ = timed(lambda: pipeline_makespan(schedule, ones, ones))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    classes, spans = len(run.folding.classes), len(run.trace.spans)  # type: ignore[attr-defined]  # a Run
    print(
        f"{name:32}{program.ranks:>7}{classes:>8}{program.instructions:>13}{spans:>9}{build_s:>8.2f}{run_s:>8.2f}"
        f"{bare_s:>10.2f}{check_s:>8.2f}{path_s * 1e3:>10.1f}{peak:>9.0f}"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        print(
            f"{'case':32}{'ranks':>7}{'classes':>8}{'instructions':>13}{'spans':>9}{'build s':>8}{'run s':>8}"
            f"{'no spans':>10}{'check s':>8}{'path ms':>10}{'peak MiB':>9}",
            flush=True,
        )
        for case in CASES:
            subprocess.run([sys.executable, __file__, case], check=True)
