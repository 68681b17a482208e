"""Runtime descriptions: the kernels that a framework runs for a layer, the tensors it saves, its host costs.

A description is a TOML file under `simulator/runtimes`; a new runtime needs only a new file. A file is read once and
checked against the types here; `operators_for` makes the operators of one model from it, with every `when` decided.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Literal

from simulator.columns.plan_table import WrapsOne
from simulator.config.runtime import DTYPE_BYTES, Runtime
from simulator.runtimes.called import RECOMPUTE_SYNONYMS
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
from simulator.runtimes.quantized import LowPrecisionSpec
from topology.codec import JsonObject, convert
from topology.errors import BadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSpec:
    """A runtime. `recompute_stops`: when recomputation stops as soon as the backward pass has what it needs: `always`,
    where the model is `compiled` or `eager`, or not: `never`, or because checkpoints are `reentrant`; see
    `simulator.runtimes.recomputation`. `attention_kernel` is a curve of efficiency.toml, or `unfused` for separate
    matrix products; `attention_kernel_on` names others by GPU architecture, `attention_kernel_wide` that for
    operands of more than 16 bits. `window_kernel`, `document_kernel` and `sink_kernel`: the attention library for
    layers with a sliding window, of documents that share a sequence, and of heads with sinks, where that is
    another. `document_len`: tokens of a document that its recipes pack. `fixed_segments`: torch's allocator has no
    expandable segments, or not on the GPUs of an architecture (`fixed_segments_on`). `recompute_modules` are parts of a
    layer that can be recomputed together (`simulator.runtimes.parts.RecomputeModes`). `expert_spread`: the standard
    deviation of the load of one of two ranks with experts, over the mean, where nothing evens the router's choice;
    `unbalanced` that of families whose router has no balancing loss. `published_recompute`: recompute modes of its
    configurations of networks by the words that its publications have for them. `recipes`: settings of its own
    recipes, and of those of the description `recipes_of`. `splits_experts`: how tensor-parallel ranks split experts
    (`simulator.columns.experts.EXPERT_SPLITS`). `dispatchers` send tokens to experts, the default first
    (`simulator.config.runtime.MOE_DISPATCHERS`). `graph_scopes`: the operators of each part of a layer that CUDA
    graphs may replay. `wide_adapters`: adapters are float32 with weights of any type. `savers` are its memory
    savers (`simulator.config.savers`); `saver_overrides` replace parts of the description when a run uses one, and
    `where` where layers are `compiled`, or products run by a recipe of low precision. With activation offload, the
    tensors of up to `away_layers` layers may still be on the GPU while they are copied to host memory
    (`simulator.step.away`). `tp_layer_more`: what DTensor costs a layer more, as a share of `host.tp_layer_s`, by a
    feature of the model (`shared_expert`: of its layers with experts). A description that is `like` another states
    only the differences (operators of a part of the layer under `layer.overrides`), and measurements of the other
    apply to it. Models without experts have the layers of the description `dense_as`, where it is given.
    """

    names: tuple[str, ...]
    attention_kernel: str
    attention_kernel_on: dict[str, str] = field(default_factory=dict)
    attention_kernel_wide: str = "unfused"
    window_kernel: str = ""
    document_kernel: str = ""
    sink_kernel: str = ""
    document_len: int = 0
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
    most_zero: int = 3  # the highest ZeRO stage that it has
    low_precision: LowPrecisionSpec | None = None  # None: products run in 16 bits or more
    dropout: bool = False
    fixed_segments: bool = False
    fixed_segments_on: tuple[str, ...] = ()
    expert_spread: float = 0.0
    context_parallel: str = "all_gather"
    unbalanced: dict[str, float] = field(default_factory=dict)
    published_recompute: dict[str, str] = field(default_factory=dict)
    recipes: tuple[RecipeSpec, ...] = ()
    recipes_of: str = ""
    splits_experts: Literal["whole", "tp", "alone"] = "whole"
    dispatchers: tuple[str, ...] = ("alltoall",)
    expert_products: str = ""  # of `EXPERT_PRODUCTS`, where a run does not state them
    graph_scopes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    wide_adapters: bool = False
    scores_after: tuple[str, ...] = ()  # families that weigh the experts' results; others weigh the tokens
    recompute_stops: Literal["never", "reentrant", "compiled", "eager", "always"] = "never"
    earlier: tuple[EarlierSpec, ...] = ()  # the newest first
    later: LaterSpec | None = None
    savers: tuple[str, ...] = ()
    saver_overrides: dict[str, JsonObject] = field(default_factory=dict)
    where: dict[str, JsonObject] = field(default_factory=dict)
    away_layers: int = 0
    tp_layer_more: dict[str, float] = field(default_factory=dict)
    like: str = ""
    dense_as: str = ""
    rules: str = ""  # the framework whose rules apply, if neither it nor the description that it is like has rules
    tools: ToolsSpec = field(default_factory=ToolsSpec)

    @property
    def measured_as(self) -> str:
        """The runtime whose measurements apply to this one."""
        return self.like or self.names[0]

    @property
    def flat_units(self) -> bool:
        """Whether parameters are gathered to one flat tensor that they are views of (FSDP1 and ZeRO), not copied."""
        return self.fsdp.flat_parameters or self.zero is not None


LATER = -1  # the newer generation of a description; 0 is the described one, 1 and up are ever older ones


@cache
def runtime_spec(name: str) -> RuntimeSpec:
    """Return the description that has `name`. Raises BadPlan with the known names otherwise."""
    if name in _files():  # a file is named by its first name: no need to read the others
        return _read(name)
    for spec in map(_read, _files()):
        if name in spec.names:
            return spec
    raise BadPlan(f"runtime {name!r} is unknown", why=f"known: {', '.join(runtime_names())}")


@cache
def is_described(name: str) -> bool:
    """Return whether a description has `name`."""
    return name in _files() or name in runtime_names()


def runtime_names() -> tuple[str, ...]:
    return tuple(name for file in _files() for name in _read(file).names)


@cache
def graph_parts() -> tuple[str, ...]:
    """Return the parts of a layer that some runtime captures as a CUDA graph of its own."""
    return tuple(sorted({part for file in _files() for part in _read(file).graph_scopes}))


@cache
def _files() -> tuple[str, ...]:
    """Return the names of the description files, without extension."""
    folder = resources.files("simulator") / "runtimes"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def lineage(name: str) -> tuple[str, ...]:
    """Return the descriptions that one is `like`, the nearest first."""
    nearest = str(_load_toml(runtime_spec(name).names[0]).get("like", ""))
    return (nearest, *lineage(nearest)) if nearest else ()


def spec_for(runtime: Runtime) -> RuntimeSpec:
    """Return the description for a runtime's version; without a version, the description's own."""
    spec = runtime_spec(runtime.name)
    generation = LATER if is_later_version(runtime) else generations_back(runtime)
    words = ("compiled" if runtime.compile else "", runtime.low_precision_recipe)
    where = tuple(word for word in words if word in spec.where)
    if not generation and not runtime.savers and runtime.reentrant is None and not where:
        return spec
    return _read(spec.names[0], generation, runtime.savers, runtime.reentrant, where)


@cache
def _read(
    file: str,
    generation: int = 0,
    savers: tuple[str, ...] = (),
    reentrant: bool | None = None,
    where: tuple[str, ...] = (),
) -> RuntimeSpec:
    """Return a description as of LATER or of so many generations before the one that it describes."""
    document = _document(file)
    for other in [document["later"]] if generation == LATER else document.get("earlier", [])[:generation]:
        document = _replaced(document, other["overrides"])
    for saver in savers:
        document = _replaced(document, document.get("saver_overrides", {}).get(saver, {}))
    for word in where:
        document = _replaced(document, document["where"][word])
    spec = convert(document, RuntimeSpec, where=f"runtimes/{file}.toml")
    if reentrant is not None and spec.recompute_stops != "never":
        spec = replace(spec, recompute_stops="reentrant" if reentrant else "always")
    return replace(spec, recompute=RecomputeModes(spec.recompute, spec.recompute_modules))


def _document(file: str) -> JsonObject:
    """Return a description completed from the one that it is like. Versions are its own."""
    document = _load_toml(file)
    if document.get("recipes_of"):
        document["recipes"] = [*document.get("recipes", []), *_load_toml(document["recipes_of"])["recipes"]]
    if not document.get("like"):
        return document
    other = {key: value for key, value in _document(document["like"]).items() if key not in {"earlier", "later"}}
    # Measurements are those of the last description in the chain.
    return _replaced(other, document) | {"like": other.get("like") or document["like"]}


def _load_toml(file: str) -> JsonObject:
    return tomllib.loads((resources.files("simulator") / "runtimes" / f"{file}.toml").read_text("utf-8"))


def _merge(below: JsonObject, above: JsonObject) -> JsonObject:
    """Return `below` with the values of `above` in their places, table by table."""
    both = {key: _merge(below[key], value) for key, value in above.items() if isinstance(value, dict) and key in below}
    return {**below, **above, **both}


def _replaced(below: JsonObject, above: JsonObject) -> JsonObject:
    """Return `below` with the values of `above` in their places; operators under `layer.overrides` replace those of the
    same name.
    """
    layer = dict(above.get("layer", {}))
    overrides = layer.pop("overrides", {})
    both = _merge(below, {**above, "layer": layer})
    both["layer"] |= {part: _replace_operators(both["layer"][part], some) for part, some in overrides.items()}
    return both


def _replace_operators(operators: list[JsonObject], others: dict[str, list[JsonObject]]) -> list[JsonObject]:
    """Return a part's operators with `others` in the place of those with the same name; operators of one name stay
    together.
    """
    found: list[JsonObject] = []
    for name, run in groupby(operators, key=lambda operator: str(operator["name"])):
        found += others.get(name, list(run))
    return found


def generations_back(runtime: Runtime) -> int:
    """Return how many generations older than the described one the stated version is; 0 without a version."""
    version = runtime.version
    if version is None:
        return 0
    earlier = runtime_spec(runtime.name).earlier
    if DATED.match(version):
        return sum(bool(one.before_date) and version[:7] < one.before_date for one in earlier)
    return sum(bool(one.before) and _release(version) < _release(one.before) for one in earlier)


def is_later_version(runtime: Runtime) -> bool:
    """Whether `runtime` states a version of the newer generation in its description."""
    later = runtime_spec(runtime.name).later
    if later is None or runtime.version is None:
        return False
    if DATED.match(runtime.version):
        return bool(later.since_date) and runtime.version[:7] >= later.since_date
    return _release(runtime.version) >= _release(later.since)


def attention_kernel(runtime: Runtime, architecture: str, *, documents: bool = False, sinks: bool = False) -> str:
    """Return the attention kernel of `runtime` on GPUs of an architecture: a curve of efficiency.toml, or `unfused`.

    `documents`: several share a sequence; `sinks`: heads have sinks.
    """
    spec = spec_for(runtime)
    special = (spec.sink_kernel if sinks else "") or (spec.document_kernel if documents else "")
    if special:
        return special
    if DTYPE_BYTES[runtime.activation_dtype] > 2:
        return spec.attention_kernel_wide
    if spec.attention_kernel == "unfused":
        return spec.attention_kernel
    return spec.attention_kernel_on.get(architecture.lower(), spec.attention_kernel)


def attention_implementation(runtime: Runtime) -> str:
    """Return `flash` for a fused kernel, which does not save scores, or `unfused`."""
    return "unfused" if attention_kernel(runtime, "") == "unfused" else "flash"


def head_peaks(layer: LayerSpec, runtime: Runtime, *, cut: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the tensors alive together at the start of the loss's backward pass, one tuple per moment; the largest
    decides. `layer` has the operators of the model.

    `cut`: tensor-parallel ranks divide the vocabulary. A head that is frozen with everything else has no gradient.
    """
    adapter = runtime.adapter
    fused = next((part for part in ("linear_loss", "loss") if part in {*runtime.fused} & {*layer.fused_head_peaks}), "")
    moments = (layer.fused_head_peaks[fused],) if fused else _head_moments(layer, runtime, cut=cut)
    if adapter is None or not adapter.freezes_all:
        return moments
    return tuple(tuple(x for x in moment if x.partition(":")[0] != "v h") for moment in moments)


def _head_moments(layer: LayerSpec, runtime: Runtime, *, cut: bool) -> tuple[tuple[str, ...], ...]:
    compiled = ((layer.compiled_cut_head_peak if cut else ()) or layer.compiled_head_peak) if runtime.compile else ()
    return compiled or (layer.cut_head_peak if cut else ()) or layer.head_peak


def turns_at_once(runtime: Runtime) -> bool:
    """Whether the loss computes its gradients in the forward pass."""
    return spec_for(runtime).layer.head_at_once


def head_left(layer: LayerSpec, runtime: Runtime) -> tuple[str, ...]:
    """Return the tensors of the loss whose blocks the allocator keeps as unused cache when its backward pass begins."""
    fused = {*runtime.fused} & {*layer.fused_head_peaks}
    return () if fused or (runtime.compile and layer.compiled_head_peak) else layer.head_left


def compiles(runtime: Runtime) -> bool:
    """Whether the runtime is described with its layers compiled by torch.compile, too."""
    return spec_for(runtime).tools.compiles


def recompute_stops_early(runtime: Runtime) -> bool:
    """Whether recomputing a block stops as soon as the backward pass has what it needs; see
    `simulator.runtimes.recomputation`.
    """
    return spec_for(runtime).recompute_stops in {"always", "compiled" if runtime.compile else "eager"}


# A version may be a year and month for software without version numbers.
DATED = re.compile(r"20\d\d-\d\d(-\d\d)?$")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def is_mixed_precision(runtime: Runtime) -> bool:
    """Return whether products compute in a narrower type than parameters are stored in."""
    return DTYPE_BYTES[runtime.activation_dtype] < DTYPE_BYTES[runtime.param_dtype]


def wraps_one(spec: RuntimeSpec, runtime: Runtime) -> WrapsOne:
    """Return which plans' parameters full sharding wraps where they are a single rank's."""
    word = spec.fsdp.wraps_one
    if word in {"differ", "grouped"} and runtime.param_dtype != runtime.activation_dtype:
        return "casts" if spec.fsdp.casts_own and not runtime.compile and runtime.adapter is None else "always"
    return "never" if word == "differ" else word


def canonical_recompute(word: str, runtime: Runtime) -> str:
    """Return the description's name for a recompute word. Raises BadPlan when the runtime has no such mode."""
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
