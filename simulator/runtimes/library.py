"""Runtime descriptions: which kernels a framework runs for a layer, what it saves, what the host costs.

A description is a TOML file under `simulator/runtimes`; adding a runtime is adding a file. It is read once, checked
against the types here, and made the operators of one model (`operators_for`), with every `when` decided.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import resources
from itertools import groupby
from typing import Literal

from simulator.config.model import Model
from simulator.config.model_families import FAMILIES
from simulator.config.runtime import DTYPE_BYTES, Runtime
from simulator.kernels.low_precision import recipe_of
from simulator.kernels.operators import OperatorSpec
from simulator.runtimes.adapted import adapted, adapted_ends, casts_adapters
from simulator.runtimes.called import RECOMPUTE_SYNONYMS
from simulator.runtimes.launched import multiplied_as, replayed
from simulator.runtimes.parts import (
    MODULES,
    DdpSpec,
    EarlierSpec,
    FsdpSpec,
    HostSpec,
    LaterSpec,
    LayerSpec,
    PipelineSpec,
    RecipeSpec,
    RecomputeModes,
    RecomputeSpec,
    RuntimeDefaults,
    StateSpec,
    ToolsSpec,
    ZeroSpec,
)
from simulator.runtimes.quantized import LowPrecisionSpec, quantized
from topology.codec import JsonObject, convert
from topology.errors import BadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSpec:
    """A runtime. `recompute_stops`: when recomputation ends as soon as backward has what it needs, `never`, where the
    model is `compiled`, or `always`; checkpoints that are `reentrant` never do: `simulator.runtimes.recomputation`.
    `attention_kernel` is a curve of efficiency.toml, or `unfused` where matrices are multiplied; `attention_kernel_on`
    names others by GPU architecture, `attention_kernel_wide` that for operands of more than 16 bits. `window_kernel`:
    the attention library for layers with a sliding window, where that is another. `recompute_modules` are parts of a
    layer that can be recomputed together (`simulator.runtimes.parts.RecomputeModes`). `expert_spread`: the standard
    deviation of the load of one of two ranks with experts, over the mean, where nothing evens what the router chooses;
    `unbalanced` that of families whose router no loss evens. `recipes`: what its own set. `splits_experts`: what
    tensor-parallel ranks do with experts (`simulator.columns.experts.EXPERT_SPLITS`). `dispatchers` send tokens to
    experts, its own first (`simulator.config.runtime.MOE_DISPATCHERS`). `graph_scopes`: the operators of each part of a
    layer that CUDA graphs may replay. `wide_adapters` are kept in float32 whatever the weights are kept in. `savers`
    are the memory savers that it has (`simulator.config.savers`), and `saver_overrides` what replaces parts of the
    description where a run has one; of how many layers that have run what they keep may still be on the GPU on its way
    to host memory is `away_layers` (`simulator.step.away`). A description that is `like` another says only what differs
    (operators of a part of the layer under `layer.overrides`), and what was measured of the other goes for it.
    """

    names: tuple[str, ...]
    attention_kernel: str
    attention_kernel_on: dict[str, str] = field(default_factory=dict)
    attention_kernel_wide: str = "unfused"
    window_kernel: str = ""
    defaults: RuntimeDefaults
    state: StateSpec
    fsdp: FsdpSpec
    ddp: DdpSpec
    pipeline: PipelineSpec
    host: HostSpec
    layer: LayerSpec
    recompute: dict[str, RecomputeSpec]
    recompute_modules: dict[str, RecomputeSpec] = field(default_factory=dict)
    zero: ZeroSpec | None = None
    low_precision: LowPrecisionSpec | None = None  # None: products run in 16 bits or more
    dropout: bool = False
    expert_spread: float = 0.0
    context_parallel: str = "all_gather"
    unbalanced: dict[str, float] = field(default_factory=dict)
    recipes: tuple[RecipeSpec, ...] = ()
    splits_experts: Literal["whole", "tp", "alone"] = "whole"
    dispatchers: tuple[str, ...] = ("alltoall",)
    graph_scopes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    wide_adapters: bool = False
    scores_after: tuple[str, ...] = ()  # families whose experts' results are weighed, where others' tokens are
    recompute_stops: Literal["never", "reentrant", "compiled", "always"] = "never"
    earlier: EarlierSpec | None = None
    later: LaterSpec | None = None
    savers: tuple[str, ...] = ()
    saver_overrides: dict[str, JsonObject] = field(default_factory=dict)
    away_layers: int = 0
    like: str = ""
    rules: str = ""  # the framework whose plans it accepts, where it has no rules of its own, nor what it is like
    tools: ToolsSpec = field(default_factory=ToolsSpec)

    @property
    def measured_as(self) -> str:
        """The runtime whose measurements go for this one."""
        return self.like or self.names[0]


@cache
def runtime_spec(name: str) -> RuntimeSpec:
    """Return the description that claims `name`. Raises BadPlan with the known names otherwise."""
    if name in _files():  # a file is called by the first name in it: no need to read the others
        return _read(name)
    for spec in map(_read, _files()):
        if name in spec.names:
            return spec
    raise BadPlan(f"runtime {name!r} is unknown", why=f"known: {', '.join(runtime_names())}")


@cache
def is_described(name: str) -> bool:
    """Return whether a description claims `name`."""
    return name in _files() or name in runtime_names()


def runtime_names() -> tuple[str, ...]:
    return tuple(name for file in _files() for name in _read(file).names)


@cache
def graph_parts() -> tuple[str, ...]:
    """Return the parts of a layer that some runtime captures as a CUDA graph of its own."""
    return tuple(sorted({part for file in _files() for part in _read(file).graph_scopes}))


@cache
def _files() -> tuple[str, ...]:
    """Return the names of the description files, without their ending."""
    folder = resources.files("simulator") / "runtimes"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def lineage(name: str) -> tuple[str, ...]:
    """Return the descriptions that one is `like`, the nearest first."""
    nearest = str(_load_toml(runtime_spec(name).names[0]).get("like", ""))
    return (nearest, *lineage(nearest)) if nearest else ()


def spec_for(runtime: Runtime) -> RuntimeSpec:
    """Return the description of a runtime in its version: what is read of a run that states none is the description's
    own.
    """
    spec = runtime_spec(runtime.name)
    generation = "earlier" if is_earlier_version(runtime) else "later" if is_later_version(runtime) else ""
    if not generation and not runtime.savers and runtime.reentrant is None:
        return spec
    return _read(spec.names[0], generation, runtime.savers, runtime.reentrant)


@cache
def _read(file: str, generation: str = "", savers: tuple[str, ...] = (), reentrant: bool | None = None) -> RuntimeSpec:
    document = _document(file)
    if generation:
        document = _replaced(document, document[generation]["overrides"])
    for saver in savers:
        document = _replaced(document, document.get("saver_overrides", {}).get(saver, {}))
    spec = convert(document, RuntimeSpec, where=f"runtimes/{file}.toml")
    if reentrant is not None and spec.recompute_stops != "never":
        spec = replace(spec, recompute_stops="reentrant" if reentrant else "always")
    return replace(spec, recompute=RecomputeModes(spec.recompute, spec.recompute_modules))


def _document(file: str) -> JsonObject:
    """Return a description with all that it does not state of what it is like. Versions are its own."""
    document = _load_toml(file)
    if not document.get("like"):
        return document
    other = {key: value for key, value in _document(document["like"]).items() if key not in {"earlier", "later"}}
    # What is measured is the last in such a row.
    return _replaced(other, document) | {"like": other.get("like") or document["like"]}


def _load_toml(file: str) -> JsonObject:
    return tomllib.loads((resources.files("simulator") / "runtimes" / f"{file}.toml").read_text("utf-8"))


def _merge(below: JsonObject, above: JsonObject) -> JsonObject:
    """Return `below` with what `above` says in its place, table by table."""
    both = {key: _merge(below[key], value) for key, value in above.items() if isinstance(value, dict) and key in below}
    return {**below, **above, **both}


def _replaced(below: JsonObject, above: JsonObject) -> JsonObject:
    """Return `below` with what `above` says in its place; operators under `layer.overrides` take those of their
    names.
    """
    layer = dict(above.get("layer", {}))
    overrides = layer.pop("overrides", {})
    both = _merge(below, {**above, "layer": layer})
    both["layer"] |= {part: _replace_operators(both["layer"][part], some) for part, some in overrides.items()}
    return both


def _replace_operators(operators: list[JsonObject], others: dict[str, list[JsonObject]]) -> list[JsonObject]:
    """Return a part's operators with `others` in the places of those of their names; all of one name stand together."""
    found: list[JsonObject] = []
    for name, run in groupby(operators, key=lambda operator: str(operator["name"])):
        found += others.get(name, list(run))
    return found


def is_earlier_version(runtime: Runtime) -> bool:
    """Whether `runtime` states a version of the older generation that its description tells apart."""
    earlier = runtime_spec(runtime.name).earlier
    if earlier is None or runtime.version is None:
        return False
    if DATED.match(runtime.version):
        return bool(earlier.before_date) and runtime.version[:7] < earlier.before_date
    return bool(earlier.before) and _release(runtime.version) < _release(earlier.before)


def is_later_version(runtime: Runtime) -> bool:
    """Whether `runtime` states a version of the newer generation that its description tells apart."""
    later = runtime_spec(runtime.name).later
    if later is None or runtime.version is None:
        return False
    if DATED.match(runtime.version):
        return bool(later.since_date) and runtime.version[:7] >= later.since_date
    return _release(runtime.version) >= _release(later.since)


def attention_kernel(runtime: Runtime, architecture: str) -> str:
    """Return the attention library that `runtime` calls on GPUs of an architecture: a curve of efficiency.toml, or
    `unfused` where it multiplies matrices.
    """
    spec = spec_for(runtime)
    if DTYPE_BYTES[runtime.activation_dtype] > 2:
        return spec.attention_kernel_wide
    if spec.attention_kernel == "unfused":
        return spec.attention_kernel
    return spec.attention_kernel_on.get(architecture.lower(), spec.attention_kernel)


def attention_implementation(runtime: Runtime) -> str:
    """Return `flash` for a fused kernel, which keeps no scores, or `unfused`."""
    return "unfused" if attention_kernel(runtime, "") == "unfused" else "flash"


def head_peaks(runtime: Runtime, *, cut: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the tensors alive together where backward of the loss begins, one tuple a moment; the largest decides.

    `cut`: tensor-parallel ranks have cut the vocabulary. A head that is frozen with all else has no gradient.
    """
    layer, adapter = spec_for(runtime).layer, runtime.adapter
    fused = next((part for part in ("linear_loss", "loss") if part in {*runtime.fused} & {*layer.fused_head_peaks}), "")
    moments = (layer.fused_head_peaks[fused],) if fused else _head_moments(layer, runtime, cut=cut)
    if adapter is None or not adapter.freezes_all:
        return moments
    return tuple(tuple(x for x in moment if x.partition(":")[0] != "v h") for moment in moments)


def _head_moments(layer: LayerSpec, runtime: Runtime, *, cut: bool) -> tuple[tuple[str, ...], ...]:
    compiled = ((layer.compiled_cut_head_peak if cut else ()) or layer.compiled_head_peak) if runtime.compile else ()
    return compiled or (layer.cut_head_peak if cut else ()) or layer.head_peak


def turns_at_once(runtime: Runtime) -> bool:
    """Whether the loss has its gradients in the forward pass."""
    return spec_for(runtime).layer.head_at_once


def head_left(runtime: Runtime) -> tuple[str, ...]:
    """Return the tensors whose blocks the allocator is left with when the loss turns round."""
    layer = spec_for(runtime).layer
    fused = {*runtime.fused} & {*layer.fused_head_peaks}
    return () if fused or (runtime.compile and layer.compiled_head_peak) else layer.head_left


def recompute_stops_early(runtime: Runtime) -> bool:
    """Whether recomputing a block stops as soon as backward has what it needs; see
    `simulator.runtimes.recomputation`.
    """
    return spec_for(runtime).recompute_stops in {"always", "compiled" if runtime.compile else "always"}


# A version may be the year and month of the software where nobody gave it a number.
DATED = re.compile(r"20\d\d-\d\d(-\d\d)?$")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def is_mixed_precision(runtime: Runtime) -> bool:
    """Return whether products compute in a narrower type than parameters are stored in."""
    return DTYPE_BYTES[runtime.activation_dtype] < DTYPE_BYTES[runtime.param_dtype]


def wraps_one(spec: RuntimeSpec, runtime: Runtime) -> bool:
    """Return whether full sharding wraps a single rank's parameters: to compute in a narrower type than is stored, or
    anyway.
    """
    differ = runtime.param_dtype != runtime.activation_dtype
    return spec.fsdp.wraps_one == "always" or (spec.fsdp.wraps_one == "differ" and differ)


def canonical_recompute(word: str, runtime: Runtime) -> str:
    """Return the description's own name for a recompute word. Raises BadPlan when the runtime has no such mode."""
    spec = runtime_spec(runtime.name)
    name = RECOMPUTE_SYNONYMS.get(word, word)
    if name not in spec.recompute and not are_modules(word, spec):
        modules = f", or modules joined by {MODULES}: {', '.join(spec.recompute_modules)}"
        raise BadPlan(
            f"recompute {word!r} is unknown to {runtime.name}",
            why=f"known: {', '.join(spec.recompute)}{modules if spec.recompute_modules else ''}",
        )
    return name


def are_modules(word: str, spec: RuntimeSpec) -> bool:
    """Return whether a recompute word names modules of a description, each once: `core_attn+moe_act`."""
    parts = word.split(MODULES)
    return len({*parts}) == len(parts) and all(part in spec.recompute_modules for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOperators:
    """The operators of one model under one runtime, in execution order, conditions on the model already decided.

    `when` of these operators holds only what depends on the plan (`PLAN_CONDITIONS`).
    """

    spec: RuntimeSpec
    dense_layer: tuple[OperatorSpec, ...]
    moe_layer: tuple[OperatorSpec, ...]
    embedding: tuple[OperatorSpec, ...]
    head: tuple[OperatorSpec, ...]
    features: frozenset[str] = field(default_factory=frozenset)


CASTS = frozenset({"cast", "rotated"})  # in an operator's `units`
_PLAN_SIDE = ("sp", "autocast", "cp_ring", "cp_all_gather", "cp_all_to_all", "cp", "ep", "etp")
PLAN_CONDITIONS = frozenset(_PLAN_SIDE) | {f"!{name}" for name in _PLAN_SIDE}


@lru_cache(maxsize=32)
def operators_for(model: Model, runtime: Runtime) -> ModelOperators:
    """Return the operators `runtime` runs for `model`."""
    spec = _with_head_weight(spec_for(runtime), model)
    features = _features(model, runtime, spec)
    attention = spec.layer.latent_attention if model.latent else spec.layer.attention

    def with_sites(operators: tuple[OperatorSpec, ...], block: str) -> tuple[OperatorSpec, ...]:
        ends = {"all_gather": f"{block}_in", "reduce_scatter": f"{block}_out"}
        return tuple(replace(o, site=ends.get(o.collective, "")) if o.over == "tp" else o for o in operators)

    attention, mlp = with_sites(attention, "attention"), with_sites(spec.layer.mlp, "mlp")

    # Autocast has nothing to cast where parameters are stored in the type that products compute in.
    of_plans = PLAN_CONDITIONS if is_mixed_precision(runtime) else PLAN_CONDITIONS - {"autocast", "!autocast"}

    def active(operators: tuple[OperatorSpec, ...], *, in_layer: bool = False) -> tuple[OperatorSpec, ...]:
        kept = []
        for operator in operators:
            plan_side = tuple(c for c in operator.when if c in of_plans)
            model_side = [c for c in operator.when if c not in of_plans]
            if all((c[1:] not in features) if c.startswith("!") else (c in features) for c in model_side):
                kept.append(_cast_at_once(replace(operator, when=plan_side), features))
        kept = multiplied_as(runtime.expert_products, kept)
        kept = replayed(kept, [name for scope in runtime.graph_scopes for name in spec.graph_scopes.get(scope, ())])
        recipe = recipe_of(runtime)
        if in_layer and runtime.adapter is not None:
            wide = casts_adapters(runtime, wide_adapters=spec.wide_adapters)
            return tuple(adapted(kept, model, runtime.adapter, compiled=runtime.compile, wide=wide))
        if recipe is None or spec.low_precision is None or not in_layer:
            return tuple(kept)
        return quantized(kept, spec.low_precision, recipe)

    embedding, head = active(spec.layer.embedding), active(spec.layer.head)
    if runtime.adapter is not None:
        embedding, head = adapted_ends(embedding, head, model, runtime.adapter)

    return ModelOperators(
        spec=spec,
        dense_layer=active(attention + mlp, in_layer=True),
        moe_layer=active(attention + spec.layer.moe, in_layer=True),
        embedding=embedding,
        head=head,
        features=features,
    )


def _cast_at_once(operator: OperatorSpec, features: frozenset[str]) -> OperatorSpec:
    """Return an operator without torch's slow casts where a compiler writes its kernels, or its type is float32
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
    """Return a description that divides layers by their arithmetic with the head's products over those of a layer:
    weights as nanotron counts them, which takes all projections of attention to be as wide as the queries and three for
    any feed-forward network.
    """
    if not spec.pipeline.by_arithmetic:
        return spec
    layer = 4 * model.heads * model.head_dim + 3 * model.ffn
    return replace(spec, pipeline=replace(spec.pipeline, head_weight=model.vocab / layer))


FUSED_DISPATCH = ("deepep", "hybridep")


def dispatcher_of(runtime: Runtime, spec: RuntimeSpec) -> str:
    """Return how tokens are sent to experts: as stated, where the description has that."""
    return runtime.moe_dispatcher if runtime.moe_dispatcher in spec.dispatchers else spec.dispatchers[0]


def _features(model: Model, runtime: Runtime, spec: RuntimeSpec) -> frozenset[str]:
    family = FAMILIES.get(model.family)
    dispatcher = dispatcher_of(runtime, spec)
    named = {
        "gated": model.gated_mlp,
        "qk_norm": model.qk_norm,
        "qk_norm_wide": model.qk_norm_wide,
        "rotary": model.rotary,
        "dropout": spec.dropout and family is not None and family.dropout,
        "shared_expert": bool(model.moe and model.moe.shared_ffn),
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
