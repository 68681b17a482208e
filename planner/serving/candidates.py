"""Deployments that an engine accepts for a model on a cluster, and the reasons why it rejects others.

Rules of vLLM 0.33 (vllm/config/parallel.py, vllm/config/model.py) and SGLang 0.5 (server_args.py): tensor parallel
divides the attention heads, keys and values are repeated where it exceeds their heads; stages divide no further than
layers; experts are spread over all ranks of a stage or over none; attention with requests of its own per rank goes with
experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from planner.io.figures import gpus_text
from planner.serving.question.question import ServingQuestion
from planner.serving.question.releases import too_old
from simulator.config.model import Model
from simulator.kernels.low_precision import has_no_bfloat16
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from simulator.serving.kv_cache import cache_capacity
from topology.rates.reach import reach

# Architectures on which TensorRT-LLM has a format (nvidia.github.io/TensorRT-LLM/0.18.2, reference/support-matrix; 4
# bits: features/quantization of 1.0). vLLM and SGLang read narrow weights with 16-bit products on older ones (Marlin).
FORMATS_ON = {"float8": ("Ada", "Hopper", "Blackwell", "Rubin"), "float4": ("Blackwell", "Rubin")}
OWN = "meshwright"  # the executor, whose limits are those of executor/serving/request.py


def deployments(question: ServingQuestion) -> tuple[list[Deployment], Counter[str]]:
    """Return deployments with as many engines as the GPUs hold, whose cache holds the longest request, and how many
    others fail, by reason.
    """
    gpus = question.gpu_count
    found: list[Deployment] = []
    rejected: Counter[str] = Counter()
    fitting: list[Pool] = []
    for pool in _engines(question, gpus):
        whole = question.deployment(_times(pool, question.most_engines(pool)))
        reason = (
            no_format(question)
            or refusal(question.model, pool, question.engine)
            or out_of_reach(question, whole)
            or exceeds_memory(question, pool)
        )
        if reason:
            rejected[reason] += 1
            continue
        fitting.append(pool)
        found.append(whole)
    if question.separate:
        both = [question.deployment(decode, prefill) for prefill, decode in _separated(question, fitting)]
        joined = [one for one in both if not out_of_reach(question, one)]
        rejected.update(out_of_reach(question, one) for one in both if one not in joined)
        found += joined
    if not question.release:
        return found, rejected
    known: list[Deployment] = []
    for deployment in found:
        lacks = too_old(question.model, deployment, question.release)
        rejected.update(lacks[:1])
        known += [] if lacks else [deployment]
    return known, rejected


def refusal(model: Model, pool: Pool, engine: str = "") -> str:
    """Return the rule that an engine with these degrees breaks, with its numbers; empty if none."""
    if engine == OWN:
        if pool.pp > 1 or pool.ep > 1 or pool.dp_attention > 1:
            return "the executor serves with tensor parallelism alone"
        cut = {"key/value heads": model.kv_heads, "ffn": model.ffn, "vocabulary": model.vocab}
        for name, size in cut.items():
            if size % pool.tp:
                return f"tp {pool.tp} does not divide {name} of {size}"
    if model.heads % pool.tp:
        return f"tp {pool.tp} does not divide {model.heads} attention heads"
    if pool.ep > 1 and model.moe is None:
        return f"ep {pool.ep} spreads experts, and {model.name} has none"
    if pool.pp > model.layers:
        return f"{pool.pp} stages for {model.layers} layers"
    if model.moe and (model.moe.experts + pool.redundant_experts) % pool.ep:
        return f"ep {pool.ep} does not divide {model.moe.experts} experts"
    if model.dense_layers and model.ffn % pool.tp:
        return f"tp {pool.tp} does not divide the feed-forward width of {model.ffn}"
    return ""


def no_format(question: ServingQuestion) -> str:
    """Return the format that the model or, on the question's GPUs, the engine does not have; empty if they have all."""
    if question.weights == "mxfp4" and question.model.moe is None:
        return f"weights in mxfp4 are those of experts, and {question.model.name} has none"
    kind = question.cluster.slowest_kind
    if has_no_bfloat16(kind) and "bfloat16" in {question.weights, question.kv_cache}:
        return f"{kind.title} has no bfloat16"
    if engine_of(question.engine).program == "trtllm":
        for flag, word in (("--weights", question.weights), ("--kv-cache", question.kv_cache)):
            if not kind.architecture.startswith(FORMATS_ON.get(word, "")):
                return f"TensorRT-LLM has no {flag} {word} on {kind.title}"
    return ""


def out_of_reach(question: ServingQuestion, deployment: Deployment) -> str:
    """Return why GPUs of a deployment cannot exchange their data; empty if they can. Engines of one pool exchange
    nothing.
    """
    joined = reach(question.cluster)
    if deployment.prefill is not None or joined.gpus < question.cluster.gpus_per_node:
        # Caches move between pools, and it is unknown which engine gets the GPUs of a node without links.
        alone = deployment.prefill is None and deployment.pool.gpus == 1 and joined.gpus > 0
        together = 1 if alone else deployment.gpus
    else:
        together = deployment.pool.gpus
    if together <= joined.gpus:
        return ""
    return joined.why if not joined.gpus else f"{together} GPUs have to exchange data: {joined.why}"


def _engines(question: ServingQuestion, gpus: int) -> Iterator[Pool]:
    """Yield engines whose copies use all GPUs, or whose degrees are powers of two: all degrees up to a node, and
    pipelines of whole nodes beyond.
    """
    node = question.cluster.gpus_per_node
    experts = question.model.moe is not None
    for ranks in range(1, min(gpus, 4 * node) + 1):
        for stages in range(1, min(16, gpus // ranks) + 1):
            powers = not (ranks & (ranks - 1) or stages & (stages - 1))
            if (gpus % (ranks * stages) and not powers) or not question.most_engines(Pool(tp=ranks, pp=stages)):
                continue
            yield Pool(tp=ranks, pp=stages)
            if experts and ranks > 1:
                yield Pool(tp=ranks, pp=stages, ep=ranks)
                yield Pool(tp=1, pp=stages, ep=ranks, dp_attention=ranks)


def exceeds_memory(question: ServingQuestion, pool: Pool) -> str:
    """Return why an engine has no room for the longest request; empty if it has."""
    longest = question.longest
    room = cache_capacity(question.model, question.cluster, question.deployment(pool), pool, length=longest)
    if not room.tokens:
        return f"weights leave no room for a KV cache on {gpus_text(pool.gpus)}"
    if room.tokens // pool.pp < longest:
        return f"the KV cache of {pool.gpus} GPUs holds fewer than {longest} tokens"
    return ""


def _times(pool: Pool, engines: int) -> Pool:
    return Pool(engines=engines, tp=pool.tp, pp=pool.pp, ep=pool.ep, dp_attention=pool.dp_attention)


def _separated(question: ServingQuestion, pools: list[Pool]) -> Iterator[tuple[Pool, Pool]]:
    """Yield (prefill, decode) pools that divide the GPUs in eighths or, if there are fewer, in whole GPUs, with engines
    of one stage.
    """
    gpus = question.gpu_count
    flat = [pool for pool in pools if pool.pp == 1]
    for reading in sorted({gpus * eighths // 8 for eighths in range(1, 8)} - {0}):
        for prefill in flat:
            for decode in flat:
                writing = gpus - reading
                if reading % prefill.gpus or writing % decode.gpus:
                    continue
                both = _times(prefill, reading // prefill.gpus), _times(decode, writing // decode.gpus)
                if not question.gpus or on_nodes(question, both):
                    yield both


def on_nodes(question: ServingQuestion, pools: tuple[Pool, ...]) -> bool:
    """Return whether engines, the largest first, each find a node with room for it, or whole nodes."""
    node = question.cluster.gpus_per_node
    whole, rest = divmod(question.gpu_count, node)
    free = [node] * whole + [rest]
    for size in sorted((pool.gpus for pool in pools for _ in range(pool.engines)), reverse=True):
        parts = [min(size, node)] * -(-size // node)  # several where it takes whole nodes
        for part in parts:
            place = next((number for number, room in enumerate(free) if room >= part), None)
            if place is None:
                return False
            free[place] -= part
    return True
