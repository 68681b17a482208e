"""The rules of legality, in the order in which a rejected candidate is counted under them.

A predicate answers for many plans at once: it returns a mask, true where the rule is broken. The sentence is made only
for the plans somebody looks at. `level` says which columns a rule reads, so that the enumeration can drop a grid
before it is multiplied by micro batches and policies.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.legality import Grade, Problem, Question
from planner.rules.data import DATA_RULES, EXPERT_RULES
from planner.rules.pipeline import PIPELINE_RULES
from planner.rules.policy import POLICY_RULES
from planner.rules.rule import Level, Rule, divisors
from planner.rules.shapes import SHAPE_RULES
from simulator.plan import Plan

__all__ = ["RULES", "Level", "Rule", "divisors", "plan_problems"]

RULES: tuple[Rule, ...] = (*SHAPE_RULES, *EXPERT_RULES, *DATA_RULES, *PIPELINE_RULES, *POLICY_RULES)


def plan_problems(plan: Plan, asked: Question) -> Iterator[Problem]:
    """Yield problems with what columns do not carry: meaningless numbers, listed layers, placement."""
    sizes = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "virtual_stages", "micro_batch_size")
    for name in sizes:
        if getattr(plan, name) < 1:
            message = f"{name}={getattr(plan, name)} must be at least 1"
            yield Problem(rule="positive", grade=Grade.ILLEGAL, message=message, nearest=(1,), nearest_of=name)
    # Columns are 64-bit: a product beyond that would wrap around and might look legal.
    if plan.gpus * plan.ep * plan.virtual_stages * plan.micro_batch_size >= 1 << 62:
        yield Problem(rule="range", grade=Grade.ILLEGAL, message=f"the degrees multiply to {plan.gpus:.3g} GPUs")
    stages = plan.pp * plan.virtual_stages
    listed = plan.layers_per_stage
    if listed and (len(listed) != stages or sum(listed) != asked.model.layers or min(listed) < 0):
        yield Problem(
            rule="layers-per-stage",
            grade=Grade.ILLEGAL,
            message=f"layers_per_stage lists {len(listed)} stages with {sum(listed)} layers; the plan has {stages} "
            f"stages, the model {asked.model.layers} layers",
        )
    placed = plan.placement
    if placed and (len(placed) != plan.gpus or len(set(placed)) != len(placed) or min(placed) < 0):
        yield Problem(
            rule="placement",
            grade=Grade.ILLEGAL,
            message=f"placement lists {len(placed)} GPUs, {len(set(placed))} of them distinct; the plan has {plan.gpus} ranks",
        )
