"""The runtime of a plan: framework, eager or compiled, number formats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from simulator.config.adapter import Adapter
from simulator.config.optimizers import OPTIMIZERS, why_no_optimizer
from simulator.config.savers import BF16_GRADIENTS, LINEAR_LOSS, SAVERS

# Bytes of a number, by the short type names in operators and sharding texts; and the types that a run can be configured
# with.
ELEMENT_BYTES = {
    "c128": 16,
    **dict.fromkeys(("f64", "i64", "u64", "c64"), 8),
    **dict.fromkeys(("f32", "i32", "u32"), 4),
    **dict.fromkeys(("bf16", "f16", "i16", "u16"), 2),
    **dict.fromkeys(("f8", "fp8", "f8e4m3", "f8e5m2", "i8", "u8", "bool"), 1),
}
DTYPE_BYTES = {
    name: ELEMENT_BYTES[short]
    for name, short in {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float8": "f8"}.items()
}
# Types that only matrix products can compute in; everything else stays in 16 bits, and nothing is stored or reduced in
# them.
LOW_PRECISION = ("float8", "float4")
# A type that products of float32 tensors may compute in, as with torch's float32 matmul precision "high"; nothing is
# stored in it.
TF32 = "tf32"
COMPUTE_ONLY = (*LOW_PRECISION, TF32)


# How tokens reach experts: all ranks gather all tokens; copies are sorted and exchanged; a kernel sends each token once
# to every rank that has one of its experts (DeepEP), or also sorts it there (its hybrid-ep branch).
MOE_DISPATCHERS = ("allgather", "alltoall", "deepep", "hybridep")
# How experts multiply: all in one kernel; one product each on several streams (TransformerEngine's GroupedLinear); one
# module after another.
EXPERT_PRODUCTS = ("grouped", "te_grouped", "loop")

# Third-party kernels, by a part of the name that sources use, and the operators they fuse. Liger-Kernel
# (linkedin/Liger-Kernel, ops/fused_linear_cross_entropy.py) multiplies with the head and computes the loss and its
# gradient piece by piece; foak (foundation-model-stack/fms-acceleration, plugins/fused-ops-and-kernels, after unsloth)
# writes the loss's gradient over the logits. Both have norms and rotary positions in a kernel each.
FUSED_KERNELS = {
    "liger": ("layers", "linear_loss"),
    "foak": (
        "layers",
        "loss",
        "packed_adapters",
    ),  # framework_plugin_fast_kernels.py: fused_lora is for quantized models only
    "unsloth": ("layers", "loss", "adapters"),
}

DEFAULT_RUNTIME = "torchtitan"  # where no runtime is named


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """`name` selects a description of operator sequences (`runtimes/*.toml`); the other fields are its configuration.

    `param_dtype` is what parameters are stored in, `compute_dtype` what matmuls run in, `reduce_dtype` what gradients
    are reduced in. In `tf32` matmuls round float32 tensors to TF32. Where matmuls run in float8 or float4,
    `low_precision_recipe` says how (`simulator.kernels.low_precision`), and so many of the first and of the last layers
    as `wide_layers` says stay in 16 bits. With `cuda_graph` kernels are launched by
    replaying graphs: all of a layer's, or those of the parts that `graph_scopes` names. `moe_dispatcher` sends tokens
    to experts (`MOE_DISPATCHERS`), `expert_products` multiplies there (`EXPERT_PRODUCTS`); "" is the description's
    default. `fused` are third-party kernels that replace its own (`FUSED_KERNELS`). `adapter` is set where not all
    weights are trained. `savers` are the memory savers asked for (`simulator.config.savers`); `all_savers` also has
    those implied by other fields. `reentrant` overrides the kind of torch's checkpoints. With `logs_each_step` the host
    reads every step's loss before it goes on.
    """

    name: str = DEFAULT_RUNTIME
    version: str | None = None
    compile: bool = False
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"
    optimizer: str = "adamw"
    low_precision_recipe: str = ""
    wide_layers: tuple[int, int] = (0, 0)
    cuda_graph: bool = False
    adapter: Adapter | None = None
    graph_scopes: tuple[str, ...] = ()
    moe_dispatcher: str = ""
    expert_products: str = ""
    fused: tuple[str, ...] = ()
    savers: tuple[str, ...] = ()
    reentrant: bool | None = None
    logs_each_step: bool = False

    @property
    def low(self) -> bool:
        """Whether products run in fewer than 16 bits."""
        return self.compute_dtype in LOW_PRECISION

    @property
    def in_16_bits(self) -> Runtime:
        """The same with products in 16 bits where they are in fewer."""
        if not self.low:
            return self
        return replace(self, compute_dtype="bfloat16", low_precision_recipe="", wide_layers=(0, 0))

    def is_wide(self, layer: int, layers: int) -> bool:
        """Return whether the products of a layer, of so many, stay in 16 bits while those of others do not."""
        first, last = self.wide_layers
        return self.low and not first <= layer < layers - last

    @property
    def all_savers(self) -> tuple[str, ...]:
        """All memory savers, including those that are third-party kernels or a type of gradients."""
        also = {LINEAR_LOSS: "linear_loss" in self.fused, BF16_GRADIENTS: self.reduce_dtype == "bfloat16"}
        return tuple(word for word in SAVERS if word in self.savers or also.get(word))

    def with_savers(self, words: Iterable[str]) -> Runtime:
        """Return the runtime with more memory savers."""
        given = {*words}
        kernels = {*self.fused, "linear_loss"} if LINEAR_LOSS in given else {*self.fused}
        return replace(
            self,
            savers=tuple(word for word in SAVERS if word in {*self.savers, *given}),
            fused=tuple(sorted(kernels)),
            reduce_dtype="bfloat16" if BF16_GRADIENTS in given else self.reduce_dtype,
        )

    @property
    def activation_dtype(self) -> str:
        """The type of tokens between layers, in which everything except products computes."""
        if self.compute_dtype == TF32:
            return "float32"
        return "bfloat16" if self.low else self.compute_dtype

    @property
    def modelled_instead(self) -> str:
        """What to ask for in the place of what is `not_modelled`."""
        if self.param_dtype in COMPUTE_ONLY:
            return "--param-dtype bfloat16"
        if self.reduce_dtype in COMPUTE_ONLY:
            return "runtime.reduce_dtype float32 in the case"
        return "--compute-dtype bfloat16" if self.adapter is not None and self.low else "--optimizer adamw"

    @property
    def not_modelled(self) -> str:
        """Why this runtime cannot be predicted (a type or an optimizer that is not modelled); empty if it can."""
        stated = {"parameters": self.param_dtype, "gradient reduction": self.reduce_dtype}
        low = [f"{role} in {dtype}" for role, dtype in stated.items() if dtype in COMPUTE_ONLY]
        if low:
            return (
                f"{', '.join(low)} cannot be predicted: only products (--compute-dtype) may be in low precision or TF32"
            )
        if self.adapter is not None and self.low:
            return f"adapters with products in {self.compute_dtype} are not modelled: ask in bfloat16"
        known = OPTIMIZERS.get(self.optimizer)
        if self.adapter is not None and known is not None and known.matrices is not None:
            return f"{self.optimizer} of adapters is not modelled: it orthogonalises hidden matrices, which are frozen"
        return why_no_optimizer(self.optimizer)
