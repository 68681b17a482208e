"""The operators of one model under one runtime: those of its description whose conditions the model meets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache

from simulator.config.model import Model
from simulator.config.model_families import FAMILIES
from simulator.config.runtime import DTYPE_BYTES, Runtime
from simulator.config.workload import Workload
from simulator.kernels.low_precision import recipe_of
from simulator.kernels.operators import OperatorSpec
from simulator.runtimes.adapted import adapted, adapted_ends, casts_adapters
from simulator.runtimes.library import RuntimeSpec, attention_implementation, is_mixed_precision, spec_for
from simulator.runtimes.parts import RecomputeSpec
from simulator.runtimes.quantized import quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOperators:
    """The operators of one model under one runtime, in execution order, with conditions on the model decided.

    `when` of these operators holds only what depends on the plan (`PLAN_CONDITIONS`). `moe_layer` is empty for a model
    without experts. `wide_layers` are those of layers that stay in 16 bits, by the `code` of their units
    (`simulator.step.units`), and `wide_recompute` their modes.
    """

    spec: RuntimeSpec
    dense_layer: tuple[OperatorSpec, ...]
    moe_layer: tuple[OperatorSpec, ...]
    embedding: tuple[OperatorSpec, ...]
    head: tuple[OperatorSpec, ...]
    features: frozenset[str] = field(default_factory=frozenset)
    wide_layers: Mapping[str, tuple[OperatorSpec, ...]] = field(default_factory=dict)
    wide_recompute: Mapping[str, RecomputeSpec] = field(default_factory=dict)

    @property
    def blocks(self) -> dict[str, tuple[OperatorSpec, ...]]:
        """The operators of each block, by the code of its units: kinds of layer, and the ends of the network."""
        experts = {"moe": self.moe_layer} if self.moe_layer else {}
        ends = {"embedding": self.embedding, "head": self.head}
        return {"dense": self.dense_layer, **experts, **self.wide_layers, **ends}

    def modes(self, code: str) -> Mapping[str, RecomputeSpec]:
        """Return the recompute modes of a kind of layer."""
        return self.wide_recompute if code in self.wide_layers else self.spec.recompute


# Codes of layers that stay in 16 bits, by their block.
WIDE = {"dense": "dense in 16 bits", "moe": "moe in 16 bits"}
CASTS = frozenset({"cast", "narrowed", "pieced", "rotated"})  # symbols in `units` that a compiler makes quick
_PLAN_SIDE = ("sp", "rows_apart", "autocast", "cp_ring", "cp_all_gather", "cp_all_to_all", "cp", "ep", "etp")
PLAN_CONDITIONS = frozenset(_PLAN_SIDE) | {f"!{name}" for name in _PLAN_SIDE}


def layer_code(model: Model, runtime: Runtime, layer: int) -> str:
    """Return which operators a layer runs (`ModelOperators.blocks`)."""
    block = "moe" if model.layer_kinds[layer].sparse else "dense"
    return WIDE[block] if runtime.is_wide(layer, model.layers) else block


@lru_cache(maxsize=32)
def operators_for(model: Model, runtime: Runtime) -> ModelOperators:
    """Return the operators that `runtime` runs for `model`."""
    spec = _with_head_weight(_described(model, runtime), model)
    features = _features(model, runtime, spec)
    attention = spec.layer.latent_attention if model.latent else spec.layer.attention

    def with_sites(operators: tuple[OperatorSpec, ...], block: str) -> tuple[OperatorSpec, ...]:
        ends = {"all_gather": f"{block}_in", "reduce_scatter": f"{block}_out"}
        return tuple(replace(o, site=ends.get(o.collective, "")) if o.over == "tp" else o for o in operators)

    # Only into buffers that exist throughout the step do products add their weight gradients themselves.
    adds = spec.state.gradient_dtype == "reduce"
    attention, mlp = with_sites(attention, "attention"), with_sites(spec.layer.mlp, "mlp")

    # Autocast has nothing to cast if parameters are stored in the type of products.
    of_plans = PLAN_CONDITIONS if is_mixed_precision(runtime) else PLAN_CONDITIONS - {"autocast", "!autocast"}

    def active(
        operators: tuple[OperatorSpec, ...], *, in_layer: bool = False, wide: bool = False
    ) -> tuple[OperatorSpec, ...]:
        kept = []
        for operator in operators:
            plan_side = tuple(c for c in operator.when if c in of_plans)
            model_side = [c for c in operator.when if c not in of_plans]
            if all((c[1:] not in features) if c.startswith("!") else (c in features) for c in model_side):
                added = operator.weight_gradient_dtype if adds else "compute"
                kept.append(_cast_at_once(replace(operator, when=plan_side, weight_gradient_dtype=added), features))
        kept = multiplied_as(runtime.expert_products or spec.expert_products, kept)
        kept = replayed(kept, [name for scope in runtime.graph_scopes for name in spec.graph_scopes.get(scope, ())])
        recipe = recipe_of(runtime)
        if in_layer and runtime.adapter is not None:
            casts = casts_adapters(runtime, wide_adapters=spec.wide_adapters)
            return tuple(adapted(kept, model, runtime.adapter, compiled=runtime.compile, wide=casts))
        if recipe is None or spec.low_precision is None or not in_layer or wide:
            return tuple(kept)
        return quantized(kept, spec.low_precision, recipe, runtime.low_precision_recipe)

    embedding, head = active(spec.layer.embedding), active(spec.layer.head)
    if runtime.adapter is not None:
        embedding, head = adapted_ends(embedding, head, model, runtime.adapter)

    layers = {"dense": attention + mlp} | ({"moe": attention + spec.layer.moe} if model.moe else {})
    some_wide = runtime.low and any(runtime.wide_layers)
    return ModelOperators(
        spec=replace(spec, tp_layer_more={part: s for part, s in spec.tp_layer_more.items() if part in features}),
        dense_layer=active(layers["dense"], in_layer=True),
        moe_layer=active(layers.get("moe", ()), in_layer=True),
        wide_layers={WIDE[block]: active(layer, in_layer=True, wide=True) for block, layer in layers.items()}
        if some_wide
        else {},
        wide_recompute=spec_for(runtime.in_16_bits).recompute if some_wide else {},
        embedding=embedding,
        head=head,
        features=features,
    )


def _described(model: Model, runtime: Runtime) -> RuntimeSpec:
    """Return the description of a runtime with the layers that it has for `model`."""
    spec = spec_for(runtime)
    if model.moe or not spec.dense_as:
        return spec
    return replace(spec, layer=spec_for(replace(runtime, name=spec.dense_as, version=None)).layer)


def _cast_at_once(operator: OperatorSpec, features: frozenset[str]) -> OperatorSpec:
    """Return an operator without torch's slow casts, for kernels written by a compiler or types that are float32
    already.
    """
    if not {"compiled", "wide"} & features or not CASTS & {*operator.units, *operator.backward_units}:
        return operator
    units, backward = (
        {kind: tensors for kind, tensors in both.items() if kind not in CASTS}
        for both in (operator.units, operator.backward_units)
    )
    return replace(operator, units=units, backward_units=backward)


def _with_head_weight(spec: RuntimeSpec, model: Model) -> RuntimeSpec:
    """Return a description that divides layers by arithmetic, with the head's weight: its products over those of a
    layer, as nanotron counts them (all projections of attention as wide as the queries, three for any feed-forward
    network).
    """
    if not spec.pipeline.by_arithmetic:
        return spec
    layer = 4 * model.heads * model.head_dim + 3 * model.ffn
    return replace(spec, pipeline=replace(spec.pipeline, head_weight=model.vocab / layer))


def unused_settings(model: Model, runtime: Runtime, workload: Workload) -> tuple[str, ...]:
    """Return, as assumptions, what a runtime and a workload state that changes nothing for `model`."""
    lines = [
        f"runtime.cuda_graph {scope} changes nothing: the layers of {model.name} in {runtime.name} have no such kernels"
        for scope in runtime.graph_scopes
        if scope in spec_for(runtime).graph_scopes and not _replays(model, replace(runtime, graph_scopes=(scope,)))
    ]
    if model.moe is None:
        stated = {"moe_dispatcher": runtime.moe_dispatcher, "expert_products": runtime.expert_products}
        lines += [f"runtime.{key} {word} changes nothing: no experts" for key, word in stated.items() if word]
    if workload.attended_len < workload.seq_len and attention_implementation(runtime) == "unfused":
        lines.append(
            f"documents of {workload.document_len:,} tokens change nothing: attention that is not fused multiplies"
            " whole sequences"
        )
    return tuple(lines)


def _replays(model: Model, runtime: Runtime) -> bool:
    """Return whether CUDA graphs of the runtime's parts hold kernels of the model."""
    found = operators_for(model, runtime)
    return any(one.replayed for one in (*found.dense_layer, *found.moe_layer))


FUSED_DISPATCH = ("deepep", "hybridep")


def dispatcher_of(runtime: Runtime, spec: RuntimeSpec) -> str:
    """Return how tokens are sent to experts: as stated, if the description has that."""
    return runtime.moe_dispatcher if runtime.moe_dispatcher in spec.dispatchers else spec.dispatchers[0]


def _features(model: Model, runtime: Runtime, spec: RuntimeSpec) -> frozenset[str]:
    family = FAMILIES.get(model.family)
    dispatcher = dispatcher_of(runtime, spec)
    named = {
        "gated": model.gated_mlp,
        "qk_norm": model.qk_norm,
        "qk_norm_wide": model.qk_norm_wide,
        "rotary": model.rotary,
        "grouped_heads": model.kv_heads < model.heads,
        "sinks": model.attention_sinks,
        "latent": model.latent is not None,
        "dtensors": not spec.host.plain_tensors,
        "dropout": spec.dropout and family is not None and family.dropout,
        "shared_expert": bool(model.moe and model.moe.shared_ffn),
        "balance_loss": bool(model.moe) and model.family not in spec.unbalanced,
        "expert_bias": bool(model.moe and model.moe.expert_bias),
        "qkv_bias": model.qkv_bias,
        "attention_out_bias": model.attention_out_bias,
        "mlp_bias": model.mlp_bias,
        "selection_bias": bool(model.moe and model.moe.selection_bias),
        "copies_by_eight": bool(model.moe and model.moe.experts_per_token % 8 == 0),
        "compiled": runtime.compile,
        "fused_layers": runtime.compile or "layers" in runtime.fused,
        "wide": DTYPE_BYTES[runtime.activation_dtype] > 2,
        "scores_after": model.family in spec.scores_after,
        "q_lora": bool(model.latent and model.latent.q_lora_rank),
        dispatcher: True,
        "fused_dispatch": dispatcher in FUSED_DISPATCH,
        **{f"fused_{part}": part in runtime.fused for part in ("loss", "linear_loss")},
        "fused": bool({"loss", "linear_loss"} & {*runtime.fused}),
        attention_implementation(runtime): True,
    }
    return frozenset(name for name, holds in named.items() if holds)


# --- how kernels are launched -----------------------------------------------------------------------------------------


# Host time of a further product that TransformerEngine's GroupedLinear issues in its own loop, over that of a launch
# through Python and autograd (transformer_engine/common/gemm: nvte_multi_stream_cublas_gemm). Source: assumed.
PRODUCT_LAUNCH = 0.2
# What Python and autograd do around it for each expert, in launches: views and saved tensors in the forward pass; in
# the backward pass a placeholder for the weight's gradient, and the hook of Megatron's DDP on the weight.
# Source: tests/tools/megatron_operators.py on a CPU, the middle of three runs (0.27 to 0.50, 0.99 to 1.71).
AROUND_EXPERT = 0.43, 1.56


def multiplied_as(products: str, operators: Sequence[OperatorSpec]) -> list[OperatorSpec]:
    """Return the operators with products of experts as a runtime states them (`EXPERT_PRODUCTS`)."""
    found = []
    for operator in operators:
        product = bool(operator.matmul) and operator.matmul.split()[0] == "e"
        between = "r fe" in operator.writes and not product and not operator.collective
        if product and products == "te_grouped":
            found.append(replace(operator, by_expert=PRODUCT_LAUNCH, around_expert=AROUND_EXPERT))
        elif (product or between) and products == "loop":
            found.append(replace(operator, by_expert=1.0, one_by_one=True))
        else:
            found.append(operator)
    return found


def replayed(operators: Sequence[OperatorSpec], patterns: Sequence[str]) -> list[OperatorSpec]:
    """Return the operators with each sequence in a CUDA graph launched by its first operator."""
    found: list[OperatorSpec] = []
    inside = False
    for operator in operators:
        held = any(fnmatchcase(operator.name, pattern) for pattern in patterns)
        found.append(replace(operator, replayed=True) if held and inside else operator)
        inside = held
    return found
