"""The rules of legality, in the order in which a rejected candidate is counted under them.

A predicate answers for many plans at once: it returns a mask, true where the rule is broken. Messages are made only for
plans that are shown. `level` states which columns a rule reads, so that the enumeration can drop degrees before it adds
micro batches and policies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from simulator.columns.plan_columns import plan_columns
from simulator.config.plan import SIZES, Plan
from simulator.legality.adapters import ADAPTER_RULES
from simulator.legality.data_and_experts import DATA_RULES, EXPERT_RULES
from simulator.legality.muon import MUON_RULES
from simulator.legality.pipeline import PIPELINE_RULES
from simulator.legality.policy import EXCHANGE_RULES, POLICY_RULES
from simulator.legality.rule import Grade, ModelNotKnown, Problem, Rule, RuleFacts
from simulator.legality.savers import SAVER_RULES
from simulator.legality.shapes import SHAPE_RULES
from simulator.pipeline.stages import rank_of_stage

RULES: tuple[Rule, ...] = (
    *SHAPE_RULES,
    *EXPERT_RULES,
    *DATA_RULES,
    *ADAPTER_RULES,
    *MUON_RULES,
    *SAVER_RULES,
    *PIPELINE_RULES,
    *POLICY_RULES,
    *EXCHANGE_RULES,
)


def problems(plan: Plan, facts: RuleFacts) -> tuple[Problem, ...]:
    """Return the problems of `plan` under every rule, worst first; empty if there are none.

    Nothing is raised: a plan with impossible numbers (a degree of zero) gets an illegal Problem.
    """
    found = list(plan_problems(plan, facts))
    if not _meaningless(found):
        table = plan_columns([plan])
        found += [
            rule.problem(plan, facts) for rule in RULES if rule.applies(facts) and bool(rule.broken(table, facts)[0])
        ]
    return _worst_first(found)


def problems_without_model(plan: Plan, facts: RuleFacts) -> tuple[Problem, ...]:
    """Return the problems of `plan` under the rules that need no model, worst first; `facts` has `UNKNOWN_MODEL`."""
    found: list[Problem] = []
    with suppress(ModelNotKnown):
        found += plan_problems(plan.with_(layers_per_stage=()), facts)
    if not _meaningless(found):
        table = plan_columns([plan])
        for rule in RULES:
            with suppress(ModelNotKnown):
                if rule.applies(facts) and bool(rule.broken(table, facts)[0]):
                    found.append(rule.problem(plan, facts))
    return _worst_first(found)


def _meaningless(found: Sequence[Problem]) -> bool:
    return any(problem.rule in {"positive", "range"} for problem in found)


def _worst_first(found: Sequence[Problem]) -> tuple[Problem, ...]:
    order = {Grade.ILLEGAL: 0, Grade.SLOW: 1, Grade.LEGAL: 2}
    return tuple(sorted(found, key=lambda problem: order[problem.grade]))


def legal_ones(plans: Sequence[Plan], facts: RuleFacts) -> list[bool]:
    """Return for each plan whether it runs at all; every rule is evaluated once for all plans."""
    legal = np.array([is_legal(tuple(plan_problems(plan, facts))) for plan in plans], dtype=np.bool_)
    table = plan_columns([plan for plan, runs in zip(plans, legal, strict=True) if runs])
    broken = np.zeros(len(table), dtype=np.bool_)
    for rule in RULES if len(table) else ():
        if rule.grade is Grade.ILLEGAL and rule.applies(facts):
            broken |= rule.broken(table, facts)
    legal[legal] = ~broken
    return [bool(runs) for runs in legal]


def is_legal(found: Sequence[Problem]) -> bool:
    """Return whether a plan with these problems runs at all."""
    return not any(problem.grade is Grade.ILLEGAL for problem in found)


def plan_problems(plan: Plan, facts: RuleFacts) -> Iterator[Problem]:
    """Yield problems of what columns do not have: impossible numbers, lists of layers, placement."""
    for name in SIZES:
        if getattr(plan, name) < 1:
            message = f"{name}={getattr(plan, name)} must be at least 1"
            yield Problem(rule="positive", grade=Grade.ILLEGAL, message=message, nearest=(1,), nearest_of=name)
    # Columns are 64-bit: a product beyond that would wrap around and might look legal.
    if plan.gpus * plan.ep * plan.virtual_stages * plan.micro_batch_size >= 1 << 62:
        yield Problem(rule="range", grade=Grade.ILLEGAL, message=f"the degrees multiply to {plan.gpus:.3g} GPUs")
    stages = plan.stages
    listed = plan.layers_per_stage
    if listed and (len(listed) != stages or sum(listed) != facts.model.layers or min(listed) < 0):
        yield Problem(
            rule="layers-per-stage",
            grade=Grade.ILLEGAL,
            message=f"layers_per_stage lists {len(listed)} stages with {sum(listed)} layers; the plan has {stages} "
            f"stages, the model {facts.model.layers} layers",
        )
    elif listed and facts.framework.torch_pipelining and (bare := _ranks_without_layers(plan)):
        yield Problem(
            rule="layers-per-stage",
            grade=Grade.ILLEGAL,
            message=f"layers_per_stage leaves pipeline rank {bare[0]} nothing to train: give one of its stages a layer",
        )
    if modes := plan.recompute_per_stage:
        yield from _recompute_problems(modes, stages, facts)
    placed = plan.placement
    if placed and (len(placed) != plan.gpus or len(set(placed)) != len(placed) or min(placed) < 0):
        yield Problem(
            rule="placement",
            grade=Grade.ILLEGAL,
            message=f"placement lists {len(placed)} GPUs, {len(set(placed))} of them distinct;"
            f" the plan has {plan.gpus} ranks",
        )


def _ranks_without_layers(plan: Plan) -> tuple[int, ...]:
    """Return the pipeline ranks that hold no layer, no embedding and no head."""
    rank_of = [rank_of_stage(stage, plan.pp, plan.schedule or "") for stage in range(len(plan.layers_per_stage))]
    holding = {rank for rank, layers in zip(rank_of, plan.layers_per_stage, strict=True) if layers}
    return tuple(rank for rank in range(plan.pp) if rank not in holding | {rank_of[0], rank_of[-1]})


def _recompute_problems(modes: tuple[str, ...], stages: int, facts: RuleFacts) -> Iterator[Problem]:
    framework = facts.framework
    unknown = sorted({mode for mode in modes if mode not in framework.recomputes})
    if not framework.lists_recompute:
        message = f"{framework.title} cannot recompute stage by stage: say one mode for all in recompute"
    elif len(modes) != stages:
        message = f"recompute_per_stage names {len(modes)} modes for {stages} stages"
    elif unknown and not framework.any_recompute:
        message = (
            f"recompute {', '.join(map(repr, unknown))} is not known for {framework.title}; known: "
            f"{', '.join(framework.recomputes)}"
        )
    else:
        return
    yield Problem(rule="recompute-per-stage", grade=Grade.ILLEGAL, message=message)
