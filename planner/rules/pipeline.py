"""Pipelines: stages and layers, schedules, and how many micro batches they need."""

# ruff: noqa: ARG005 - every predicate and sentence has the same signature, whether or not it reads all of it

from __future__ import annotations

import numpy as np

from planner.frameworks import SCHEDULES
from planner.legality import Grade, Question
from planner.rules.rule import Level, Mask, Rule, divisors, near, one_of, rule
from simulator.plan import Plan
from simulator.plan_columns import PlanColumns


def _is(c: PlanColumns, names: list[str]) -> Mask:
    return np.asarray(one_of(c.schedule, names) & (c.pp > 1))


def _multi(c: PlanColumns) -> Mask:
    return _is(c, [s.name for s in SCHEDULES.values() if s.least_stages > 1])


def _wrong_stage_count(c: PlanColumns, _q: Question) -> Mask:
    wrong = np.zeros(len(c), dtype=np.bool_)
    for s in SCHEDULES.values():
        few = c.virtual_stages < s.least_stages
        many = c.virtual_stages > (s.most_stages or 1 << 30)
        wrong |= _is(c, [s.name]) & (few | many)
    return wrong


def _rounds_broken(c: PlanColumns, q: Question) -> Mask:
    """In torch, interleaved schedules run in rounds of about pp micro batches, all of one size."""
    m = c.micro_batches(q.workload.global_batch_size)
    rounds = np.maximum(1, m // c.pp)
    return np.asarray(_is(c, ["Interleaved1F1B", "InterleavedZeroBubble"]) & (m % rounds != 0))


def _m(p: Plan, q: Question) -> int:
    return q.workload.global_batch_size // (p.data_parallel * p.micro_batch_size)


def _stage_text(p: Plan) -> str:
    return f"pp {p.pp} x virtual stages {p.virtual_stages} = {p.pp * p.virtual_stages} stages"


def _stage_sentence(p: Plan) -> str:
    schedule = SCHEDULES[p.schedule or "1F1B"]
    need = (
        f"exactly {schedule.least_stages}"
        if schedule.least_stages == schedule.most_stages
        else f"at least {schedule.least_stages}"
    )
    return f"schedule {schedule.name} needs {need} stage(s) on every rank, virtual_stages={p.virtual_stages}"


PIPELINE_RULES: list[Rule] = [
    rule(
        "virtual-stages",
        lambda c, q: (c.virtual_stages > 1) & (c.pp == 1),
        lambda p, q: f"virtual_stages={p.virtual_stages} without a pipeline (pp=1)",
        level=Level.BATCH,
    ),
    rule(
        "layers",
        lambda c, q: c.stages > q.model.layers,
        lambda p, q: near(
            "pp",
            list(range(1, q.model.layers // p.virtual_stages + 1)),
            f"{_stage_text(p)} for {q.model.layers} layers: some would be empty",
        ),
        level=Level.BATCH,
    ),
    rule(
        "layers-even",
        lambda c, q: (
            ~c.listed
            & (c.stages <= q.model.layers)
            & (q.model.layers % c.stages != 0)
            & ((q.model.layers + 1) % c.stages != 0)
            & ((q.model.layers + 2) % c.stages != 0)
        ),
        lambda p, q: near(
            "pp",
            [d for d in range(1, q.model.layers + 1) if q.model.layers % (d * p.virtual_stages) == 0],
            f"{q.model.layers} layers % ({_stage_text(p)}) = {q.model.layers % (p.pp * p.virtual_stages)}: Megatron-LM "
            "needs equal stages, or layers_per_stage spelt out (--pipeline-model-parallel-layout)",
        ),
        level=Level.BATCH,
        applies=lambda q: not q.framework.uneven_stages,
    ),
    rule(
        "layers-even",
        lambda c, q: (
            ~c.listed
            & (q.model.layers % c.stages != 0)
            & (((q.model.layers + 1) % c.stages == 0) | ((q.model.layers + 2) % c.stages == 0))
        ),
        lambda p, q: (
            f"{q.model.layers} layers on {_stage_text(p)} need --account-for-loss-in-pipeline-split"
            + (
                " and --account-for-embedding-in-pipeline-split"
                if (q.model.layers + 2) % (p.pp * p.virtual_stages) == 0
                else ""
            )
        ),
        grade=Grade.LEGAL,
        level=Level.BATCH,
        applies=lambda q: not q.framework.uneven_stages,
    ),
    rule(
        "layers-even",
        lambda c, q: (
            ~c.listed
            & (c.stages <= q.model.layers)
            & (q.model.layers % c.stages != 0)
            # torchtitan's splitter counts the embedding and the head as a layer each
            & ((q.framework.name != "torchtitan") | ((q.model.layers + 2) % c.stages != 0))
        ),
        lambda p, q: near(
            "pp",
            [d for d in range(1, q.model.layers + 1) if q.model.layers % (d * p.virtual_stages) == 0],
            f"{q.model.layers} layers % ({_stage_text(p)}) = {q.model.layers % (p.pp * p.virtual_stages)}: the longest "
            "stage sets the pace",
        ),
        grade=Grade.SLOW,
        level=Level.BATCH,
        applies=lambda q: q.framework.uneven_stages,
    ),
    rule(
        "schedule",
        lambda c, q: (c.pp > 1) & (c.schedule != "") & ~one_of(c.schedule, q.framework.schedules),
        lambda p, q: (
            f"{q.framework.title} has no schedule {p.schedule!r}; it has {', '.join(q.framework.schedules) or 'none'}"
        ),
        level=Level.BATCH,
    ),
    rule(
        "schedule-stages",
        _wrong_stage_count,
        lambda p, q: _stage_sentence(p),
        level=Level.BATCH,
    ),
    rule(
        "schedule-compile",
        lambda c, q: _is(c, [s.name for s in SCHEDULES.values() if s.splits_backward]),
        lambda p, q: (
            f"schedule {p.schedule} splits the backward pass, which torch.compile'd stages cannot: --no-compile"
        ),
        level=Level.BATCH,
        applies=lambda q: q.framework.torch_pipelining and q.compile,
    ),
    rule(
        "micro-batches",
        lambda c, q: _is(c, ["", "1F1B"]) & (c.micro_batches(q.workload.global_batch_size) < c.stages),
        lambda p, q: near(
            "pp",
            [d for d in divisors(p.pp) if d <= _m(p, q)],
            f"{_m(p, q)} micro batches for {_stage_text(p)}: torch's 1F1B needs at least one for each stage",
        ),
        level=Level.BATCH,
        applies=lambda q: q.framework.torch_pipelining,
    ),
    rule(
        "micro-batches",
        lambda c, q: _is(c, ["DualPipeV"]) & (c.micro_batches(q.workload.global_batch_size) < c.stages),
        lambda p, q: f"{_m(p, q)} micro batches for {_stage_text(p)}: DualPipeV needs at least one for each stage",
        level=Level.BATCH,
    ),
    rule(
        "micro-batches",
        lambda c, q: (c.pp > 1) & (c.micro_batches(q.workload.global_batch_size) < c.pp),
        lambda p, q: f"{_m(p, q)} micro batches for {p.pp} stages: the pipeline never fills",
        grade=Grade.SLOW,
        level=Level.BATCH,
    ),
    rule(
        "interleaved-micro-batches",
        lambda c, q: _multi(c) & (c.virtual_stages > 1) & (c.micro_batches(q.workload.global_batch_size) % c.pp != 0),
        lambda p, q: near(
            "pp",
            [d for d in divisors(p.pp) if _m(p, q) % d == 0],
            f"{_m(p, q)} micro batches % pp {p.pp} = {_m(p, q) % p.pp}: the interleaved schedule needs 0",
        ),
        level=Level.BATCH,
        applies=lambda q: q.framework.name == "megatron-lm",
    ),
    rule(
        "interleaved-micro-batches",
        _rounds_broken,
        lambda p, q: (
            f"{_m(p, q)} micro batches do not split into {max(1, _m(p, q) // p.pp)} equal rounds of about pp {p.pp}, "
            "as torch's interleaved schedules need"
        ),
        level=Level.BATCH,
        applies=lambda q: q.framework.torch_pipelining,
    ),
]
