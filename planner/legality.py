"""May this plan run, in this framework? Three grades, because frameworks differ in more than yes and no.

The same tensor-parallel degree above the number of key/value heads is refused by torchtitan, runs with copied heads in
Megatron-LM, and runs without gain in DeepSpeed. The rules themselves are in `planner.rules`, as predicates over
columns, so that one plan and a hundred thousand candidates are judged by the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from planner.frameworks import Framework, framework_named
from simulator.model import Model
from simulator.plan import Plan
from simulator.plan_columns import plan_columns
from simulator.runtime_library import runtime_spec
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
    cp_method: str = ""  # the runtime's own method of context parallelism
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
        cp_method=runtime_spec(runtime.name).context_parallel if runtime else "",
        version=runtime.version if runtime else None,
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
        table = plan_columns([plan])
        problems += [
            rule.problem(plan, asked) for rule in RULES if rule.applies(asked) and bool(rule.broken(table, asked)[0])
        ]
    order = {Grade.ILLEGAL: 0, Grade.SLOW: 1, Grade.LEGAL: 2}
    return tuple(sorted(problems, key=lambda problem: order[problem.grade]))


def is_legal(problems: Sequence[Problem]) -> bool:
    """Return whether a plan with these problems runs at all."""
    return not any(problem.grade is Grade.ILLEGAL for problem in problems)
