"""Rules of degrees: which exist, and which of heads, widths, vocabulary and sequence they must divide."""

# ruff: noqa: ARG005 - every predicate and sentence has the same signature, whether or not it reads all of it

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_columns import PlanColumns
from simulator.config.model import Model
from simulator.config.optimizers import OPTIMIZERS
from simulator.legality.frameworks import KvHeads, features
from simulator.legality.rule import Grade, Mask, Rule, RuleFacts, divisors, rule, with_nearest
from simulator.runtimes.library import spec_for


def _pages(q: RuleFacts) -> bool:
    return q.runtime is not None and q.runtime.optimizer in OPTIMIZERS and OPTIMIZERS[q.runtime.optimizer].paged > 0


def _updates_flat(q: RuleFacts) -> bool:
    """Whether torch's optimizers update plain tensors (FSDP1 and ZeRO: shards of them)."""
    spec = spec_for(q.runtime) if q.runtime is not None else None
    return spec is not None and spec.flat_units


def _updates_dtensors(q: RuleFacts) -> bool:
    """Whether any of torch's optimizers can be used, and divided parameters are DTensors."""
    spec = spec_for(q.runtime) if q.runtime is not None else None
    return spec is not None and not spec.state.master_weights and "torchtitan" not in spec.names


def _axis_rules() -> Iterator[Rule]:
    for axis, words in {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}.items():
        yield rule(
            f"{axis}-supported",
            lambda c, q, axis=axis: np.asarray(getattr(c, axis) > 1),  # type: ignore[misc]  # mypy: default of a lambda
            lambda p, q, axis=axis, words=words: with_nearest(  # type: ignore[misc]  # mypy: default of a lambda
                axis, [1], f"{q.framework.title} has no {words} parallelism, {axis}={getattr(p, axis)}"
            ),
            applies=lambda q, axis=axis: axis not in q.framework.axes,  # type: ignore[misc]  # mypy: as above
        )


def _tensor_degrees(facts: RuleFacts) -> list[int]:
    """Return tensor-parallel degrees that the head counts of the model allow in this framework."""
    model = facts.model
    degrees = divisors(model.heads)
    if model.latent is None and facts.framework.kv_heads is KvHeads.DIVIDE:
        degrees = [d for d in degrees if model.kv_heads % d == 0]
    return degrees


def _some_rank_empty(width: int, tp: NDArray[np.int64] | int) -> Mask:
    """Return for each plan whether some rank has no part of `width` when it is divided like torch.chunk does."""
    return np.asarray(-(-width // tp) * (tp - 1) >= width) & (np.asarray(tp) > 1)


def _undivided(width: int, c: PlanColumns, q: RuleFacts) -> Mask:
    """Return for each plan whether tensor parallelism cannot divide `width`."""
    return _some_rank_empty(width, c.tp) if q.framework.uneven_widths else np.asarray(width % c.tp != 0)


def _width_rules(name: str, words: str, of: Callable[[Model], int], among: Callable[[PlanColumns], Mask]) -> list[Rule]:
    """Return the rules for one width that tensor parallelism divides, on the plans `among`."""
    return [
        rule(
            name,
            lambda c, q: among(c) & _undivided(of(q.model), c, q),
            lambda p, q: with_nearest(
                "tp",
                [d for d in _tensor_degrees(q) if of(q.model) % d == 0],
                f"{words} {of(q.model)} is not divisible by tp {p.tp}"
                if not q.framework.uneven_widths
                else f"{words} {of(q.model)} over tp {p.tp} leaves ranks without any",
            ),
            applies=lambda q: of(q.model) > 0,
        ),
        rule(
            name,
            lambda c, q: among(c) & (of(q.model) % c.tp != 0) & ~_undivided(of(q.model), c, q),
            lambda p, q: (
                f"{words} {of(q.model)} % tp {p.tp} = {of(q.model) % p.tp}: the others wait for the widest rank"
            ),
            grade=Grade.SLOW,
            applies=lambda q: q.framework.uneven_widths and of(q.model) > 0,
        ),
    ]


def _kv_uneven(c: PlanColumns, q: RuleFacts) -> Mask:
    """Ranks have neither whole heads nor whole copies of a head."""
    kv = q.model.kv_heads
    return np.asarray((kv % c.tp != 0) & (c.tp % kv != 0))


SHAPE_RULES: list[Rule] = [
    rule(
        "reach",
        lambda c, q: np.asarray(c.gpus > q.reach),
        lambda p, q: f"a plan of {p.gpus} GPU{'s' if p.gpus > 1 else ''} cannot run here: {q.reach_reason}",
        applies=lambda q: q.reach_reason != "",
    ),
    rule(
        "network",
        lambda c, q: np.full(len(c), not q.framework.networks_without.isdisjoint(features(q.model))),
        lambda p, q: (
            f"{q.framework.title} has no "
            f"{', no '.join(name for name in features(q.model) if name in q.framework.networks_without)}, and "
            f"{q.model.name} needs it: choose a Llama, Qwen, DeepSeek or Mixtral shape, or another framework"
        ),
        applies=lambda q: bool(q.framework.networks_without),
    ),
    rule(
        "types",
        lambda c, q: np.full(len(c), not set(q.dtypes) <= set(q.framework.dtypes)),
        lambda p, q: (
            f"{q.framework.title} has no type {', '.join(sorted(set(q.dtypes) - set(q.framework.dtypes)))}; it has "
            f"{', '.join(q.framework.dtypes)}"
        ),
        applies=lambda q: bool(q.framework.dtypes),
    ),
    rule(
        "types",
        lambda c, q: (c.cp > 1) & np.full(len(c), q.activation_dtype not in {"", *q.framework.cp_dtypes}),
        lambda p, q: (
            f"context parallelism of {q.framework.title} shards fused attention in"
            f" {' and '.join(q.framework.cp_dtypes)} only, and {q.activation_dtype} has another kernel:"
            " cp 1, or mixed precision"
        ),
        applies=lambda q: bool(q.framework.cp_dtypes),
    ),
    rule(
        "optimizer",
        lambda c, q: np.full(len(c), q.runtime is not None and q.runtime.optimizer not in q.framework.optimizers),
        lambda p, q: (
            f"{q.framework.title} has no optimizer {q.runtime.optimizer if q.runtime else ''}; it has "
            f"{', '.join(q.framework.optimizers)}"
        ),
        applies=lambda q: bool(q.framework.optimizers),
    ),
    rule(  # bitsandbytes, issue 1633: its kernels do not support DTensors; torchtitan: components/optimizer.py
        "paged",
        lambda c, q: (c.tp > 1) | (c.dp_shard * c.cp > 1) if _updates_dtensors(q) else np.full(len(c), True),
        lambda p, q: (
            f"paged optimizers are bitsandbytes', which do not run on the DTensors of {q.framework.title}: dp_replicate"
            " in the place of dp_shard, cp and tp, or adamw8bit (torchao's)"
            if _updates_dtensors(q)
            else f"{q.framework.title} has optimizers of its own, none of them paged"
        ),
        applies=lambda q: _pages(q) and not _updates_flat(q),
    ),
    rule(
        "low-precision",
        lambda c, q: np.full(len(c), True),
        lambda p, q: q.undescribed_low_precision or q.no_low_precision,
        applies=lambda q: bool(q.undescribed_low_precision or q.no_low_precision),
    ),
    rule(
        "not-modelled",
        lambda c, q: np.full(len(c), True),
        lambda p, q: q.runtime.not_modelled if q.runtime else "",
        applies=lambda q: q.runtime is not None and bool(q.runtime.not_modelled),
    ),
    rule(
        "positions",
        lambda c, q: np.full(len(c), q.workload.seq_len > q.model.learned_positions),
        lambda p, q: (
            f"sequence {q.workload.seq_len} is beyond the table of {q.model.learned_positions} learned positions of "
            f"{q.model.name}: the tokens after them have none"
        ),
        applies=lambda q: 0 < q.model.learned_positions < q.workload.seq_len,
    ),
    rule(
        "positions",
        lambda c, q: np.full(len(c), q.workload.seq_len > q.model.max_positions),
        lambda p, q: (
            f"sequence {q.workload.seq_len} is beyond the {q.model.max_positions} positions that {q.model.name}"
            " states: its position encoding has to be extended"
        ),
        grade=Grade.LEGAL,
        applies=lambda q: not q.model.learned_positions and 0 < q.model.max_positions < q.workload.seq_len,
    ),
    *_axis_rules(),
    rule(
        "world-size",
        lambda c, q: c.gpus != q.gpus,
        lambda p, q: (
            f"dp_replicate {p.dp_replicate} x dp_shard {p.dp_shard} x cp {p.cp} x tp {p.tp} x pp {p.pp} = {p.gpus}, "
            f"but there are {q.gpus} GPUs"
            + (f"; {q.gpus - p.gpus} would idle: pass --gpus {p.gpus} to leave them out" if p.gpus < q.gpus else "")
        ),
        applies=lambda q: q.gpus > 0,
    ),
    rule(
        "heads",
        lambda c, q: q.model.heads % c.tp != 0,
        lambda p, q: with_nearest(
            "tp", _tensor_degrees(q), f"{q.model.heads} query heads are not divisible by tp {p.tp}"
        ),
    ),
    rule(
        "ulysses-heads",
        lambda c, q: (c.cp > 1) & (q.model.heads % (c.tp * c.cp) != 0),
        lambda p, q: (
            f"{q.framework.title} splits heads over context parallelism (Ulysses): {q.model.heads} heads are "
            f"not divisible by tp {p.tp} x cp {p.cp}"
        ),
        applies=lambda q: q.framework.ulysses,
    ),
    rule(
        "kv-heads",
        lambda c, q: q.model.kv_heads % c.tp != 0,
        lambda p, q: with_nearest(
            "tp",
            _tensor_degrees(q),
            f"{q.model.kv_heads} key/value heads are not divisible by tp {p.tp}, as {q.framework.title} needs"
            + ("" if p.tp % q.model.kv_heads else " (Megatron-LM would replicate them)"),
        ),
        applies=lambda q: q.model.latent is None and q.framework.kv_heads is KvHeads.DIVIDE,
    ),
    rule(
        "kv-heads",
        _kv_uneven,
        lambda p, q: with_nearest(
            "tp",
            [d for d in divisors(q.model.heads) if q.model.kv_heads % d == 0 or d % q.model.kv_heads == 0],
            f"{q.model.kv_heads} key/value heads neither divide by tp {p.tp} nor divide it, so ranks would hold parts "
            "of heads",
        ),
        applies=lambda q: q.model.latent is None and q.framework.kv_heads is KvHeads.REPLICATE,
    ),
    rule(
        "kv-heads",
        lambda c, q: (c.tp > q.model.kv_heads) & (c.tp % q.model.kv_heads == 0),
        lambda p, q: (
            f"{q.model.kv_heads} key/value heads are copied to tp {p.tp} ranks, {p.tp // q.model.kv_heads} ranks a head"
        ),
        grade=Grade.LEGAL,
        applies=lambda q: q.model.latent is None and q.framework.kv_heads is KvHeads.REPLICATE,
    ),
    rule(
        "kv-heads",
        lambda c, q: q.model.kv_heads % c.tp != 0,
        lambda p, q: (
            f"{q.model.kv_heads} key/value heads over tp {p.tp}: {q.framework.title} warns and runs, but attention "
            f"stops scaling beyond {q.model.kv_heads} ranks"
        ),
        grade=Grade.SLOW,
        applies=lambda q: q.model.latent is None and q.framework.kv_heads is KvHeads.SLOW,
    ),
    *_width_rules("ffn", "feed-forward width", lambda m: m.ffn if m.dense_layers else 0, lambda c: c.tp > 1),
    *_width_rules(
        "expert-ffn", "expert width", lambda m: m.moe.ffn if m.moe else 0, lambda c: (c.ep == 1) & (c.etp < 1)
    ),
    rule(
        "vocabulary",
        lambda c, q: q.model.vocab % c.tp != 0,
        lambda p, q: (
            f"vocabulary {q.model.vocab} is not divisible by tp {p.tp}: the last rank's shard is padded, and "
            "collectives are uneven"
        ),
        grade=Grade.SLOW,
        applies=lambda q: not q.framework.pads_vocabulary,
    ),
    rule(
        "vocabulary",
        lambda c, q: _some_rank_empty(q.model.vocab, c.tp),
        lambda p, q: f"vocabulary {q.model.vocab} over tp {p.tp} leaves ranks without any",
        applies=lambda q: q.framework.uneven_widths,
    ),
    rule(
        "vocabulary",
        lambda c, q: q.model.vocab % c.tp != 0,
        lambda p, q: f"vocabulary {q.model.vocab} is padded to a multiple of 128 x tp {p.tp}",
        grade=Grade.LEGAL,
        applies=lambda q: q.framework.pads_vocabulary,
    ),
    rule(
        "sequence",
        lambda c, q: (c.cp * c.tp > 1) & (q.workload.seq_len % (2 * c.cp * c.tp) != 0),
        lambda p, q: (
            f"sequence {q.workload.seq_len} is not divisible by 2 x cp {p.cp} x tp {p.tp}, as {q.framework.title} needs"
        ),
        applies=lambda q: q.framework.sequence_over_tensor,
    ),
    rule(
        "sequence",
        lambda c, q: (c.cp > 1) & (q.workload.seq_len % (c.cp * (1 if q.framework.ulysses else 2)) != 0),
        lambda p, q: (
            f"sequence {q.workload.seq_len} is not divisible by {'' if q.framework.ulysses else '2 x '}cp {p.cp}: "
            + ("ranks have equal pieces" if q.framework.ulysses else "each rank has two pieces of equal length")
        ),
        applies=lambda q: not q.framework.sequence_over_tensor,
    ),
    rule(
        "loss-pieces",
        lambda c, q: q.workload.seq_len % (c.cp * q.loss_pieces) != 0,
        lambda p, q: (
            f"sequence {q.workload.seq_len} over cp {p.cp} is not a multiple of the {q.loss_pieces} equal pieces in"
            f" which this version of {q.framework.title} computes the loss"
        ),
        applies=lambda q: q.loss_pieces > 1,
    ),
    rule(
        "sequence-parallel",
        lambda c, q: c.sequence_parallel & (c.tp > 1) & ((q.workload.seq_len // c.cp) % c.tp != 0),
        lambda p, q: (
            f"sequence parallelism splits {q.workload.seq_len // p.cp} tokens, which are not divisible by tp {p.tp}"
        ),
    ),
    rule(
        "sequence-parallel-supported",
        lambda c, q: c.sequence_parallel & (c.tp > 1),
        lambda p, q: f"{q.framework.title} has no sequence parallelism with tensor parallelism",
        applies=lambda q: not q.framework.sequence_parallel,
    ),
]
