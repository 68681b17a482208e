"""Data and expert parallelism: which degrees shard what over which ranks, and whether the batch divides."""

# ruff: noqa: ARG005 - every predicate and sentence has the same signature, whether or not it reads all of it

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simulator.columns.experts import expert_split
from simulator.columns.plan_columns import PlanColumns, plan_columns
from simulator.config.plan import Plan
from simulator.legality.frameworks import ExpertGrid
from simulator.legality.rule import Grade, Rule, RuleFacts, batch_rule, divisors, one_of, rule, with_nearest
from simulator.pipeline.schedules.registry import schedules_that, where
from simulator.runtimes.library import spec_for
from simulator.runtimes.model_operators import FUSED_DISPATCH, dispatcher_of


def _most_zero(q: RuleFacts) -> int:
    """Return the highest ZeRO stage of the runtime."""
    return 3 if q.runtime is None else spec_for(q.runtime).most_zero


def _sharding(c: PlanColumns) -> NDArray[np.int64]:
    """Return the ZeRO stage; FSDP counts as stage 3."""
    return np.where(c.zero_stage < 0, 3, c.zero_stage)


def _replicated_alone(c: PlanColumns) -> NDArray[np.bool_]:
    """Return whether nothing but replicas divides a step, as in DDP."""
    return np.asarray((c.dp_replicate > 1) & (c.dp_shard * c.cp * c.tp * c.pp == 1))


def _split(c: PlanColumns, q: RuleFacts) -> NDArray[np.int64]:
    """Return the number of ranks that split each expert."""
    return expert_split(c, q.splits_experts)


def _etp(p: Plan, q: RuleFacts) -> int:
    return int(_split(plan_columns([p]), q)[0])


def _expert_ranks(c: PlanColumns, q: RuleFacts) -> NDArray[np.int64]:
    """Return the number of ranks that expert parallelism may use; ranks that split one expert count once."""
    grid = q.framework.expert_grid
    if grid is ExpertGrid.DATA:
        return np.asarray(c.dp_replicate * c.dp_shard, dtype=np.int64)
    replicas = np.ones_like(c.tp) if grid is ExpertGrid.SHARD_CONTEXT_TENSOR else c.dp_replicate
    return np.asarray(replicas * c.dp_shard * c.cp * c.tp // _split(c, q), dtype=np.int64)


def _ranks_for_experts(p: Plan, q: RuleFacts) -> int:
    return int(_expert_ranks(plan_columns([p]), q)[0])


def _ep_overlaps(q: RuleFacts) -> tuple[str, ...]:
    """Return the words of `ep_overlap` that the framework's version has; the default is the newest version."""
    versions = q.framework.ep_overlap_versions
    return q.framework.ep_overlaps if not versions or (q.version or "").startswith(versions) else ()


_GRID_WORDS = {
    ExpertGrid.SHARD_CONTEXT_TENSOR: "dp_shard x cp x tp",
    ExpertGrid.DATA: "the data-parallel degree",
    ExpertGrid.WORLD: "world / pp",
    ExpertGrid.STAGE: "the ranks of a stage",
}


def _grid_words(p: Plan, q: RuleFacts) -> str:
    split = _etp(p, q)
    if split == 1 or q.framework.expert_grid is ExpertGrid.DATA:
        return _GRID_WORDS[q.framework.expert_grid]
    own = " where sequence parallelism is off" if not p.sequence_parallel and p.etp is None else ""
    return f"{_GRID_WORDS[q.framework.expert_grid]} / etp {split}, the ranks that split each expert{own},"


def _stated_split(c: PlanColumns, q: RuleFacts) -> NDArray[np.int64]:
    """Return the number of ranks that split each expert, for frameworks that have this degree; another rule covers the
    others.
    """
    return _split(c, q) if q.framework.splits_experts else np.maximum(c.etp, 1)


def _own_split(c: PlanColumns, q: RuleFacts) -> NDArray[np.int64]:
    """Return the number of ranks that split each expert by default."""
    return expert_split(replace(c, etp=np.full_like(c.etp, -1)), q.splits_experts)


def _not_run(q: RuleFacts) -> str:
    """Return what a runtime states of its experts and kernels, and a workload of its data, other than the defaults."""
    runtime = q.runtime
    if runtime is None:
        return ""
    stated = {
        f"the dispatcher {runtime.moe_dispatcher}": runtime.moe_dispatcher not in {"", "alltoall"},
        f"products of experts by {runtime.expert_products}": runtime.expert_products not in {"", "grouped"},
        f"CUDA graphs of {', '.join(runtime.graph_scopes)}": runtime.graph_scopes,
        f"kernels that fuse {' and '.join(runtime.fused)}": runtime.fused,
        "routing that is forced to be balanced": q.workload.routing == "balanced",
        "tokens by expert as they were counted": q.workload.expert_counts,
        "documents that share a sequence": q.workload.attended_len < q.workload.seq_len,
    }
    return " and ".join(words for words, holds in stated.items() if holds)


def _dispatcher(q: RuleFacts) -> str:
    """Return how the runtime sends tokens to experts, "" without a runtime."""
    return "" if q.runtime is None else dispatcher_of(q.runtime, spec_for(q.runtime))


# deepseek-ai/DeepEP @dd758ca setup.py: built for 9.0, or without what SM90 adds for 8.0; HybridEP is a part of it.
_DEEPEP_CAPABILITY = 80

EXPERT_RULES: list[Rule] = [
    rule(
        "experts-dense",
        lambda c, q: c.ep > 1,
        lambda p, q: with_nearest("ep", [1], f"{q.model.name} has no experts, ep={p.ep}"),
        applies=lambda q: q.model.moe is None,
    ),
    rule(
        "experts",
        lambda c, q: (q.model.moe.experts if q.model.moe else 1) % c.ep != 0,
        lambda p, q: with_nearest(
            "ep",
            divisors(q.model.moe.experts if q.model.moe else 1),
            f"{q.model.moe.experts if q.model.moe else 1} experts % ep {p.ep} is not 0",
        ),
        applies=lambda q: q.model.moe is not None,
    ),
    rule(
        "expert-grid",
        lambda c, q: _expert_ranks(c, q) % c.ep != 0,
        lambda p, q: with_nearest(
            "ep",
            divisors(_ranks_for_experts(p, q)),
            f"ep {p.ep} must divide {_grid_words(p, q)} = {_ranks_for_experts(p, q)}, so that "
            "experts are sharded over whole groups",
        ),
        applies=lambda q: q.framework.expert_grid is not ExpertGrid.NONE,  # then no ep above 1 is legal
    ),
    rule(
        "expert-grid",
        lambda c, q: (c.ep > 1) & (c.ep % c.tp != 0),
        lambda p, q: with_nearest(
            "ep",
            [d for d in divisors(q.model.moe.experts if q.model.moe else 1) if d % p.tp == 0],
            f"ep {p.ep} is not divisible by tp {p.tp}: experts are spread over whole tensor-parallel groups",
        ),
        applies=lambda q: q.framework.whole_expert_groups,
    ),
    rule(
        "expert-sequence",
        lambda c, q: (c.ep > 1) & (c.tp > 1) & ~c.sequence_parallel,
        lambda p, q: (
            f"ep {p.ep} with tp {p.tp} needs sequence parallelism, or each token would be routed {p.tp} times: set "
            "sequence_parallel, or ep 1"
        ),
        applies=lambda q: q.framework.whole_expert_groups,
    ),
    rule(
        "expert-sequence",
        lambda c, q: (c.tp > 1) & ~c.sequence_parallel,
        lambda p, q: (
            f"experts with tp {p.tp} need sequence parallelism: {q.framework.title} stops without it; set"
            " sequence_parallel"
        ),
        applies=lambda q: q.framework.sequential_experts and q.model.moe is not None,
    ),
    rule(
        "expert-tensor",
        lambda c, q: c.etp > 1,
        lambda p, q: f"{q.model.name} has no experts to split, etp={p.etp}: leave it out",
        applies=lambda q: q.model.moe is None,
    ),
    rule(
        "expert-tensor",
        lambda c, q: (c.etp > 0) & (c.etp != _own_split(c, q)),
        lambda p, q: with_nearest(
            "etp",
            [_etp(p.with_(etp=None), q)],
            f"etp {p.etp}: {q.framework.title} has no degree of its own for the tensor parallelism of experts",
        ),
        applies=lambda q: q.model.moe is not None and not q.framework.splits_experts,
    ),
    rule(
        "expert-tensor",
        lambda c, q: (q.model.moe.ffn if q.model.moe else 1) % _stated_split(c, q) != 0,
        lambda p, q: with_nearest(
            "etp",
            divisors(q.model.moe.ffn if q.model.moe else 1),
            f"expert width {q.model.moe.ffn if q.model.moe else 1} is not divisible by etp {_etp(p, q)}",
        ),
        applies=lambda q: q.model.moe is not None,
    ),
    rule(
        "expert-tensor",
        lambda c, q: (c.dp_replicate * c.dp_shard * c.cp * c.tp) % _split(c, q) != 0,
        lambda p, q: f"etp {_etp(p, q)} must divide the {p.gpus // p.pp} ranks of a stage",
        applies=lambda q: q.model.moe is not None and q.framework.splits_experts,
    ),
    rule(
        "capacity",
        lambda c, q: c.capacity_factor > 0,
        lambda p, q: (
            f"capacity_factor {p.capacity_factor or 0:g}: {q.framework.title} drops no token and pads none;"
            " leave it out"
        ),
        applies=lambda q: not q.framework.drops_tokens,
    ),
    rule(
        "capacity",
        lambda c, q: c.capacity_factor > 0,
        lambda p, q: f"{q.model.name} has no experts, capacity_factor={p.capacity_factor or 0:g}: leave it out",
        applies=lambda q: q.model.moe is None,
    ),
    rule(
        "expert-load",
        lambda c, q: np.full(len(c), q.workload.expert_imbalance != 1.0),
        lambda p, q: (
            f"expert_imbalance {q.workload.expert_imbalance:g}: in {q.framework.title} the model's own router spreads "
            "tokens as evenly as it does; only 1 can be asked for"
        ),
        applies=lambda q: not q.framework.skews_experts,
    ),
    rule(
        "expert-kernels",
        lambda c, q: np.full(len(c), bool(_not_run(q))),
        lambda p, q: f"{q.framework.title} does not run {_not_run(q)}; leave it out",
        applies=lambda q: q.framework.own_kernels_only,
    ),
    rule(
        "expert-dispatcher",
        lambda c, q: c.ep > 1,
        lambda p, q: (
            f"the dispatcher {_dispatcher(q)} has no kernels for GPUs of compute capability"
            f" {q.compute_capability / 10:.1f}: DeepEP needs 9.0 (Hopper), or 8.0 for a part of it; choose alltoall"
        ),
        applies=lambda q: 0 < q.compute_capability < _DEEPEP_CAPABILITY and _dispatcher(q) in FUSED_DISPATCH,
    ),
]


DATA_RULES: list[Rule] = [
    rule(
        "zero-stage",
        lambda c, q: ~np.isin(c.zero_stage, (-1, *q.framework.zero_stages)),
        lambda p, q: (
            f"{q.framework.title} has no ZeRO stage {p.zero_stage};"
            f" it has {', '.join(map(str, q.framework.zero_stages))}"
        ),
        applies=lambda q: bool(q.framework.zero_stages),
    ),
    rule(
        "zero-stage",
        lambda c, q: c.zero_stage > _most_zero(q),
        lambda p, q: (
            f"{q.runtime.name if q.runtime else ''} has no ZeRO stage {p.zero_stage}: what it runs shards as stage"
            f" {_most_zero(q)}; state that"
        ),
        applies=lambda q: _most_zero(q) < 3,
    ),
    rule(
        "zero-stage",
        lambda c, q: (c.zero_stage == 1) | ((c.zero_stage > 1) & (c.dp_shard * c.cp == 1) & (c.dp_replicate > 1)),
        lambda p, q: (
            f"{q.framework.title} shards with FSDP2: say dp_shard, not ZeRO stage {p.zero_stage} over dp_replicate "
            f"{p.dp_replicate}"
        ),
        applies=lambda q: not q.framework.zero_stages,
    ),
    rule(
        "zero-stage",
        lambda c, q: (c.zero_stage == 0) & (c.cp > 1),
        lambda p, q: f"{q.framework.title} shards over context-parallel ranks, too (cp={p.cp}): leave ZeRO stage 0 out",
        applies=lambda q: not q.framework.zero_stages,
    ),
    rule(
        "zero-stage",
        lambda c, q: (c.zero_stage > 1) & ((c.dp_shard * c.cp > 1) | (c.dp_replicate == 1)),
        lambda p, q: f"{q.framework.title} shards with FSDP2: say dp_shard alone, without ZeRO stage {p.zero_stage}",
        applies=lambda q: q.framework.fsdp_by_degree_only,
    ),
    rule(
        "zero-pipeline",
        lambda c, q: (c.zero_stage >= 2) & (c.pp > 1),
        lambda p, q: (
            f"{q.framework.title} refuses ZeRO-{p.zero_stage} with pipeline parallelism (pp={p.pp}): use ZeRO-1 or pp=1"
        ),
        applies=lambda q: not q.framework.zero_pipeline,
    ),
    rule(
        "offload",
        lambda c, q: ~one_of(c.offload, q.framework.offloads),
        lambda p, q: (
            f"offload {p.offload!r}: {q.framework.title} keeps nothing of that in host memory; known: "
            f"{', '.join(q.framework.offloads)}"
        ),
    ),
    rule(
        "offload-optimizer",
        lambda c, q: (c.offload == "optimizer") & ~np.isin(_sharding(c), q.framework.optimizer_offload_stages),
        lambda p, q: (
            "offload optimizer needs a sharded optimizer:"
            f" ZeRO stage {' or '.join(map(str, q.framework.optimizer_offload_stages))} in {q.framework.title},"
            f" and the plan has {'FSDP' if p.zero_stage is None else f'stage {p.zero_stage}'}"
        ),
        applies=lambda q: "optimizer" in q.framework.offloads,
    ),
    rule(
        "offload-parameters",
        lambda c, q: (
            (c.offload == "parameters")
            & (
                (_sharding(c) < 3)
                | (c.zero_stage < 0)
                & (c.dp_shard * c.cp == 1)
                & (_replicated_alone(c) | (not q.framework.wraps_one_rank))  # DDP keeps all of them on the GPU
            )
        ),
        lambda p, q: (
            f"offload parameters needs sharded parameters: {q.framework.title} has them with "
            f"{'ZeRO stage 3' if q.framework.zero_stages else 'dp_shard or cp above 1'}"
        ),
        applies=lambda q: "parameters" in q.framework.offloads,
    ),
    rule(
        "offload-layers",
        lambda c, q: (
            (c.offload_layers > 0)
            & (
                (not q.framework.offloads_layers)
                | (c.pp > 1)
                | (c.recompute != "none")
                | (c.offload_layers >= q.model.layers)
            )
        ),
        lambda p, q: (
            f"offload_layers {p.offload_layers}: {q.framework.title} "
            + (
                f"needs pp 1, recompute none and fewer than the {q.model.layers} layers"
                f" (pp is {p.pp}, recompute {p.recompute})"
                if q.framework.offloads_layers
                else "keeps activations of no number of layers in host memory; Megatron-LM does"
            )
        ),
    ),
    batch_rule(
        "ep-overlap",
        lambda c, q: (c.ep_overlap != "none") & ~one_of(c.ep_overlap, _ep_overlaps(q)),
        lambda p, q: (
            f"ep_overlap {p.ep_overlap}: {q.framework.title}{f' {q.version}' if q.version else ''} has "
            f"{', '.join(_ep_overlaps(q)) or 'nothing that runs the all-to-all of experts alongside compute'}"
        ),
    ),
    batch_rule(
        "ep-overlap-experts",
        lambda c, q: (c.ep_overlap != "none") & (c.ep == 1),
        lambda p, q: f"ep_overlap {p.ep_overlap} needs ep > 1: there is no all-to-all to overlap",
    ),
    batch_rule(
        "ep-overlap-stages",
        lambda c, q: (c.ep_overlap != "none") & (c.pp > 1) & (c.virtual_stages == 1),
        lambda p, q: (
            f"ep_overlap {p.ep_overlap} with pp {p.pp} needs virtual stages:"
            f" without them {q.framework.title} has no forward and backward of two micro batches side by side"
        ),
        applies=lambda q: not q.framework.torch_pipelining,
    ),
    batch_rule(
        "ep-overlap-stages",
        lambda c, q: (c.ep_overlap != "none") & ((c.pp == 1) | ~where(c.schedule, lambda kind: kind.pairs)),
        lambda p, q: (
            f"ep_overlap {p.ep_overlap} in {q.framework.title} needs a pipeline with schedule"
            f" {' or '.join(schedules_that(lambda kind: kind.pairs))}"
        ),
        applies=lambda q: q.framework.torch_pipelining,
    ),
    batch_rule(
        "ep-overlap-sharding",
        lambda c, q: (c.ep_overlap != "none") & (c.zero_stage > 1),
        lambda p, q: (
            f"ep_overlap {p.ep_overlap} with ZeRO stage {p.zero_stage}: two passes at once that gather and free the"
            " same layers are not modelled; stage 0 and 1 are"
        ),
    ),
    batch_rule(
        "ep-overlap-dtype",
        lambda c, q: c.ep_overlap != "none",
        lambda p, q: f"ep_overlap {p.ep_overlap} needs bfloat16 or float16, not {q.activation_dtype}",
        applies=lambda q: q.activation_dtype not in {"", "bfloat16", "float16"},
    ),
    rule(
        "one-axis",
        lambda c, q: (
            ((c.tp > 1) & ((c.cp > 1) | (c.ep > 1))) | ((c.cp > 1) & (c.ep > 1)) | ((c.pp > 1) & (c.cp * c.ep > 1))
        ),
        lambda p, q: (
            f"{q.framework.title} combines neither automatic tensor parallelism (tp={p.tp}) nor Ulysses (cp={p.cp})"
            f" nor automatic expert parallelism (ep={p.ep}) with another of them, and pipelines (pp={p.pp}) with"
            " tensor parallelism alone"
        ),
        applies=lambda q: q.framework.one_axis,
    ),
    rule(
        "shard-degree",
        lambda c, q: (c.dp_shard > 1) & (c.zero_stage < 1),
        lambda p, q: f"{q.framework.title} shards by ZeRO stage, not by a degree: dp_shard={p.dp_shard} needs a stage",
        applies=lambda q: not q.framework.shard_degree,
    ),
    rule(
        "shard-degree",
        lambda c, q: ((c.dp_shard > 1) | (c.zero_stage > 1)) & (c.gpus > 1),
        lambda p, q: f"by {q.framework.fsdp_needs}: the distributed optimizer alone is ZeRO-1",
        grade=Grade.LEGAL,
        applies=lambda q: bool(q.framework.fsdp_needs),
    ),
    rule(
        "ddp-alone",
        lambda c, q: (c.dp_replicate > 1) & (c.dp_shard * c.cp == 1) & (c.tp * c.pp > 1),
        lambda p, q: (
            f"plain replication (dp_replicate {p.dp_replicate}, dp_shard 1) does not combine with tp {p.tp} and pp "
            f"{p.pp} in {q.framework.title}: use dp_shard"
        ),
        applies=lambda q: q.framework.ddp_alone,
    ),
    batch_rule(
        "global-batch",
        lambda c, q: q.workload.global_batch_size % (c.dp * c.micro_batch_size) != 0,
        lambda p, q: with_nearest(
            "micro_batch_size",
            divisors(max(1, q.workload.global_batch_size // p.data_parallel))
            if q.workload.global_batch_size % p.data_parallel == 0
            else [],
            f"global batch {q.workload.global_batch_size} is not divisible by data parallel {p.data_parallel} x micro"
            f" batch {p.micro_batch_size}",
        ),
    ),
]
