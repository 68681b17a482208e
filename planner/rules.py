"""The rules of legality: each a name, a grade, a predicate over columns, and a sentence with the numbers.

A predicate answers for many plans at once: it returns a mask, true where the rule is broken. The sentence is made only
for the plans somebody looks at. `level` says which columns a rule reads, so that the enumeration can drop a grid
before it is multiplied by micro batches and policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from planner.frameworks import SCHEDULES, ExpertGrid, KvHeads
from planner.legality import Columns, Grade, Problem, Question
from simulator.plan import Plan

Mask = NDArray[np.bool_]


class Level(IntEnum):
    """The first stage of the enumeration at which all columns of a rule are known."""

    GRID = 0  # degrees, ZeRO stage, sequence parallelism
    BATCH = 1  # micro batch, virtual stages, schedule
    POLICY = 2  # recompute, resharding, overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`say` returns the message, and optionally a field with its nearest legal values."""

    name: str
    grade: Grade
    level: Level
    broken: Callable[[Columns, Question], Mask]
    say: Callable[[Plan, Question], tuple[str, str, tuple[int, ...]]]
    applies: Callable[[Question], bool]

    def problem(self, plan: Plan, asked: Question) -> Problem:
        message, field, nearest = self.say(plan, asked)
        return Problem(rule=self.name, grade=self.grade, message=message, nearest=nearest, nearest_of=field)


def divisors(n: int) -> list[int]:
    """Return the divisors of `n` >= 1 in ascending order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def around(values: list[int], value: int) -> tuple[int, ...]:
    """Return the largest of `values` below `value` and the smallest above it."""
    below = [v for v in values if v < value]
    above = [v for v in values if v > value]
    return tuple(([max(below)] if below else []) + ([min(above)] if above else []))


Say = Callable[[Plan, Question], tuple[str, str, tuple[int, ...]] | str]
Predicate = Callable[[Columns, Question], Mask]


def _rule(
    name: str,
    broken: Predicate,
    say: Say,
    *,
    grade: Grade = Grade.ILLEGAL,
    level: Level = Level.GRID,
    applies: Callable[[Question], bool] = lambda q: True,  # noqa: ARG005 - the signature is the interface
) -> Rule:
    def full(plan: Plan, asked: Question) -> tuple[str, str, tuple[int, ...]]:
        said = say(plan, asked)
        return (said, "", ()) if isinstance(said, str) else said

    return Rule(name=name, grade=grade, level=level, broken=broken, say=full, applies=applies)


def _near(field: str, values: list[int], value: int, text: str) -> tuple[str, str, tuple[int, ...]]:
    nearest = around(values, value)
    hint = f"; nearest legal {field}: {' or '.join(map(str, nearest))}" if nearest else ""
    return text + hint, field, nearest


# --- what the arithmetic needs ------------------------------------------------------------------------------------


def _axis_rules() -> Iterator[Rule]:
    for axis, words in {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}.items():
        yield _rule(
            f"{axis}-supported",
            lambda c, q, axis=axis: np.asarray(getattr(c, axis) > 1),  # type: ignore[misc]  # mypy: default of a lambda
            lambda p, q, axis=axis, words=words: _near(  # type: ignore[misc]  # mypy: default of a lambda
                axis,
                [1],
                getattr(p, axis),
                f"{q.framework.title} has no {words} parallelism, {axis}={getattr(p, axis)}",
            ),
            applies=lambda q, axis=axis: axis not in q.framework.axes,  # type: ignore[misc]  # mypy: as above
        )


def _tensor_degrees(asked: Question) -> list[int]:
    """Return tensor-parallel degrees that the head counts of the model allow in this framework."""
    model = asked.model
    degrees = divisors(model.heads)
    if model.latent is None and asked.framework.kv_heads is KvHeads.DIVIDE:
        degrees = [d for d in degrees if model.kv_heads % d == 0]
    return degrees


def _kv_uneven(c: Columns, q: Question) -> Mask:
    """Neither whole heads per rank nor whole copies of a head."""
    kv = q.model.kv_heads
    return np.asarray((kv % c.tp != 0) & (c.tp % kv != 0))


_SIZES = [
    _rule(
        "world-size",
        lambda c, q: c.gpus != q.gpus,
        lambda p, q: (
            f"dp_replicate {p.dp_replicate} x dp_shard {p.dp_shard} x cp {p.cp} x tp {p.tp} x pp {p.pp} = {p.gpus}, "
            f"but there are {q.gpus} GPUs"
            + (f"; {q.gpus - p.gpus} would idle: pass --gpus {p.gpus} to leave them out" if p.gpus < q.gpus else "")
        ),
    ),
    _rule(
        "heads",
        lambda c, q: q.model.heads % c.tp != 0,
        lambda p, q: _near(
            "tp",
            _tensor_degrees(q),
            p.tp,
            f"{q.model.heads} query heads % tp {p.tp} = {q.model.heads % p.tp}, must be 0",
        ),
    ),
    _rule(
        "ulysses-heads",
        lambda c, q: (c.cp > 1) & (q.model.heads % (c.tp * c.cp) != 0),
        lambda p, q: (
            f"{q.framework.title} splits heads over context parallelism (Ulysses): {q.model.heads} heads % "
            f"(tp {p.tp} x cp {p.cp}) = {q.model.heads % (p.tp * p.cp)}, must be 0"
        ),
        applies=lambda q: q.framework.ulysses,
    ),
    _rule(
        "kv-heads",
        lambda c, q: q.model.kv_heads % c.tp != 0,
        lambda p, q: _near(
            "tp",
            _tensor_degrees(q),
            p.tp,
            f"{q.model.kv_heads} key/value heads % tp {p.tp} = {q.model.kv_heads % p.tp}: {q.framework.title} needs 0 "
            "(Megatron-LM would replicate them)",
        ),
        applies=lambda q: q.model.latent is None and q.framework.kv_heads is KvHeads.DIVIDE,
    ),
    _rule(
        "kv-heads",
        _kv_uneven,
        lambda p, q: _near(
            "tp",
            [d for d in divisors(q.model.heads) if q.model.kv_heads % d == 0 or d % q.model.kv_heads == 0],
            p.tp,
            f"{q.model.kv_heads} key/value heads neither divide by tp {p.tp} nor divide it, so ranks would hold parts "
            "of heads",
        ),
        applies=lambda q: q.model.latent is None and q.framework.kv_heads is KvHeads.REPLICATE,
    ),
    _rule(
        "kv-heads",
        lambda c, q: (c.tp > q.model.kv_heads) & (c.tp % q.model.kv_heads == 0),
        lambda p, q: (
            f"{q.model.kv_heads} key/value heads are copied to tp {p.tp} ranks, {p.tp // q.model.kv_heads} ranks a head"
        ),
        grade=Grade.LEGAL,
        applies=lambda q: q.model.latent is None and q.framework.kv_heads is KvHeads.REPLICATE,
    ),
    _rule(
        "kv-heads",
        lambda c, q: q.model.kv_heads % c.tp != 0,
        lambda p, q: (
            f"{q.model.kv_heads} key/value heads over tp {p.tp}: {q.framework.title} warns and runs, but attention "
            f"stops scaling beyond {q.model.kv_heads} ranks"
        ),
        grade=Grade.SLOW,
        applies=lambda q: q.model.latent is None and q.framework.kv_heads is KvHeads.SLOW,
    ),
    _rule(
        "ffn",
        lambda c, q: q.model.ffn % c.tp != 0,
        lambda p, q: _near(
            "tp",
            [d for d in _tensor_degrees(q) if q.model.ffn % d == 0],
            p.tp,
            f"feed-forward width {q.model.ffn} % tp {p.tp} = {q.model.ffn % p.tp}, must be 0",
        ),
        applies=lambda q: q.model.dense_layers > 0,
    ),
    _rule(
        "expert-ffn",
        lambda c, q: (c.ep == 1) & ((q.model.moe.ffn if q.model.moe else 0) % c.tp != 0),
        lambda p, q: f"expert width {q.model.moe.ffn if q.model.moe else 0} does not divide by tp {p.tp}; use ep > 1",
        applies=lambda q: q.model.moe is not None,
    ),
    _rule(
        "vocabulary",
        lambda c, q: q.model.vocab % c.tp != 0,
        lambda p, q: (
            f"vocabulary {q.model.vocab} % tp {p.tp} = {q.model.vocab % p.tp}: the last rank's shard is padded, its "
            "collectives are uneven"
        ),
        grade=Grade.SLOW,
        applies=lambda q: not q.framework.pads_vocabulary,
    ),
    _rule(
        "vocabulary",
        lambda c, q: q.model.vocab % c.tp != 0,
        lambda p, q: f"vocabulary {q.model.vocab} is padded to a multiple of 128 x tp {p.tp}",
        grade=Grade.LEGAL,
        applies=lambda q: q.framework.pads_vocabulary,
    ),
    _rule(
        "sequence",
        lambda c, q: q.workload.seq_len % (2 * c.cp * c.tp) != 0,
        lambda p, q: (
            f"sequence {q.workload.seq_len} % (2 x cp {p.cp} x tp {p.tp}) = "
            f"{q.workload.seq_len % (2 * p.cp * p.tp)}, must be 0 in {q.framework.title}"
        ),
        applies=lambda q: q.framework.name == "torchtitan",
    ),
    _rule(
        "sequence",
        lambda c, q: (c.cp > 1) & (q.workload.seq_len % (c.cp * (1 if q.framework.ulysses else 2)) != 0),
        lambda p, q: (
            f"sequence {q.workload.seq_len} % ({'' if q.framework.ulysses else '2 x '}cp {p.cp}) is not 0: the halves "
            "of a rank's causal share must be equal"
        ),
        applies=lambda q: q.framework.name != "torchtitan",
    ),
    _rule(
        "sequence-parallel",
        lambda c, q: c.sequence_parallel & (c.tp > 1) & ((q.workload.seq_len // c.cp) % c.tp != 0),
        lambda p, q: (
            f"sequence parallelism splits {q.workload.seq_len // p.cp} tokens over tp {p.tp}: remainder "
            f"{(q.workload.seq_len // p.cp) % p.tp}, must be 0"
        ),
    ),
    _rule(
        "sequence-parallel-supported",
        lambda c, q: c.sequence_parallel & (c.tp > 1),
        lambda p, q: f"{q.framework.title} has no sequence parallelism beside tensor parallelism",
        applies=lambda q: not q.framework.sequence_parallel,
    ),
]

# --- experts ------------------------------------------------------------------------------------------------------


def _expert_ranks(c: Columns | Plan, q: Question) -> NDArray[np.int64]:
    """Return how many ranks expert parallelism may be folded into."""
    grid = q.framework.expert_grid
    if grid is ExpertGrid.SHARD_CONTEXT_TENSOR:
        ranks = c.dp_shard * c.cp * c.tp
    elif grid is ExpertGrid.DATA:
        ranks = c.dp_replicate * c.dp_shard
    else:
        ranks = c.dp_replicate * c.dp_shard * c.cp * c.tp
    return np.asarray(ranks, dtype=np.int64)


_GRID_WORDS = {
    ExpertGrid.SHARD_CONTEXT_TENSOR: "dp_shard x cp x tp",
    ExpertGrid.DATA: "the data-parallel degree",
    ExpertGrid.WORLD: "world / pp",
    ExpertGrid.STAGE: "the ranks of a stage",
    ExpertGrid.NONE: "no ranks",
}

_EXPERTS = [
    _rule(
        "experts-dense",
        lambda c, q: c.ep > 1,
        lambda p, q: _near("ep", [1], p.ep, f"{q.model.name} has no experts, ep={p.ep}"),
        applies=lambda q: q.model.moe is None,
    ),
    _rule(
        "experts",
        lambda c, q: (q.model.moe.experts if q.model.moe else 1) % c.ep != 0,
        lambda p, q: _near(
            "ep",
            divisors(q.model.moe.experts if q.model.moe else 1),
            p.ep,
            f"{q.model.moe.experts if q.model.moe else 1} experts % ep {p.ep} is not 0",
        ),
        applies=lambda q: q.model.moe is not None,
    ),
    _rule(
        "expert-grid",
        lambda c, q: _expert_ranks(c, q) % c.ep != 0,
        lambda p, q: _near(
            "ep",
            divisors(int(_expert_ranks(p, q))),
            p.ep,
            f"ep {p.ep} must divide {_GRID_WORDS[q.framework.expert_grid]} = {int(_expert_ranks(p, q))}, so that "
            "experts are sharded over whole groups",
        ),
    ),
    _rule(
        "expert-tensor",
        lambda c, q: (c.ep > 1) & (c.tp > 1) & ((_expert_ranks(c, q) // c.tp) % c.ep != 0),
        lambda p, q: (
            f"world % (etp x ep x pp) is 0 only with --expert-tensor-parallel-size 1, not with the default etp = tp {p.tp}"
        ),
        grade=Grade.LEGAL,
        applies=lambda q: q.framework.expert_grid is ExpertGrid.WORLD,
    ),
]

# --- data parallelism ---------------------------------------------------------------------------------------------

_DATA = [
    _rule(
        "zero-stage",
        lambda c, q: ~np.isin(c.zero_stage, (-1, *q.framework.zero_stages)),
        lambda p, q: (
            f"{q.framework.title} has no ZeRO stage {p.zero_stage}; it has {', '.join(map(str, q.framework.zero_stages))}"
        ),
        applies=lambda q: bool(q.framework.zero_stages),
    ),
    _rule(
        "zero-stage",
        lambda c, q: (c.zero_stage == 1) | ((c.zero_stage > 1) & (c.dp_shard * c.cp == 1) & (c.dp_replicate > 1)),
        lambda p, q: (
            f"{q.framework.title} shards with FSDP2: say dp_shard, not ZeRO stage {p.zero_stage} over dp_replicate "
            f"{p.dp_replicate}"
        ),
        applies=lambda q: not q.framework.zero_stages,
    ),
    _rule(
        "zero-pipeline",
        lambda c, q: (c.zero_stage >= 2) & (c.pp > 1),
        lambda p, q: (
            f"{q.framework.title} refuses ZeRO-{p.zero_stage} with pipeline parallelism (pp={p.pp}): use ZeRO-1 or pp=1"
        ),
        applies=lambda q: not q.framework.zero_pipeline,
    ),
    _rule(
        "shard-degree",
        lambda c, q: (c.dp_shard > 1) & (c.zero_stage < 1),
        lambda p, q: f"{q.framework.title} shards by ZeRO stage, not by a degree: dp_shard={p.dp_shard} needs a stage",
        applies=lambda q: not q.framework.shard_degree,
    ),
    _rule(
        "shard-degree",
        lambda c, q: ((c.dp_shard > 1) | (c.zero_stage > 1)) & (c.gpus > 1),
        lambda p, q: "needs --use-megatron-fsdp (or --use-torch-fsdp2): the distributed optimizer alone is ZeRO-1",
        grade=Grade.LEGAL,
        applies=lambda q: q.framework.name == "megatron-lm",
    ),
    _rule(
        "ddp-alone",
        lambda c, q: (c.dp_replicate > 1) & (c.dp_shard * c.cp == 1) & (c.tp * c.pp > 1),
        lambda p, q: (
            f"plain replication (dp_replicate {p.dp_replicate}, dp_shard 1) does not combine with tp {p.tp} and pp "
            f"{p.pp} in {q.framework.title}: use dp_shard"
        ),
        applies=lambda q: q.framework.ddp_alone,
    ),
    _rule(
        "global-batch",
        lambda c, q: q.workload.global_batch_size % (c.dp * c.micro_batch_size) != 0,
        lambda p, q: _near(
            "micro_batch_size",
            divisors(max(1, q.workload.global_batch_size // p.data_parallel))
            if q.workload.global_batch_size % p.data_parallel == 0
            else [],
            p.micro_batch_size,
            f"global batch {q.workload.global_batch_size} % (data parallel {p.data_parallel} x micro batch "
            f"{p.micro_batch_size}) = {q.workload.global_batch_size % (p.data_parallel * p.micro_batch_size)}, must be 0",
        ),
        level=Level.BATCH,
    ),
]

# --- pipelines ----------------------------------------------------------------------------------------------------


def _is(c: Columns, names: list[str]) -> Mask:
    return np.asarray(np.isin(c.schedule, names) & (c.pp > 1))


def _multi(c: Columns) -> Mask:
    return _is(c, [s.name for s in SCHEDULES.values() if s.least_stages > 1])


def _wrong_stage_count(c: Columns, _q: Question) -> Mask:
    wrong = np.zeros(len(c), dtype=np.bool_)
    for s in SCHEDULES.values():
        few = c.virtual_stages < s.least_stages
        many = c.virtual_stages > (s.most_stages or 1 << 30)
        wrong |= _is(c, [s.name]) & (few | many)
    return wrong


def _rounds_broken(c: Columns, q: Question) -> Mask:
    """torch runs interleaved schedules in rounds of about pp micro batches, all of one size."""
    m = c.micro_batches(q.workload.global_batch_size)
    rounds = np.maximum(1, m // c.pp)
    return _is(c, ["Interleaved1F1B", "InterleavedZeroBubble"]) & (m % rounds != 0)


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


_PIPELINE = [
    _rule(
        "virtual-stages",
        lambda c, q: (c.virtual_stages > 1) & (c.pp == 1),
        lambda p, q: f"virtual_stages={p.virtual_stages} without a pipeline (pp=1)",
        level=Level.BATCH,
    ),
    _rule(
        "layers",
        lambda c, q: c.stages > q.model.layers,
        lambda p, q: _near(
            "pp",
            list(range(1, q.model.layers // p.virtual_stages + 1)),
            p.pp,
            f"{_stage_text(p)} for {q.model.layers} layers: some would be empty",
        ),
        level=Level.BATCH,
    ),
    _rule(
        "layers-even",
        lambda c, q: (
            ~c.listed
            & (c.stages <= q.model.layers)
            & (q.model.layers % c.stages != 0)
            & ((q.model.layers + 1) % c.stages != 0)
            & ((q.model.layers + 2) % c.stages != 0)
        ),
        lambda p, q: _near(
            "pp",
            [d for d in range(1, q.model.layers + 1) if q.model.layers % (d * p.virtual_stages) == 0],
            p.pp,
            f"{q.model.layers} layers % ({_stage_text(p)}) = {q.model.layers % (p.pp * p.virtual_stages)}: Megatron-LM "
            "needs equal stages, or layers_per_stage spelt out (--pipeline-model-parallel-layout)",
        ),
        level=Level.BATCH,
        applies=lambda q: not q.framework.uneven_stages,
    ),
    _rule(
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
    _rule(
        "layers-even",
        lambda c, q: ~c.listed & (c.stages <= q.model.layers) & (q.model.layers % c.stages != 0),
        lambda p, q: _near(
            "pp",
            [d for d in range(1, q.model.layers + 1) if q.model.layers % (d * p.virtual_stages) == 0],
            p.pp,
            f"{q.model.layers} layers % ({_stage_text(p)}) = {q.model.layers % (p.pp * p.virtual_stages)}: the longest "
            "stage sets the pace",
        ),
        grade=Grade.SLOW,
        level=Level.BATCH,
        applies=lambda q: q.framework.uneven_stages,
    ),
    _rule(
        "schedule",
        lambda c, q: (c.pp > 1) & (c.schedule != "") & ~np.isin(c.schedule, q.framework.schedules),
        lambda p, q: (
            f"{q.framework.title} has no schedule {p.schedule!r}; it has {', '.join(q.framework.schedules) or 'none'}"
        ),
        level=Level.BATCH,
    ),
    _rule(
        "schedule-stages",
        _wrong_stage_count,
        lambda p, q: _stage_sentence(p),
        level=Level.BATCH,
    ),
    _rule(
        "schedule-compile",
        lambda c, q: _is(c, [s.name for s in SCHEDULES.values() if s.splits_backward]),
        lambda p, q: (
            f"schedule {p.schedule} splits the backward pass, which torch.compile'd stages cannot: --no-compile"
        ),
        level=Level.BATCH,
        applies=lambda q: q.framework.torch_pipelining and q.compile,
    ),
    _rule(
        "micro-batches",
        lambda c, q: _is(c, ["", "1F1B"]) & (c.micro_batches(q.workload.global_batch_size) < c.stages),
        lambda p, q: _near(
            "pp",
            [d for d in divisors(p.pp) if d <= _m(p, q)],
            p.pp,
            f"{_m(p, q)} micro batches for {_stage_text(p)}: torch's 1F1B needs at least one for each stage",
        ),
        level=Level.BATCH,
        applies=lambda q: q.framework.torch_pipelining,
    ),
    _rule(
        "micro-batches",
        lambda c, q: _is(c, ["DualPipeV"]) & (c.micro_batches(q.workload.global_batch_size) < c.stages),
        lambda p, q: f"{_m(p, q)} micro batches for {_stage_text(p)}: DualPipeV needs at least one for each stage",
        level=Level.BATCH,
    ),
    _rule(
        "micro-batches",
        lambda c, q: (c.pp > 1) & (c.micro_batches(q.workload.global_batch_size) < c.pp),
        lambda p, q: f"{_m(p, q)} micro batches for {p.pp} stages: the pipeline never fills",
        grade=Grade.SLOW,
        level=Level.BATCH,
    ),
    _rule(
        "interleaved-micro-batches",
        lambda c, q: _multi(c) & (c.virtual_stages > 1) & (c.micro_batches(q.workload.global_batch_size) % c.pp != 0),
        lambda p, q: _near(
            "pp",
            [d for d in divisors(p.pp) if _m(p, q) % d == 0],
            p.pp,
            f"{_m(p, q)} micro batches % pp {p.pp} = {_m(p, q) % p.pp}: the interleaved schedule needs 0",
        ),
        level=Level.BATCH,
        applies=lambda q: q.framework.name == "megatron-lm",
    ),
    _rule(
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

# --- policies and the machine -------------------------------------------------------------------------------------

_POLICY = [
    _rule(
        "recompute",
        lambda c, q: ~np.isin(c.recompute, q.framework.recomputes),
        lambda p, q: (
            f"{q.framework.title} has no recompute policy {p.recompute!r}; it has {', '.join(q.framework.recomputes)}"
        ),
        level=Level.POLICY,
        applies=lambda q: not q.framework.any_recompute,
    ),
    _rule(
        "overlap",
        lambda c, q: (c.tp_overlap != "none") & ((c.tp == 1) | ~c.sequence_parallel),
        lambda p, q: f"tp_overlap={p.tp_overlap} needs tp > 1 with sequence parallelism: there is nothing to pipeline",
        level=Level.POLICY,
    ),
    _rule(
        "overlap-compile",
        lambda c, q: c.tp_overlap != "none",
        lambda p, q: (
            'asynchronous tensor parallelism needs compile.enable with "model" among its components: --compile'
        ),
        level=Level.POLICY,
        applies=lambda q: q.framework.overlap_needs_compile and not q.compile,
    ),
    _rule(
        "overlap-effective",
        lambda c, q: c.tp_overlap != "none",
        lambda p, q: (
            "with torch 2.11 asynchronous tensor parallelism is silently off unless enable_symm_mem_for_group is "
            "called, which torchtitan 0.2.2 does not (pytorch#193027): count fused ops in the compiled graph"
        ),
        grade=Grade.LEGAL,
        level=Level.POLICY,
        applies=lambda q: q.framework.torch_pipelining and q.version in {None, "0.2.2"},
    ),
    _rule(
        "overlap-pcie",
        lambda c, q: c.tp_overlap != "none",
        lambda p, q: "asynchronous tensor parallelism without NVLink: the copies compete with the matmul for PCIe",
        grade=Grade.SLOW,
        level=Level.POLICY,
        applies=lambda q: not q.nvlink,
    ),
    _rule(
        "tensor-domain",
        lambda c, q: c.tp > q.gpus_per_node,
        lambda p, q: (
            f"tp {p.tp} leaves the {q.gpus_per_node} GPUs of a node: two collectives a layer cross the network"
        ),
        grade=Grade.SLOW,
    ),
    _rule(
        "tensor-pcie",
        lambda c, q: (c.tp > 1) & (c.tp <= q.gpus_per_node),
        lambda p, q: f"tp {p.tp} without NVLink: every layer's collectives cross PCIe",
        grade=Grade.SLOW,
        applies=lambda q: not q.nvlink,
    ),
]

RULES: tuple[Rule, ...] = (*_axis_rules(), *_SIZES, *_EXPERTS, *_DATA, *_PIPELINE, *_POLICY)


def plan_problems(plan: Plan, asked: Question) -> Iterator[Problem]:
    """Yield problems with what columns do not carry: meaningless numbers, listed layers, placement."""
    sizes = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "virtual_stages", "micro_batch_size")
    for name in sizes:
        if getattr(plan, name) < 1:
            message = f"{name}={getattr(plan, name)} must be at least 1"
            yield Problem(rule="positive", grade=Grade.ILLEGAL, message=message, nearest=(1,), nearest_of=name)
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
