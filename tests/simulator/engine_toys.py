"""A small machine and small training steps for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from simulator.config.plan import MESH_AXES, Plan, rank_grid
from simulator.pipeline.schedule_program import pipeline_program
from simulator.pipeline.schedules.registry import build_schedule
from simulator.pipeline.schedules.table import Action, Kind
from simulator.program.cost_model import Cost, GpuLimits, LinkUse, Ranks
from simulator.program.program import CodeWriter, Collective, Copy, Groups, Instruction, Kernel, Launch, Program


@dataclass(frozen=True, slots=True)
class ToyMachine:
    """Nodes of `per_node` GPUs that share one network port per node. `placement[rank]` is a GPU; times are made up."""

    per_node: int = 4
    placement: tuple[int, ...] = ()
    slow_gpus: frozenset[int] = frozenset()
    port_bytes_per_s: float = 100.0
    launch_s: float = 0.0

    def gpu(self, rank: int) -> int:
        return self.placement[rank] if self.placement else rank

    def node(self, rank: int) -> int:
        return self.gpu(rank) // self.per_node

    def cost(self, instruction: Kernel, ranks: Ranks) -> Cost:
        if isinstance(instruction, Launch):
            seconds = 1.0 + 0.1 * sum(instruction.shape)
            slow = self.gpu(ranks[0]) in self.slow_gpus
            return Cost(seconds=seconds * (1.5 if slow else 1.0), sms=100, hbm_bytes_per_s=60.0)
        if isinstance(instruction, Copy):
            return Cost(seconds=instruction.nbytes / 50.0, hbm_bytes_per_s=10.0)
        far = len({self.node(rank) for rank in ranks}) > 1
        rate = 80.0 if far else 400.0
        ratio = 1.0 if not isinstance(instruction, Collective) else 2.0 * (len(ranks) - 1) / len(ranks)
        return Cost(
            seconds=0.05 + instruction.nbytes * ratio / rate,
            sms=16,
            hbm_bytes_per_s=50.0,
            link_bytes_per_s=rate if far else 0.0,
        )

    def host_s(self, instruction: Instruction) -> float:
        return self.launch_s if isinstance(instruction, Kernel) else 0.0

    def limits(self, rank: int) -> GpuLimits:
        return GpuLimits(sms=108, hbm_bytes_per_s=90.0)

    def routes(self, ranks: Ranks) -> tuple[LinkUse, ...]:
        nodes = dict.fromkeys(self.node(rank) for rank in ranks)
        return tuple(LinkUse(link=("port", node)) for node in nodes) if len(nodes) > 1 else ()

    def link_bytes_per_s(self, link: Hashable) -> float:
        return self.port_bytes_per_s

    def kind(self, ranks: Ranks) -> Hashable:
        """How the ranks lie in nodes, and which of them are slow."""
        nodes: dict[int, int] = {}
        shape = tuple(nodes.setdefault(self.node(rank), len(nodes)) for rank in ranks)
        return shape, tuple(self.gpu(rank) in self.slow_gpus for rank in ranks)


def layer(code: CodeWriter, plan: Plan, name: str, width: int) -> None:
    """A layer as FSDP and tensor parallelism run it: gather ahead, compute, reduce."""
    if plan.dp_shard > 1:
        code.collective("all_gather", "dp_shard", 40, stream="fsdp", writes=(f"{name} weights",))
        code.after("compute", "fsdp")
    code.launch(name, [width], writes=("x",))
    if plan.tp > 1:
        code.after("comm", "compute")
        code.collective("all_reduce", "tp", 20, reads=("x",), writes=("x",))
        code.after("compute", "comm")
    if plan.cp > 1:
        code.after("ring", "compute")
        code.exchange("cp", 1, 30, tag="kv", stream="ring", reads=("x",), writes=(f"{name} kv",))
        code.after("compute", "ring")
        code.launch("attention", [width], reads=(f"{name} kv",), writes=("x",))


def training_step(plan: Plan, micro_batches: int = 4, layers: int = 2) -> Program:
    """A step of `plan`: its schedule (if pp > 1), layers in each action, gradient reduction, optimizer, a sync."""
    grid = rank_grid(plan)
    schedule = build_schedule(
        plan.schedule or "1F1B", ranks=plan.pp, micro_batches=micro_batches, stages_per_rank=plan.virtual_stages
    )
    finished: dict[int, int] = {}

    def body(code: CodeWriter, action: Action, rank: int) -> None:
        for leaf in action.leaves:
            for index in range(layers):
                layer(code, plan, f"{leaf.kind.name} {index}", 1 + leaf.stage + (leaf.kind is Kind.BACKWARD))
        finished[rank] = finished.get(rank, 0) + 1
        if finished[rank] == len(schedule.table[rank]):
            if plan.dp_replicate > 1:
                code.after("reduce", "compute")
                code.collective("all_reduce", "dp_replicate", 200, stream="reduce")
                code.after("compute", "reduce")
            code.launch("optimizer", [5])
            code.synchronize("compute")

    return pipeline_program(
        schedule, body, message_bytes=10, groups=mesh_groups(plan), ranks_of=lambda s: grid[s].reshape(-1).tolist()
    )


def mesh_groups(plan: Plan) -> dict[str, Groups]:
    """Return the groups of every mesh axis of `plan`, and of `dp` (both data-parallel axes) and `world`.

    Positions in a group follow the axis: position s of a `pp` group is the rank that holds pipeline rank s.
    """
    grid = rank_grid(plan)
    rows = {axis: np.moveaxis(grid, index, -1).reshape(-1, grid.shape[index]) for index, axis in enumerate(MESH_AXES)}
    rows["dp"] = np.moveaxis(grid, (1, 2), (-2, -1)).reshape(-1, plan.data_parallel)
    rows["world"] = grid.reshape(1, -1)
    return {name: tuple(map(tuple, row.tolist())) for name, row in rows.items()}


@dataclass(frozen=True, slots=True)
class SimpleCosts:
    """A machine with equal GPUs and unshared links; `duration` gives seconds or a whole `Cost` for a kernel."""

    duration: Callable[[Kernel], float | Cost]
    launch_s: float = 0.0
    gpu: GpuLimits = field(default_factory=GpuLimits)

    def cost(self, instruction: Kernel, ranks: Ranks) -> Cost:
        value = self.duration(instruction)
        return value if isinstance(value, Cost) else Cost(seconds=value)

    def host_s(self, instruction: Instruction) -> float:
        return self.launch_s if isinstance(instruction, Kernel) else 0.0

    def limits(self, rank: int) -> GpuLimits:
        return self.gpu

    def routes(self, ranks: Ranks) -> tuple[LinkUse, ...]:
        return ()

    def link_bytes_per_s(self, link: Hashable) -> float:
        return float("inf")

    def kind(self, ranks: Ranks) -> Hashable:
        return len(ranks)
