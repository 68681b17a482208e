"""Checks, without torch and before any process is started, that this executor can run a plan; and gives the stages of
its ranks.

The rules are in `simulator.legality`, which the planner uses as well. Only conditions on the running process are
checked here.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.legality.frameworks import MESHWRIGHT, features
from simulator.legality.rule import Grade, RuleFacts
from simulator.legality.rules import problems
from simulator.pipeline.schedules.table import Schedule
from simulator.pipeline.stages import stage_layers
from simulator.runtimes.library import runtime_spec
from topology.errors import BadModel, BadPlan


def check(plan: Plan, model: Model, workload: Workload, runtime: Runtime) -> None:
    """Raise BadPlan or BadModel for a request that this executor cannot run exactly; it never runs something else
    instead.
    """
    refuse_unsupported(model)
    facts = RuleFacts(model=model, workload=workload, framework=MESHWRIGHT, runtime=runtime)
    refused = [problem.message for problem in problems(plan, facts) if problem.grade is Grade.ILLEGAL]
    if refused:
        raise BadPlan("the executor cannot run this plan", why="; ".join(refused))


def cp_method(plan: Plan, runtime: Runtime) -> str:
    """Return how keys and values are exchanged: as in the plan, or as in the runtime if the plan leaves it open."""
    return plan.cp_method or runtime_spec(runtime.name).context_parallel


def refuse_unsupported(model: Model) -> None:
    """Raise BadModel naming everything that this decoder cannot express."""
    missing = [name for name in features(model) if name in MESHWRIGHT.networks_without]
    if missing:
        raise BadModel(
            f"the executor's model has no {', no '.join(missing)}",
            why=f"{model.name} needs it; a run without it would measure another model",
            remedy="run a Llama, Qwen or Mixtral shape, or export the plan to a framework",
        )


# --- pipeline stages ---


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """One stage's share of the model."""

    index: int
    layers: range
    first: bool
    last: bool


def split(model: Model, plan: Plan, table: Schedule, rank: int, *, runtime: str) -> tuple[StagePart, ...]:
    """Return the stages that pipeline rank `rank` holds. Raises BadPlan when layers and stages do not fit."""
    counts = stage_layers(model.layers, plan, runtime_spec(runtime).pipeline)
    if len(counts) != table.stages or sum(counts) != model.layers:
        raise BadPlan(f"{model.layers} layers do not spread over {table.stages} stages as {counts}")
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(
        StagePart(
            index=stage,
            layers=range(starts[stage], starts[stage] + counts[stage]),
            first=stage == 0,
            last=stage == table.stages - 1,
        )
        for stage in table.stages_of(rank)
    )
