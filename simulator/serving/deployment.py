"""A serving plan: degrees of parallelism, number formats, and limits of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from simulator.serving.measured import MeasuredServing

# Bytes of one weight as the format stores it, scales included: one float8 scale for 16 weights in nvfp4 (NVIDIA,
# "Introducing NVFP4"), one 16-bit scale for 128 in int4 as AutoGPTQ and AWQ write it by default, one 8-bit scale for 32
# in mxfp4 (OCP Microscaling Formats 1.0), which checkpoints use for routed experts alone (modules_to_not_convert of
# gpt-oss).
WEIGHT_BYTES = {
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8": 1.0,
    "float4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "int4": 0.5 + 2 / 128,
}


def dense_format(weights: str) -> str:
    """Return the format of weights other than those of routed experts."""
    return "bfloat16" if weights == "mxfp4" else weights


def attention_format(weights: str, *, latent: bool) -> str:
    """Return the format of attention's weights. Checkpoints in nvfp4 leave those of latent attention in 16 bits
    (NVIDIA/Model-Optimizer issue 150 on DeepSeek-R1-FP4; GLM-5-NVFP4 excludes `self_attn`), except the output's, which
    nvidia/DeepSeek-R1-FP4-v2 and DeepSeek-R1-0528-FP4-v2 have in 4 bits (their model cards).
    """
    return "bfloat16" if latent and weights == "float4" else dense_format(weights)


CACHE_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float8": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Engines of one kind. An engine is one scheduler with `gpus` GPUs and one copy of the model.

    Each of `dp_attention` groups of ranks holds all attention weights and has its own requests, while experts are
    spread over all `tp * dp_attention` ranks; `ep` of these hold different experts, the others split each expert. `pp`
    stages follow each other. `redundant_experts` of each layer are held twice, so that all ranks hold the same number.
    """

    engines: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp_attention: int = 1
    redundant_experts: int = 0

    @property
    def ranks(self) -> int:
        """GPUs of one stage."""
        return self.tp * self.dp_attention

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.ranks * self.pp

    def experts_here(self, experts: int) -> int:
        """Return the number of a layer's experts on a rank."""
        return (experts + self.redundant_experts) // self.ep

    @property
    def expert_tp(self) -> int:
        """The number of ranks that split each expert."""
        return self.ranks // self.ep


def made_even(pool: Pool, experts: int) -> Pool:
    """Return a pool whose ranks all hold the same number of a layer's experts, with as few redundant experts as
    possible, if attention has requests of its own on all ranks.
    """
    wide = pool.ep == pool.dp_attention and pool.ep <= experts
    return replace(pool, redundant_experts=-experts % pool.ep) if wide else pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding: a prediction layer of the model drafts `draft` tokens for each answer, the model checks
    them, and `accepted` of them are right on average.
    """

    draft: int
    accepted: float

    @property
    def checked(self) -> int:
        """Tokens of an answer in a step: drafted ones and the next."""
        return 1 + self.draft

    @property
    def gained(self) -> float:
        """Tokens by which an answer continues in a step, on average."""
        return 1 + self.accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """An engine, and how it is set.

    `max_num_seqs` and `max_num_batched_tokens` limit one scheduler: running requests, and tokens of one step; 0 is the
    engine's default. `eager` engines capture no CUDA graph; without `custom_all_reduce` NCCL does all sums over ranks.
    With `two_batches` one half of a step's requests computes while tokens of the other half are exchanged with experts
    (SGLang's --enable-two-batch-overlap, vLLM's --enable-dbo). New requests are looked for after each prompt and after
    `receive_every` steps without one (SGLang's --scheduler-recv-interval). `measured` has a profile's measurements of
    the engine on these GPUs.
    """

    engine: str = "vllm"
    weights: str = "bfloat16"
    kv_cache: str = "bfloat16"
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    memory_fraction: float = 0.0
    eager: bool = False
    custom_all_reduce: bool = True
    two_batches: bool = False
    receive_every: int = 1
    speculation: Speculation | None = None
    measured: MeasuredServing | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings by name."""
        return {field.name: getattr(self, field.name) for field in fields(EngineSettings)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment(EngineSettings):
    """A serving plan. If `prefill` is given, it reads prompts and `pool` generates the answers.

    With `balance_every`, ranks with requests of their own read prompts together: when each has one, or after this many
    steps (TensorRT-LLM's attention_dp_config, enable_balance and timeout_iters); 0 is at once.
    """

    pool: Pool = Pool()
    prefill: Pool | None = None
    max_model_len: int = 0
    balance_every: int = 0

    @property
    def gpus(self) -> int:
        both = self.pool.engines * self.pool.gpus
        return both + (self.prefill.engines * self.prefill.gpus if self.prefill else 0)
