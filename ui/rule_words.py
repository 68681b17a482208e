"""Why candidates are left out, in words: the names of the rules (`simulator.legality`) for people.

What a rule says of one plan is its message; these words stand for all the candidates that it rejected.
"""

from __future__ import annotations

from collections.abc import Mapping

RULE_WORDS = {
    "memory": "does not fit into memory",
    "reach": "GPUs that cannot reach each other",
    "network": "the framework lacks a part of the model",
    "types": "number type not supported",
    "optimizer": "optimizer not supported",
    "low-precision": "low precision not supported",
    "not-modelled": "a setting of the runtime that is not modelled",
    "positions": "sequence longer than the model's positions",
    "tp-supported": "TP not supported",
    "cp-supported": "CP not supported",
    "pp-supported": "pipelines not supported",
    "ep-supported": "EP not supported",
    "world-size": "other number of GPUs",
    "heads": "heads cannot be divided over TP",
    "kv-heads": "key/value heads cannot be divided over TP",
    "ulysses-heads": "heads cannot be divided over TP and CP",
    "ffn": "feed-forward width cannot be divided over TP",
    "expert-ffn": "width of experts cannot be divided",
    "vocabulary": "vocabulary cannot be divided over TP",
    "sequence": "sequence cannot be divided over CP and TP",
    "loss-pieces": "sequence cannot be divided into the pieces of the loss",
    "sequence-parallel": "sequence parallelism without TP",
    "sequence-parallel-supported": "sequence parallelism not supported",
    "experts-dense": "EP, but the model has no experts",
    "experts": "experts cannot be divided over EP",
    "expert-grid": "EP does not divide the grid of ranks",
    "expert-sequence": "experts need sequence parallelism",
    "ep-overlap": "overlap of the experts' all-to-all not supported",
    "ep-overlap-experts": "overlap of the experts' all-to-all without EP",
    "ep-overlap-stages": "overlap of the experts' all-to-all not supported with these stages",
    "ep-overlap-sharding": "overlap of the experts' all-to-all with this ZeRO stage is not modelled",
    "ep-overlap-dtype": "overlap of the experts' all-to-all needs 16 bits",
    "recompute-sharded-norm": "recomputation by operator that this torch release cannot run without FSDP",
    "ep-overlap-recompute": "overlap of the experts' all-to-all not supported with this recomputation",
    "ep-overlap-reshard": "overlap of the experts' all-to-all with resharding is not modelled",
    "capacity": "capacity factor not supported",
    "expert-load": "load of experts not supported",
    "pipeline-length": "pipeline too long to be followed",
    "zero-stage": "ZeRO stage not supported",
    "zero-pipeline": "ZeRO stage not supported with a pipeline",
    "offload": "offloading not supported",
    "offload-optimizer": "offloading of the optimizer not supported",
    "offload-parameters": "offloading of parameters not supported",
    "one-axis": "two kinds of parallelism that exclude each other",
    "shard-degree": "degree of sharding not supported",
    "ddp-alone": "unsharded data parallelism with TP, CP or PP",
    "global-batch": "batch cannot be divided over replicas",
    "virtual-stages": "several stages a rank without a pipeline",
    "layers": "more stages than layers",
    "layers-even": "layers cannot be divided over stages",
    "tied-embeddings": "tied embeddings on different stages",
    "schedule": "schedule not supported",
    "schedule-stages": "number of stages not supported by the schedule",
    "schedule-compile": "schedule not supported with torch.compile",
    "micro-batches": "too few micro batches for the pipeline",
    "interleaved-micro-batches": "micro batches cannot be divided over stages",
    "recompute": "kind of recomputation not supported",
    "context-method": "kind of CP not supported",
    "context-latent": "CP not supported with latent attention",
    "context-window": "CP not supported with sliding windows",
    "context-compile": "CP and TP not supported with torch.compile",
    "overlap": "overlap of TP needs TP with sequence parallelism",
    "overlap-compile": "overlap of TP against the choice of torch.compile",
    "overlap-mode": "kind of overlap of TP not supported",
    "overlap-domain": "overlap of TP reaches beyond a node",
    "overlap-latent": "overlap of TP not supported with latent attention",
    "overlap-width": "overlap of TP not supported with this width",
}


def rejected_words(rejected: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of rejected candidates by reason in words."""
    return {RULE_WORDS.get(rule, rule.replace("-", " ")): count for rule, count in rejected.items()}
