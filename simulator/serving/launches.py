"""What a host launches in a step that no CUDA graph replays: kernels by layer, and which Python calls one by one."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config.model import LayerKind, Model
from simulator.serving.deployment import Pool
from simulator.serving.engine import Engine
from simulator.serving.linear_attention import DELTA_KERNELS
from simulator.serving.sparse_attention import INDEX_KERNELS

# Generations on which TensorRT-LLM's kernel, which FlashInfer has as well, norms what it has summed: vLLM takes it on
# devices of capability 9.0 and 10.0 alone (FI_ALLREDUCE_FUSION_MAX_SIZE_MB of its compilation passes).
SUMS_WITH_NORM = {"hopper", "blackwell"}
TO_EXPERTS = 6.0  # kernels of the way to experts and back: scores, their choice, rows there and back

# Formats whose experts one kernel multiplies that chooses them as well, on Blackwell: vLLM 0.19 and 0.24 there take
# FlashInfer's of TensorRT-LLM (kernel_source in ai-dynamo/aiconfigurator 0.12 systems/data/b200_sxm/moe/vllm).
FUSED = {"float8", "float4", "mxfp4"}
# Operators that Python calls inside those that torch.compile does not look into, where answers go on next to prompts.
# Source: vllm-project/vllm @0014ca6b, model_executor/layers/attention/mla_attention.py (the cache; of prompts the
# expansion, two parts of keys, attention and its copy; of answers two products, the query and attention) and
# attention.py (the cache, attention); fused_moe/fused_marlin_moe.py @00a130a0 (the choice, sorting, a workspace, two
# products, the activation, the sum), or a cast and one kernel that does all. Shared experts run inside the operator of
# experts. Sums over ranks are called so, too.
LATENT_CALLS, ATTENTION_CALLS = 10.0, 2.0
EXPERT_CALLS, FUSED_CALLS, SHARED_CALLS = 7.0, 2.0, 3.0


@dataclass(frozen=True, slots=True)
class Launches:
    """Of one step of an engine that holds `weights` of a format on GPUs of a `generation`."""

    model: Model
    engine: Engine
    pool: Pool
    weights: str
    generation: str

    @property
    def count(self) -> float:
        """Kernels and collectives."""
        kinds = self.model.layer_kinds
        kernels = sum(self.small_kernels(kind) + (8.0 if kind.sparse else 6.0) for kind in kinds)
        kernels += self.model.linear_layers * DELTA_KERNELS
        return kernels + self._collectives

    @property
    def seconds(self) -> float:
        """What the host takes to issue a step of which nothing is replayed."""
        called = 0.0
        if self.engine.compiled:
            called = self._attention_calls + self._expert_calls + self._collectives
        rest = max(0.0, self.count - called)
        return rest * self.engine.host_launch_s + called * self.engine.host_eager_launch_s

    @property
    def attention_s(self) -> float:
        """The same where graphs replay everything but attention."""
        return self._attention_calls * self.engine.host_eager_launch_s

    def small_kernels(self, kind: LayerKind) -> float:
        """Return kernels of a layer that are neither products, attention nor collectives: norms, positions, the
        activation; each product's input cast to its format; compressed vectors' norms and copies; the way to experts
        and back.
        """
        latent = 6.0 if self.model.latent else 0.0
        latent += INDEX_KERNELS if self.model.latent and self.model.latent.indexer else 0.0
        norms = 0.0 if self._norms_in_sums else 2.0
        return 2.0 + norms + self.casts + latent + self._of_gates + (TO_EXPERTS if kind.sparse else 0.0)

    @property
    def _of_gates(self) -> float:
        """Kernels of a layer in the mean, around linear attention (projections split, its gated norm) and around
        attention with a gate (the split, norms of queries and keys, the gate): sgl-project/sglang models/qwen3_5.py.
        """
        linear = self.model.linear_layers
        gated = 3.0 * (self.model.layers - linear) if self.model.attention_gate else 0.0
        return (2.0 * linear + gated) / self.model.layers

    @property
    def _norms_in_sums(self) -> bool:
        """Whether norms are part of sums over ranks."""
        fused = self.engine.norm_in_all_reduce and self.pool.tp > 1
        return fused and ("trtllm" not in self.engine.all_reduce or self.generation in SUMS_WITH_NORM)

    @property
    def casts(self) -> float:
        """Kernels of a layer that cast inputs of products."""
        if self.model.latent and self.weights == "float4":  # those of attention have 16 bits
            return 2.0
        return 4.0 if self._narrow else 0.0

    @property
    def _narrow(self) -> bool:
        """Whether inputs of products are cast."""
        return self.weights in {"float8", "float4"}

    @property
    def _collectives(self) -> float:
        return 2.0 * len(self.model.layer_kinds) if self.pool.ranks > 1 else 0.0

    @property
    def _attention_calls(self) -> float:
        """Operators of attention that Python calls."""
        latent = self.model.latent
        each = ATTENTION_CALLS if latent is None else LATENT_CALLS + (INDEX_KERNELS if latent.indexer else 0.0)
        linear = self.model.linear_layers
        return each * (self.model.layers - linear) + DELTA_KERNELS * linear

    @property
    def _expert_calls(self) -> float:
        """Operators of experts that Python calls."""
        if self.model.moe is None:
            return 0.0
        fused = self.generation == "blackwell" and self.weights in FUSED
        shared = SHARED_CALLS + (2.0 if self._narrow else 0.0) if self.model.moe.shared_ffn else 0.0
        return self.model.moe_layers * ((FUSED_CALLS if fused else EXPERT_CALLS) + shared)
