"""The request for a serving run: one JSON file, written by `planner apply --task serve` and read by every rank."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config.model import Model
from simulator.serving.traffic import Traffic
from topology.codec import JsonObject
from topology.errors import BadModel, BadPlan

SCHEMA_VERSION = 1
ALL_REDUCES = ("own", "nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """A step to time. `decode`: `batch` answers are continued, each with `context` tokens cached; `prefill`: `batch`
    prompts of `context` tokens are read at once.
    """

    phase: str
    batch: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests to be answered while they arrive; the report uses `name`."""

    name: str
    traffic: Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """`all_reduces` are measured one after the other, the loads with the first one only; one GPU needs none.

    With `cache_tokens` 0 the cache takes the memory that weights and graphs leave. `predicted` is copied into the
    report.
    """

    schema_version: int = SCHEMA_VERSION
    model: Model
    tp: int = 1
    device: str = "cuda"
    gpus: tuple[int, ...] = ()
    all_reduces: tuple[str, ...] = ALL_REDUCES
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_model_len: int = 16640
    cache_tokens: int = 0
    steps: tuple[StepShape, ...] = ()
    loads: tuple[Load, ...] = ()
    seed: int = 0
    start_timeout_s: float = 60.0
    predicted: JsonObject | None = None


def require_served(request: ServeRequest) -> None:
    """Raise BadModel or BadPlan for requests that this engine does not support."""
    model, tp = request.model, request.tp
    lacks = {
        "experts": model.moe is not None,
        "latent attention": model.latent is not None,
        "sliding windows": bool(model.windowed_layers),
        "norms of queries and keys": model.qk_norm,
        "biases": model.qkv_bias or model.attention_out_bias or model.mlp_bias or model.head_bias,
        "a feed-forward without gate": not model.gated_mlp,
        "norms other than RMS": model.norm != "rmsnorm" or model.norms_per_layer != 2,
        "learned positions": bool(model.learned_positions) or not model.rotary,
        "heads whose width is no power of two from 16 on": model.head_dim < 16
        or model.head_dim & (model.head_dim - 1) != 0,
    }
    missing = [name for name, needed in lacks.items() if needed]
    if missing:
        raise BadModel(
            f"the executor does not serve {', '.join(missing)}",
            why=f"{model.name} needs it",
            remedy="serve a Llama shape, or export the deployment to an engine",
        )
    cut = {"query heads": model.heads, "key/value heads": model.kv_heads, "ffn": model.ffn, "vocabulary": model.vocab}
    uneven = [f"{size} {name}" for name, size in cut.items() if size % tp]
    if tp < 1 or uneven:
        raise BadPlan(
            f"tp {tp} does not divide {', '.join(uneven) or 'anything'}", remedy="choose tp among the divisors"
        )
    unknown = sorted(set(request.all_reduces) - set(ALL_REDUCES))
    if unknown or not request.all_reduces:
        raise BadPlan(f"all-reduce {unknown or 'none'}", remedy=f"of {', '.join(ALL_REDUCES)}, at least one")
    phases = sorted({shape.phase for shape in request.steps} - {"decode", "prefill"})
    if phases:
        raise BadPlan(f"steps of the phase {phases}", remedy="decode or prefill")
    longest = max([load.traffic.prompt.mean + load.traffic.output.mean for load in request.loads], default=0)
    if longest > request.max_model_len:
        raise BadPlan(f"requests of {longest} tokens do not fit max_model_len {request.max_model_len}")
