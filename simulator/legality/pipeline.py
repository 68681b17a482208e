"""Pipelines: stages and layers, schedules, and how many micro batches they need."""

# ruff: noqa: ARG005 - every predicate and sentence has the same signature, whether or not it reads all of it

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from simulator.columns.plan_columns import PlanColumns
from simulator.config.plan import Plan, default_schedule
from simulator.legality.rule import (
    Grade,
    Mask,
    Rule,
    RuleFacts,
    batch_rule,
    divisors,
    one_of,
    policy_rule,
    rule,
    with_nearest,
)
from simulator.pipeline.schedules.kind import ScheduleKind
from simulator.pipeline.schedules.registry import SCHEDULES, schedules_that
from simulator.pipeline.stages import stage_layers
from simulator.runtimes.library import is_described, runtime_spec

# Largest ranks x ranks x stages per rank for which a schedule's table is built; it has about as many passes. 128 ranks
# of eight stages take half a minute on one core.
MOST_PASSES = 1 << 17


def _is(c: PlanColumns, names: Sequence[str]) -> Mask:
    """Return for each plan whether its pipeline has one of some schedules, by name or by default."""
    unnamed = c.schedule == ""
    found = one_of(c.schedule, names)
    for several in (1, 2):
        if default_schedule(several) in names:
            found |= unnamed & ((c.virtual_stages > 1) == (several > 1))
    return np.asarray(found & (c.pp > 1))


def _that(c: PlanColumns, fact: Callable[[ScheduleKind], bool]) -> Mask:
    """Return for each plan whether its pipeline's schedule, named or default, has a property."""
    return _is(c, schedules_that(fact))


def _name(p: Plan) -> str:
    return p.schedule_name


def _ends(q: RuleFacts) -> tuple[int, int]:
    """Return for how many layers embedding and head count where the runtime divides layers by itself."""
    name = q.runtime.name if q.runtime else q.framework.name
    if not is_described(name):
        return 0, 0
    spec = runtime_spec(name).pipeline
    return int(spec.embedding_weight), int(spec.head_weight)


def _counted(q: RuleFacts) -> int:
    """Return the number of layers divided over stages, embedding and head counted if they are."""
    return q.model.layers + sum(_ends(q))


def _filled_by_ends(c: PlanColumns, q: RuleFacts) -> Mask:
    """Return for each plan whether stages can hold only the embedding or the head, in Megatron-LM: where they count as
    layers by flags, or in a stated layout.
    """
    if q.framework.uneven_stages:
        return np.zeros(len(c), dtype=np.bool_)
    return np.asarray((c.stages <= q.model.layers + 2) & (c.listed | (c.stages > 1)))


def _bare_stages(c: PlanColumns, q: RuleFacts) -> Mask:
    """Return for each plan whether the runtime's own split would take more layers from an end than it has, since
    embedding and head count too.
    """
    no_first = -(-_counted(q) // c.stages) < _ends(q)[0]
    short = no_first | (_counted(q) // c.stages < _ends(q)[1])
    return np.asarray((c.stages > 1) & ~c.listed & short)


def _wrong_stage_count(c: PlanColumns, _q: RuleFacts) -> Mask:
    wrong = np.zeros(len(c), dtype=np.bool_)
    for kind in SCHEDULES.values():
        few, many = c.virtual_stages < kind.least_stages, c.virtual_stages > (kind.most_stages or np.inf)
        wrong |= _is(c, [kind.name]) & (few | many)
    return wrong


def _rounds_broken(c: PlanColumns, q: RuleFacts) -> Mask:
    """Interleaved schedules run in rounds of about pp micro batches, all of one size."""
    m = c.rounds(q.workload.global_batch_size)
    rounds = np.maximum(1, m // c.pp)
    return np.asarray(_that(c, lambda kind: kind.rounds) & (m % rounds != 0))


def _m(p: Plan, q: RuleFacts) -> int:
    return q.workload.global_batch_size // (p.data_parallel * p.micro_batch_size)


def _stage_text(p: Plan) -> str:
    return f"pp {p.pp} x virtual stages {p.virtual_stages} = {p.stages} stages"


def _stage_sentence(p: Plan) -> str:
    schedule = SCHEDULES[_name(p)]
    need = (
        f"exactly {schedule.least_stages}"
        if schedule.least_stages == schedule.most_stages
        else f"at least {schedule.least_stages}"
    )
    stages = "stage" if schedule.least_stages == 1 else "stages"
    return f"schedule {schedule.name} needs {need} {stages} on every rank, virtual_stages={p.virtual_stages}"


def _layer_counts(p: Plan, q: RuleFacts) -> str:
    """Return the layers of each stage as the runtime divides them, with equal neighbours as one: `3, 14 x 4, 2`."""
    spec = runtime_spec(q.runtime.name if q.runtime else q.framework.name).pipeline
    runs = [(count, len(list(run))) for count, run in groupby(stage_layers(q.model.layers, p, spec))]
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in runs)


PIPELINE_RULES: list[Rule] = [
    batch_rule(
        "virtual-stages",
        lambda c, q: (c.virtual_stages > 1) & (c.pp == 1),
        lambda p, q: f"virtual_stages={p.virtual_stages} without a pipeline (pp=1)",
    ),
    batch_rule(
        "pipeline-length",
        lambda c, q: c.pp * c.stages > MOST_PASSES,
        lambda p, q: with_nearest(
            "pp",
            [1 << power for power in range(10) if (p.virtual_stages << 2 * power) <= MOST_PASSES],
            f"{_stage_text(p)}: schedules of more than {MOST_PASSES:,} ranks x ranks x virtual stages are not followed",
        ),
    ),
    batch_rule(
        "layers",
        lambda c, q: (c.stages > q.model.layers) & ~_filled_by_ends(c, q),
        lambda p, q: with_nearest(
            "pp",
            list(range(1, q.model.layers // p.virtual_stages + 1)),
            f"{_stage_text(p)} for {q.model.layers} layers: some would be empty",
        ),
        applies=lambda q: not q.framework.empty_stages,
    ),
    batch_rule(
        "layers",
        _bare_stages,
        lambda p, q: with_nearest(
            "pp",
            [d for d in range(1, p.pp) if _counted(q) // (d * p.virtual_stages) > 0],
            f"{_stage_text(p)} for {q.model.layers} layers, an embedding and a head: some would hold nothing",
        ),
        applies=lambda q: q.framework.empty_stages,
    ),
    batch_rule(
        "layers",
        lambda c, q: (c.stages > q.model.layers) & ~_bare_stages(c, q),
        lambda p, q: f"{_stage_text(p)} for {q.model.layers} layers: some hold none",
        grade=Grade.SLOW,
        applies=lambda q: q.framework.empty_stages,
    ),
    rule(
        "tied-embeddings",
        lambda c, q: c.pp > 1,
        lambda p, q: with_nearest(
            "pp",
            [1],
            f"{q.model.name} ties its embedding and its head, which pp {p.pp} puts on different stages:"
            f" {q.framework.title} does not add their gradients across the pipeline",
        ),
        applies=lambda q: q.model.tied_embeddings and not q.framework.tied_pipeline,
    ),
    batch_rule(
        "layers-even",
        lambda c, q: (
            ~c.listed
            & (q.model.layers % c.stages != 0)
            & ((q.model.layers + 1) % c.stages != 0)
            & ((q.model.layers + 2) % c.stages != 0)
        ),
        lambda p, q: (
            f"{q.model.layers} layers on {_stage_text(p)} need --pipeline-model-parallel-layout:"
            f" layers {_layer_counts(p, q)} by stage"
        ),
        grade=Grade.LEGAL,
        applies=lambda q: not q.framework.uneven_stages,
    ),
    batch_rule(
        "layers-even",
        lambda c, q: (
            ~c.listed
            & (q.model.layers % c.stages != 0)
            & (((q.model.layers + 1) % c.stages == 0) | ((q.model.layers + 2) % c.stages == 0))
        ),
        lambda p, q: (
            f"{q.model.layers} layers on {_stage_text(p)} need --account-for-loss-in-pipeline-split"
            + (" and --account-for-embedding-in-pipeline-split" if (q.model.layers + 2) % p.stages == 0 else "")
        ),
        grade=Grade.LEGAL,
        applies=lambda q: not q.framework.uneven_stages,
    ),
    batch_rule(
        "layers-even",
        lambda c, q: (
            ~c.listed & (c.stages <= q.model.layers) & (q.model.layers % c.stages != 0) & (_counted(q) % c.stages != 0)
        ),
        lambda p, q: with_nearest(
            "pp",
            [d for d in range(1, q.model.layers + 1) if q.model.layers % (d * p.virtual_stages) == 0],
            f"{q.model.layers} layers % ({_stage_text(p)}) = {q.model.layers % p.stages}: the longest "
            "stage is what others wait for",
        ),
        grade=Grade.SLOW,
        applies=lambda q: q.framework.uneven_stages,
    ),
    batch_rule(
        "schedule",
        lambda c, q: (c.pp > 1) & (c.schedule != "") & ~one_of(c.schedule, q.framework.schedules),
        lambda p, q: (
            f"{q.framework.title} has no schedule {_name(p)!r}; it has {', '.join(q.framework.schedules) or 'none'}"
        ),
    ),
    batch_rule("schedule-stages", _wrong_stage_count, lambda p, q: _stage_sentence(p)),
    batch_rule(
        "schedule-compile",
        lambda c, q: _that(c, lambda kind: kind.splits_backward),
        lambda p, q: f"schedule {_name(p)} splits the backward pass, which torch.compile'd stages cannot: --no-compile",
        applies=lambda q: q.framework.torch_pipelining and q.compile,
    ),
    # torch/distributed/pipelining/_backward.py: stage_backward_weight asks autograd for each operator's weights by
    # themselves, and every such call runs a checkpoint again (torch/utils/checkpoint.py), nine times a Llama block,
    # also where checkpoints do not stop early: such a step of our executor took twice as long (fresh.jsonl, 27/10).
    policy_rule(
        "schedule-recompute",
        "recompute",
        lambda c, q: _that(c, lambda kind: kind.splits_backward) & (c.recompute != "none"),
        lambda p, q: (
            f"schedule {_name(p)} with recompute {p.recompute}: it splits the backward pass, in which torch runs a"
            " recomputed block again for each of its weights, and may fail if operators are selected; recompute none,"
            " or another schedule"
        ),
        applies=lambda q: q.framework.torch_pipelining,
    ),
    batch_rule(
        "micro-batches",
        lambda c, q: (
            _that(c, lambda kind: kind.every_stage_in_torch) & (c.rounds(q.workload.global_batch_size) < c.stages)
        ),
        lambda p, q: with_nearest(
            "pp",
            [d for d in divisors(p.pp) if d <= _m(p, q)],
            f"{_m(p, q)} micro batches for {_stage_text(p)}: torch's {_name(p)} needs at least one for each stage",
        ),
        applies=lambda q: q.framework.torch_pipelining,
    ),
    batch_rule(
        "micro-batches",
        lambda c, q: _that(c, lambda kind: kind.every_stage) & (c.rounds(q.workload.global_batch_size) < c.stages),
        lambda p, q: f"{_m(p, q)} micro batches for {_stage_text(p)}: {_name(p)} needs at least one for each stage",
    ),
    batch_rule(
        "micro-batches",
        lambda c, q: (c.pp > 1) & (c.rounds(q.workload.global_batch_size) < c.pp),
        lambda p, q: f"{_m(p, q)} micro batches for {p.pp} stages: the pipeline never fills",
        grade=Grade.SLOW,
    ),
    batch_rule(
        "interleaved-micro-batches",
        lambda c, q: (
            _that(c, lambda kind: kind.least_stages > 1)
            & (c.virtual_stages > 1)
            & (c.rounds(q.workload.global_batch_size) % c.pp != 0)
        ),
        lambda p, q: with_nearest(
            "pp",
            [d for d in divisors(p.pp) if _m(p, q) % d == 0],
            f"{_m(p, q)} micro batches are not divisible by pp {p.pp}, as the interleaved schedule needs",
        ),
        applies=lambda q: q.framework.interleaves_by_rank,
    ),
    batch_rule(
        "interleaved-micro-batches",
        _rounds_broken,
        lambda p, q: (
            f"{_m(p, q)} micro batches do not split into {max(1, _m(p, q) // p.pp)} equal rounds of about pp {p.pp}, "
            f"as {'torch' if q.framework.torch_pipelining else _name(p)}'s interleaved rounds need"
        ),
        applies=lambda q: not q.framework.interleaves_by_rank,
    ),
]
