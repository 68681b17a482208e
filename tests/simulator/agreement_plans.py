"""Random plans of every kind, predicted twice: the step's parts and bytes by the analytical model and by the
simulation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import Calibration
from simulator.columns.plan_table import CP_METHODS
from simulator.config.hf_config import load_model
from simulator.config.overlap_sites import MODES
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.engine.simulate import simulate
from simulator.lowering.block_code import Detail
from simulator.lowering.simulation import breakdown_s
from simulator.lowering.training import lower_training
from simulator.pipeline.schedules.registry import SCHEDULES, build_schedule
from topology.catalog.clusters import cluster
from topology.errors import BadPlan

RECOMPUTE = {
    "torchtitan": ("none", "full", "selective", "selective-op"),
    "megatron-lm": ("none", "full", "selective"),
    "pytorch": ("none", "full"),
    "meshwright": ("none", "full"),
}
MODELS = ("llama3-8b", "llama2-7b", "llama3.2-1b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A plan and what it is asked for; `kind` is a short word for what is particular about it."""

    scenario: Scenario
    plan: Plan
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One plan predicted twice: (analytical model, simulation) of the step, and of each part of it."""

    step_s: tuple[float, float]
    parts_s: dict[str, tuple[float, float]]

    @property
    def time_error(self) -> float:
        return self.step_s[0] / self.step_s[1] - 1


def draw_plans(
    each: int = 1, *, seed: int = 0, most_gpus: int = 32, calibration: Calibration | None = None
) -> list[Drawn]:
    """Return `each` legal plans of every runtime under every schedule, and without a pipeline.

    A stratum has a draw of its own, so that a schedule or a runtime more leaves the plans of all others as they are.
    With a `calibration` they run on its machine, four H200 of a node.
    """
    found: list[Drawn] = []
    for runtime in RECOMPUTE:
        for schedule in (None, *SCHEDULES):
            rng, several = random.Random(f"{runtime} {schedule} {seed}"), []
            while len(several) < each:
                drawn = _draw_one(rng, runtime, schedule, 4 if calibration else most_gpus, calibration)
                several += [] if drawn is None else [drawn]
            found += several
    return found


def _draw_one(
    rng: random.Random, name: str, schedule: str | None, most_gpus: int, calibration: Calibration | None
) -> Drawn | None:
    gpus = rng.choice([n for n in (1, 2, 4, 8, 16, 32) if n <= most_gpus])
    degrees, left = {"pp": 1}, gpus
    if schedule:
        if gpus == 1:
            return None
        degrees["pp"] = rng.choice([n for n in (2, 4, 8) if left % n == 0])
        left //= degrees["pp"]
    for axis in rng.sample(["tp", "cp", "dp_shard", "dp_replicate"], 4):
        degrees[axis] = rng.choice([n for n in (1, 2, 4, 8) if left % n == 0])
        left //= degrees[axis]
    degrees["dp_shard"] *= left
    model_name = rng.choice(MODELS)
    zero = None
    if name == "megatron-lm":
        degrees |= {"dp_replicate": degrees["dp_replicate"] * degrees["dp_shard"], "dp_shard": 1}
        zero = rng.choice((0, 1, 2, 3) if degrees["pp"] == 1 else (0, 1))
    sequence_parallel = degrees["tp"] > 1 and rng.random() < 0.7
    stages, micro_batches = _draw_schedule(rng, schedule, degrees["pp"])
    if micro_batches is None:
        return None
    model = load_model(model_name)
    model = replace(model, layers=max(4, degrees["pp"] * stages + rng.choice((0, 0, 3))))
    ep = 1
    if model.moe is not None:
        if degrees["tp"] > 4:
            return None
        inner = degrees["dp_shard"] * degrees["cp"] * (degrees["tp"] if sequence_parallel else 1)
        inner *= degrees["dp_replicate"] if zero is not None else 1
        ep = rng.choice([n for n in (1, 2, 4, 8) if inner % n == 0])
    plan = Plan(
        **degrees,
        zero_stage=zero,
        ep=ep,
        sequence_parallel=sequence_parallel,
        tp_overlap=rng.choice(MODES) if sequence_parallel else "none",
        cp_method=rng.choice(CP_METHODS),
        schedule=schedule,
        virtual_stages=stages,
        recompute=rng.choice(RECOMPUTE[name]),
        micro_batch_size=rng.choice((1, 2)),
        reshard_after_forward=rng.choice((None, True, False)),
    )
    compile_it = rng.random() < 0.3 and not (schedule and SCHEDULES[schedule].splits_backward)
    runtime = Runtime(name=name, param_dtype="bfloat16" if zero is not None else "float32", compile=compile_it)
    workload = Workload(
        seq_len=rng.choice((2048, 8192)),
        global_batch_size=micro_batches * plan.micro_batch_size * plan.data_parallel,
        expert_imbalance=rng.choice((1.0, 1.3)),
    )
    machine = cluster("h200x4" if calibration else rng.choice(("dgx-h100", "dgx-a100", "dgx-h200")), gpus=gpus)
    scenario = Scenario(model=model, cluster=machine, workload=workload, runtime=runtime, calibration=calibration)
    return Drawn(scenario=scenario, plan=plan, kind=_kind(plan, scenario, micro_batches))


def _draw_schedule(rng: random.Random, name: str | None, pp: int) -> tuple[int, int | None]:
    """Return (stages a rank, micro batches), few of them or many; no micro batches where there is no such table."""
    if name is None:
        return 1, rng.choice((1, 2, 4))
    kind = SCHEDULES[name]
    stages = rng.choice([count for count in (1, 2, 3) if kind.has_stages(count)])
    micro_batches = rng.choice((1, 2, pp, 2 * pp, 3 * pp, 4 * pp))
    try:
        build_schedule(name, ranks=pp, micro_batches=micro_batches, stages_per_rank=stages)
    except BadPlan:
        return stages, None
    return stages, micro_batches


def _kind(plan: Plan, scenario: Scenario, micro_batches: int) -> str:
    words = [
        scenario.runtime.name,
        f"{plan.schedule} x{plan.virtual_stages} m{micro_batches}/p{plan.pp}" if plan.schedule else f"m{micro_batches}",
    ]
    words += [
        f"{axis}{getattr(plan, axis)}"
        for axis in ("dp_replicate", "dp_shard", "tp", "cp", "ep")
        if getattr(plan, axis) > 1
    ]
    words += [plan.cp_method or ""] if plan.cp > 1 else []
    words += [f"zero{plan.zero_stage}"] if plan.zero_stage is not None else []
    words += [plan.tp_overlap] if plan.tp_overlap != "none" else []
    words += [
        scenario.model.name,
        plan.recompute,
        "compiled" if scenario.runtime.compile else "eager",
        scenario.cluster.name,
    ]
    return " ".join(words)


def tell(drawn: Drawn, *, spans: bool = True) -> Predicted:
    """Return a plan's step by the analytical model and by the simulation; without `spans`, no parts of it."""
    table = estimate_plans(drawn.scenario, [drawn.plan])
    lowered = lower_training(drawn.scenario, drawn.plan, detail=Detail.LAYER)
    run = simulate(lowered.program, lowered.costs, spans=spans)
    formula = {name: float(column[0]) for name, column in table.breakdown_s.items()}
    simulated = breakdown_s(run) if spans else {}
    names = list(dict.fromkeys([*formula, *simulated])) if spans else []
    return Predicted(
        # What a full allocator costs is not simulated.
        step_s=(float(table.step_s[0]) - formula["allocator"], run.step_s),
        parts_s={name: (formula.get(name, 0.0), simulated.get(name, 0.0)) for name in names},
    )
