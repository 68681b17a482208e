"""May this plan run, in this framework? Three grades, because frameworks differ in more than yes and no.

The same tensor-parallel degree above the number of key/value heads is refused by torchtitan, runs with copied heads in
Megatron-LM, and runs without gain in DeepSpeed. The rules themselves are in `planner.rules`, as predicates over
columns, so that one plan and a hundred thousand candidates are judged by the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from planner.frameworks import Framework, framework_named
from simulator.model import Model
from simulator.plan import Plan
from simulator.workload import Workload
from topology.cluster import Cluster, LinkKind

if TYPE_CHECKING:
    from simulator.runtime import Runtime


class Grade(StrEnum):
    LEGAL = "legal"  # runs; the message says what must be set or what will be rounded
    SLOW = "legal-but-slow"  # runs, but wastes something the message names
    ILLEGAL = "illegal"  # the framework refuses, or the arithmetic has no meaning


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a rule has to say about a plan: its name, how bad, the numbers, and the nearest legal values if any."""

    rule: str
    grade: Grade
    message: str
    nearest: tuple[int, ...] = ()
    nearest_of: str = ""  # the field of the plan that `nearest` is about


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that a rule may look at beside the plan."""

    model: Model
    workload: Workload
    framework: Framework
    gpus: int
    gpus_per_node: int
    nvlink: bool
    compile: bool = False
    version: str | None = None


def question(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    framework: str | Framework,
    *,
    runtime: Runtime | None = None,
    gpus: int | None = None,
) -> Question:
    """Return the facts the rules need. `gpus` is the number to use where it is not the whole cluster."""
    nodes = [group.node for group in cluster.groups]
    return Question(
        model=model,
        workload=workload,
        framework=framework_named(framework) if isinstance(framework, str) else framework,
        gpus=gpus if gpus is not None else cluster.gpu_count,
        gpus_per_node=cluster.gpus_per_node,
        nvlink=all(any(link.kind in {LinkKind.NVLINK, LinkKind.NVSWITCH} for link in node.links) for node in nodes),
        compile=bool(runtime and runtime.compile),
        version=runtime.version if runtime else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Plans as a struct of arrays, one entry a plan. A ZeRO stage of -1 and a schedule of "" mean None.

    `reshard` is -1 for the runtime's default, else 0 or 1; `listed` marks plans that spell out their layers per stage.
    """

    dp_replicate: NDArray[np.int64]
    dp_shard: NDArray[np.int64]
    zero_stage: NDArray[np.int64]
    tp: NDArray[np.int64]
    sequence_parallel: NDArray[np.bool_]
    cp: NDArray[np.int64]
    pp: NDArray[np.int64]
    ep: NDArray[np.int64]
    virtual_stages: NDArray[np.int64]
    schedule: NDArray[np.str_]
    micro_batch_size: NDArray[np.int64]
    recompute: NDArray[np.str_]
    tp_overlap: NDArray[np.str_]
    reshard: NDArray[np.int64]
    listed: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def dp(self) -> NDArray[np.int64]:
        return self.dp_replicate * self.dp_shard

    @property
    def gpus(self) -> NDArray[np.int64]:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def stages(self) -> NDArray[np.int64]:
        return self.pp * self.virtual_stages

    def micro_batches(self, global_batch_size: int) -> NDArray[np.int64]:
        """Micro batches a step, rounded down where they do not divide (another rule's business)."""
        return np.asarray(global_batch_size // (self.dp * self.micro_batch_size), dtype=np.int64)

    def take(self, which: NDArray[Any]) -> Columns:
        """Return the rows that `which` (a mask or indices) selects."""
        return Columns(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    def plan(self, row: int) -> Plan:
        """Return one row as a Plan."""
        reshard = int(self.reshard[row])
        zero = int(self.zero_stage[row])
        return Plan(
            dp_replicate=int(self.dp_replicate[row]),
            dp_shard=int(self.dp_shard[row]),
            zero_stage=None if zero < 0 else zero,
            tp=int(self.tp[row]),
            sequence_parallel=bool(self.sequence_parallel[row]),
            cp=int(self.cp[row]),
            pp=int(self.pp[row]),
            ep=int(self.ep[row]),
            virtual_stages=int(self.virtual_stages[row]),
            schedule=str(self.schedule[row]) or None,
            micro_batch_size=int(self.micro_batch_size[row]),
            recompute=str(self.recompute[row]),
            tp_overlap=str(self.tp_overlap[row]),
            reshard_after_forward=None if reshard < 0 else bool(reshard),
        )


def columns(plans: Sequence[Plan]) -> Columns:
    """Return plans as columns. Placement and listed layers stay behind: `check` looks at them plan by plan."""

    def integers(name: str) -> NDArray[np.int64]:
        return np.array([int(getattr(plan, name)) for plan in plans], dtype=np.int64)

    def strings(name: str) -> NDArray[np.str_]:
        return np.array([str(getattr(plan, name) or "") for plan in plans], dtype=np.str_)

    return Columns(
        dp_replicate=integers("dp_replicate"),
        dp_shard=integers("dp_shard"),
        zero_stage=np.array([-1 if p.zero_stage is None else p.zero_stage for p in plans], dtype=np.int64),
        tp=integers("tp"),
        sequence_parallel=np.array([p.sequence_parallel for p in plans], dtype=np.bool_),
        cp=integers("cp"),
        pp=integers("pp"),
        ep=integers("ep"),
        virtual_stages=integers("virtual_stages"),
        schedule=strings("schedule"),
        micro_batch_size=integers("micro_batch_size"),
        recompute=strings("recompute"),
        tp_overlap=strings("tp_overlap"),
        reshard=np.array([-1 if (r := p.reshard_after_forward) is None else int(r) for p in plans], dtype=np.int64),
        listed=np.array([bool(p.layers_per_stage) for p in plans], dtype=np.bool_),
    )


def check(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    workload: Workload,
    framework: str | Framework,
    *,
    runtime: Runtime | None = None,
    gpus: int | None = None,
) -> tuple[Problem, ...]:
    """Return what every rule of `framework` has to say about `plan`, worst first; empty when all is well.

    `gpus` is how many GPUs the plan must fill (default: the whole cluster). `runtime` tells whether the model is
    compiled, which some schedules and overlaps depend on. Nothing is raised: a plan without meaning (a degree of zero)
    gets an illegal Problem.
    """
    from planner.rules import RULES, plan_problems  # noqa: PLC0415 - rules import the types of this file

    asked = question(model, cluster, workload, framework, runtime=runtime, gpus=gpus)
    problems = list(plan_problems(plan, asked))
    if not any(problem.rule in {"positive", "range"} for problem in problems):
        table = columns([plan])
        problems += [
            rule.problem(plan, asked) for rule in RULES if rule.applies(asked) and bool(rule.broken(table, asked)[0])
        ]
    order = {Grade.ILLEGAL: 0, Grade.SLOW: 1, Grade.LEGAL: 2}
    return tuple(sorted(problems, key=lambda problem: order[problem.grade]))


def is_legal(problems: Sequence[Problem]) -> bool:
    """Return whether a plan with these problems runs at all."""
    return not any(problem.grade is Grade.ILLEGAL for problem in problems)
