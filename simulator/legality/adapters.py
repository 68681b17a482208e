"""Adapters and frozen weights: which kinds a framework trains, and which packed weights it can shard.

Sources: torchtitan PR #3264 (LoRA, May 2026: no dropout); Megatron-Bridge, training/peft (LoRA, DoRA); peft's guides of
FSDP and DeepSpeed (QLoRA with ZeRO-3 and FSDP since 0.10: `bnb_4bit_quant_storage` stores packed weights in a
floating-point type, the only types that are sharded) and bitsandbytes, docs/source/fsdp_qlora.md; torchtune PR #855
(NF4Tensor under FSDP2); fms-acceleration, plugins/accelerated-peft (GPTQ under FSDP); llm-foundry's `peft_config`.
"""

# ruff: noqa: ARG005 - every predicate and sentence has the same signature, whether or not it reads all of it

from __future__ import annotations

import numpy as np

from simulator.columns.plan_columns import PlanColumns
from simulator.config.adapter import ALL_LINEAR, Adapter, projections_named
from simulator.legality.frameworks import FRAMEWORKS
from simulator.legality.rule import Mask, Rule, RuleFacts, rule


def _adapter(q: RuleFacts) -> Adapter:
    """Return the adapter of a question with adapters."""
    assert q.runtime is not None  # noqa: S101 - rules apply to such questions only
    assert q.runtime.adapter is not None  # noqa: S101 - likewise
    return q.runtime.adapter


def _has(q: RuleFacts) -> bool:
    return q.runtime is not None and q.runtime.adapter is not None


def _packed(q: RuleFacts) -> bool:
    return _has(q) and _adapter(q).packed


def _kept(q: RuleFacts) -> bool:
    """Return whether a framework supports frozen weights in the packed type of a question."""
    return _adapter(q).base_weights in q.framework.packed_bases


def _plain(q: RuleFacts) -> bool:
    return q.model.moe is None and q.model.latent is None


def _of_latent(q: RuleFacts) -> tuple[str, ...]:
    """Return the names of the matrices of latent attention."""
    assert q.model.latent is not None  # noqa: S101 - of models that have it
    queries = ("q_a_proj", "q_b_proj") if q.model.latent.q_lora_rank else ("q_proj",)
    return (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def _lacks_targets(q: RuleFacts) -> bool:
    """Return whether a model with latent attention has none of the matrices that adapters are for."""
    if not _has(q) or q.model.latent is None or not _adapter(q).freezes_all:
        return False
    wanted = projections_named(_adapter(q).target_modules, fused=False)
    has = {*projections_named(_of_latent(q), fused=False), "gate", "up", "down", "gate_up", "router", ALL_LINEAR}
    return has.isdisjoint(wanted)


def _all(c: PlanColumns) -> Mask:
    return np.ones(len(c), dtype=np.bool_)


def _without(q: RuleFacts) -> str:
    known, kind = q.framework.adapters, _adapter(q).kind
    others = ", ".join(name for name, other in FRAMEWORKS.items() if kind in other.adapters)
    trains = f"{q.framework.title} trains {', '.join(known) or 'all parameters'}"
    return f"{trains}; {kind} is trained by {others}"


ADAPTER_RULES: tuple[Rule, ...] = (
    rule(
        "adapter",
        lambda c, q: _all(c),
        lambda p, q: f"adapter {_adapter(q).kind}: {_without(q)}",
        applies=lambda q: _has(q) and _adapter(q).kind not in q.framework.adapters,
    ),
    rule(  # peft/tuners/tuners_utils.py: "Target modules ... not found in the base model"
        "adapter-targets",
        lambda c, q: _all(c),
        lambda p, q: (
            f"{q.model.name} has none of {', '.join(_adapter(q).target_modules)}: its attention is latent, with"
            f" {', '.join(_of_latent(q))}; name those, or all-linear"
        ),
        applies=_lacks_targets,
    ),
    rule(
        "adapter-dropout",
        lambda c, q: _all(c),
        lambda p, q: f"adapter dropout {_adapter(q).dropout:g}: adapters of {q.framework.title} have none",
        applies=lambda q: _has(q) and _adapter(q).dropout > 0 and not q.framework.adapter_dropout,
    ),
    rule(
        "adapter-cut",
        lambda c, q: (c.tp > 1) | (not _plain(q)),
        lambda p, q: (
            f"adapters of {q.framework.title} are next to whole matrices of dense layers: not with tp {p.tp}"
            if p.tp > 1
            else f"adapters of {q.framework.title} are in dense layers with queries, keys and values of their own alone"
        ),
        applies=lambda q: _has(q) and q.framework.adapters_whole,
    ),
    rule(
        "base-type",
        lambda c, q: _all(c),
        lambda p, q: (
            f"frozen weights in {_adapter(q).base_weights}: {q.framework.title} stores all parameters in one type "
            f"({q.dtypes[0]})"
        ),
        applies=lambda q: (
            _has(q)
            and q.framework.base_as_stored
            and not _packed(q)
            and _adapter(q).base_weights not in {"", q.dtypes[0]}
        ),
    ),
    rule(
        "packed-base",
        lambda c, q: _all(c),
        lambda p, q: (
            f"frozen weights in {_adapter(q).base_weights}: {q.framework.title} keeps them in "
            f"{', '.join(q.framework.packed_bases) or '16 or 32 bits'}"
            f"{f' ({q.framework.why_unpacked})' if q.framework.why_unpacked else ''}"
        ),
        applies=lambda q: _packed(q) and not _kept(q),
    ),
    rule(
        "packed-sharded",
        lambda c, q: (c.dp_shard > 1) | (c.zero_stage == 3),
        lambda p, q: (
            f"frozen weights in {_adapter(q).base_weights} cannot be sharded by {q.framework.title}, which shards "
            f"{', '.join(q.framework.sharded_bases) or 'none that are packed'}: replicate them (dp_replicate, ZeRO 0 "
            "to 2), or keep them in bfloat16"
        ),
        applies=lambda q: _packed(q) and _kept(q) and _adapter(q).base_weights not in q.framework.sharded_bases,
    ),
    rule(
        "packed-cut",
        lambda c, q: (c.tp > 1) | (c.ep > 1),
        lambda p, q: (
            f"frozen weights in {_adapter(q).base_weights} are packed in blocks that tensor and expert parallelism "
            f"would cut (tp {p.tp}, ep {p.ep}): shard or replicate them whole"
        ),
        applies=_packed,
    ),
)
