"""The operators of a model in which only adapters, or only some modules, are trained.

A frozen product computes the gradient of its input and not that of its weight, so autograd does not save its input.
LoRA adds two thin products that read the same input after dropout, and whose scaled result is added to that of the
frozen product (peft/tuners/lora/layer.py, `Linear.forward`; torchtune/modules/peft/lora.py does the same). A packed
weight is unpacked to a 16-bit copy before its product, forward and backward, which is freed after it
(bitsandbytes/autograd/_functions.py, `MatMul4Bit`; torchao/dtypes/nf4tensor.py, `LinearNF4`). The parameters of DoRA's
and IA3's vectors are not counted: they are less than a thousandth of a percent of a model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.config.adapter import (
    ALL_LINEAR,
    DORA,
    IA3,
    UNPACKING_LAUNCHES,
    Adapter,
    frozen_parts,
    projections_named,
)
from simulator.config.adapter import FUSED_FAMILIES as FUSED
from simulator.config.model import Model
from simulator.config.runtime import DTYPE_BYTES, Runtime
from simulator.kernels.operators import OperatorSpec, parse_matmul

RANK = "R"  # axis of an adapter's rank

# The projections of products, by the axes of their weights. Where two projections have the same axes, the operator's
# name decides.
_BY_WEIGHT: dict[tuple[str, ...], tuple[str, ...]] = {
    ("h", "qkv"): ("q", "k", "v"),
    ("h", "q"): ("q",),
    ("h", "qk"): ("q",),
    ("q", "h"): ("o",),
    ("vv", "h"): ("o",),
    ("f", "h"): ("down",),
    ("fe", "h"): ("down",),
    ("fs", "h"): ("down",),
    ("h", "gf"): ("gate", "up"),
    ("h", "gfe"): ("gate", "up"),
    ("h", "gfs"): ("gate", "up"),
    ("h", "ql"): ("q_a",),
    ("ql", "qk"): ("q_b",),
    ("h", "cr"): ("kv_a",),
    ("cl", "kx"): ("kv_b",),
    ("h", "E"): ("router",),
}
# Axes of a single projection's result, for products that combine several.
_OWN_AXIS = {"q": "q", "k": "kv", "v": "kv", "gate": "f", "up": "f"}


def projections_of(operator: OperatorSpec, *, gated: bool) -> tuple[str, ...]:
    """Return the projections whose matrices a product multiplies with; none for a product of activations."""
    if not operator.weight:
        return ()
    left, right, out = parse_matmul(operator.matmul)
    weight = tuple(axis for axis in right if axis not in left or axis not in out)
    if weight == ("h", "kv"):
        return ("k",) if operator.name.endswith("k") else ("v",)
    if weight in {("h", "f"), ("h", "fe"), ("h", "fs")}:
        return ("gate",) if gated and operator.name.endswith("1") else ("up",)
    return _BY_WEIGHT.get(weight, ())


def adapted(
    operators: Sequence[OperatorSpec], model: Model, adapter: Adapter, *, compiled: bool, wide: bool = False
) -> list[OperatorSpec]:
    """Return the operators of a layer with its frozen products, its adapters and the unpacking of its weights. If
    adapters are kept in float32 and autocast computes their products (`wide`), their input is cast to float32
    (peft/tuners/lora/layer.py, `_cast_input_dtype`), dropped out, and cast back.
    """
    found: list[OperatorSpec] = []
    frozen = frozen_projections(model, adapter)
    for operator in operators:
        own = projections_of(operator, gated=model.gated_mlp)
        if not own:
            norm = operator.name.rstrip("_0123456789").endswith("norm")
            still = adapter.freezes_all or "norms" in frozen
            found.append(_frozen_norm(operator) if norm and still else operator)
            continue
        adds = [one for out in _adapters(own, model, adapter) for one in _lora(operator, out, adapter, compiled, wide)]
        routed = "e" in operator.weight
        still = adapter.freezes_all or ("experts" if routed else own[0]) in frozen
        product = replace(operator, weight_gradient=False) if still else operator
        unpacked = _unpacked(product, adapter) if still and adapter.packed and own != ("router",) else [product]
        sums = [_sum_of_gradients(operator, compiled=compiled)] if adds else []
        before, after = _vectors(operator, own, model, adapter)
        found += [*sums, *before, *unpacked, *adds, *after]
    return _keeping_what_is_needed(found, own_copy=wide or adapter.dropout > 0)


def _sum_of_gradients(product: OperatorSpec, *, compiled: bool) -> OperatorSpec:
    """Return the sum of the gradients of an input from its product and from its adapter. A compiler adds them in the
    kernel that needs the sum, which reads one tensor more.
    """
    given, name = " ".join(parse_matmul(product.matmul)[0]), f"{product.name}_lora_sum"
    if compiled:
        return replace(_backward_only(name, product, (given,), ()), backward_launches=0.0)
    return _backward_only(name, product, (f"2*{given}",), (given,))


def _frozen_norm(norm: OperatorSpec) -> OperatorSpec:
    """Return a norm whose weight has no gradient: a norm of several kernels saves the normalised tokens in 16 bits,
    besides the input in float32, only for that gradient.
    """
    wide = [tensor for tensor in norm.saves if tensor.endswith(":f32") and " " in tensor]
    narrow = [tensor.removesuffix(":f32") for tensor in wide]
    return replace(norm, saves=tuple(tensor for tensor in norm.saves if tensor not in narrow))


def trained_dtype(runtime: Runtime, *, wide_adapters: bool) -> str:
    """Return the type of trained parameters: with `wide_adapters` in the runtime's description adapters are float32
    next to narrower weights, unless third-party kernels compute them.
    """
    adapter = runtime.adapter
    wide = wide_adapters and adapter is not None and adapter.freezes_all and not _fuses_adapters(runtime)
    return "float32" if wide else runtime.param_dtype


def casts_adapters(runtime: Runtime, *, wide_adapters: bool) -> bool:
    """Whether adapters cast their inputs with kernels of their own."""
    narrow = not runtime.compile and DTYPE_BYTES[runtime.activation_dtype] < 4
    return wide_adapters and narrow and not _fuses_adapters(runtime)


def _fuses_adapters(runtime: Runtime) -> bool:
    packed = runtime.adapter is not None and runtime.adapter.packed
    return "adapters" in runtime.fused or ("packed_adapters" in runtime.fused and packed)


def frozen_projections(model: Model, adapter: Adapter) -> frozenset[str]:
    """Return the parts of the model that its own training freezes: all, or those that patterns name."""
    return frozenset() if adapter.freezes_all else frozen_parts(adapter.target_modules, model)


def _adapters(own: tuple[str, ...], model: Model, adapter: Adapter) -> list[str]:
    """Return the axes of the results of the adapters next to a product; "" is the product's own."""
    if not adapter.freezes_all or adapter.kind == IA3:
        return []
    wanted = projections_named(adapter.target_modules, fused=model.family in FUSED)
    if wanted == (ALL_LINEAR,):
        if own == ("router",):
            return []
        wanted = ("qkv", "o", "gate", "up", "down") if model.family in FUSED else own
    together = [name for name, last in (("qkv", "v"), ("gate_up", "up")) if name in wanted and last in own]
    if together:
        return ["qkv" if together == ["qkv"] else "gf" if model.gated_mlp else "f"]
    found = [name for name in own if name in wanted]
    return [""] if len(own) == 1 and found else [_OWN_AXIS[name] for name in found]


def _lora(product: OperatorSpec, out_axis: str, adapter: Adapter, compiled: bool, wide: bool) -> list[OperatorSpec]:
    """Return the operators of one adapter next to a product, in the order in which they run."""
    left, right, out = parse_matmul(product.matmul)
    batch = [axis for axis in right if axis in left and axis in out]
    inner = [axis for axis in left if axis in right and axis not in batch]
    outer = [out_axis] if out_axis else [axis for axis in right if axis in out and axis not in batch]
    tokens = [axis for axis in left if axis not in right and axis not in batch]
    given, thin, result = (" ".join([*batch, *tokens, axes]) for axes in (*inner, RANK, *outer))
    down, up = (" ".join([*batch, *axes]) for axes in ((*inner, RANK), (RANK, *outer)))
    name = f"{product.name}_lora{'_' + out_axis if out_axis else ''}"
    base = OperatorSpec(name=name, when=product.when, adapter=True)
    found = _wide_input(base, given, adapter) if wide else []
    if adapter.dropout and not wide:
        mask = f"{given}:mask"
        # A compiler draws the same random numbers again instead of saving the mask.
        saved = (given,) if compiled else (given, mask)
        drop = replace(base, name=f"{name}_dropout", reads=(given,), writes=(given,) if compiled else (given, mask))
        found.append(replace(drop, saves=saved, backward_reads=saved, backward_writes=(given,)))
    dtype = product.weight_gradient_dtype
    found += [
        replace(base, name=f"{name}_a", matmul=f"{given}, {down} -> {thin}", weight_gradient_dtype=dtype),
        replace(base, name=f"{name}_b", matmul=f"{thin}, {up} -> {result}", saves=(thin,), weight_gradient_dtype=dtype),
    ]
    scale = replace(base, name=f"{name}_scale", reads=(result,), writes=(result,), launches=1.0)
    scale = replace(scale, backward_reads=(result,), backward_writes=(result,))
    add = replace(base, name=f"{name}_add", reads=(f"2*{result}",), writes=(result,))
    if adapter.kind == DORA:
        return [*found, scale, *_norm_of_columns(base, name, product, result)]
    # A compiler scales and adds in the kernel that needs the sum, which reads one tensor more.
    fused = replace(base, name=f"{name}_scale_add", reads=(result,), launches=0.0)
    return [*found, fused] if compiled else [*found, scale, add]


def _wide_input(base: OperatorSpec, given: str, adapter: Adapter) -> list[OperatorSpec]:
    """Return the casts and dropout of a float32 adapter's input; the narrow copy is saved for its first product."""
    wide, mask = f"{given}:f32", f"{given}:mask"
    found = [
        replace(
            base,
            name=f"{base.name}_widen",
            units={"cast": (given,)},
            reads=(given,),
            writes=(wide,),
            backward_reads=(wide,),
            backward_writes=(given,),
        )
    ]
    if adapter.dropout:
        dropped = replace(base, name=f"{base.name}_dropout", reads=(wide,), writes=(wide, mask), saves=(mask,))
        found.append(replace(dropped, backward_reads=(wide, mask), backward_writes=(wide,)))
    narrow = replace(base, name=f"{base.name}_narrow", reads=(wide,), writes=(given,), saves=(given,))
    return [
        *found,
        replace(narrow, backward_units={"cast": (given,)}, backward_reads=(given,), backward_writes=(wide,)),
    ]


def _vectors(
    product: OperatorSpec, own: tuple[str, ...], model: Model, adapter: Adapter
) -> tuple[list[OperatorSpec], list[OperatorSpec]]:
    """Return IA3's operators before and after a product: it scales the input of the feed-forward's second product, and
    the results of others (peft/tuners/ia3/layer.py). The gradient of a vector needs the tensor that it scales.
    """
    if adapter.kind != IA3:
        return [], []
    wanted = projections_named(adapter.target_modules, fused=model.family in FUSED)
    names = [name for name in own if name in wanted or wanted == (ALL_LINEAR,)]
    left, right, out = parse_matmul(product.matmul)
    rows = [axis for axis in out if axis in left]

    def scale(tensor: str, name: str) -> OperatorSpec:
        return OperatorSpec(
            name=f"{product.name}_{name}_vector",
            when=product.when,
            adapter=True,
            reads=(tensor,),
            writes=(tensor,),
            saves=(tensor,),
            backward_reads=(f"4*{tensor}",),  # the gradient times the vector, and times the scaled tensor, summed
            backward_writes=(f"2*{tensor}",),
            backward_launches=3.0,
        )

    before = [scale(" ".join(left), "input")] if "down" in names else []
    axes = {
        name: [_OWN_AXIS[name]] if len(own) > 1 else [a for a in right if a in out and a not in left] for name in own
    }
    return before, [scale(" ".join([*rows, *axes[name]]), name) for name in names if name != "down"]


def _norm_of_columns(base: OperatorSpec, name: str, product: OperatorSpec, result: str) -> list[OperatorSpec]:
    """Return DoRA's further operators: the weight with its adapter's product added, its norms by column, and the result
    scaled by the magnitudes over them (peft/tuners/lora/dora.py). Norms have no gradient.
    """
    weight = " ".join(product.weight)
    return [
        replace(
            base,
            name=f"{name}_weight_norm",
            reads=(f"4*{weight}",),
            writes=(f"2*{weight}",),
            transient=True,
            launches=5.0,
        ),
        replace(
            base,
            name=f"{name}_magnitude",
            reads=(f"5*{result}",),
            writes=(f"3*{result}",),
            saves=(result,),
            launches=4.0,
            backward_reads=(f"5*{result}",),
            backward_writes=(f"3*{result}",),
            backward_launches=5.0,
        ),
    ]


def _unpacked(product: OperatorSpec, adapter: Adapter) -> list[OperatorSpec]:
    """Return a product of a packed weight with the operator that unpacks it before, forward and backward."""
    weight = " ".join(product.weight)
    launches = UNPACKING_LAUNCHES[adapter.base_weights]
    name, packed = f"{product.name}_unpack", f"{weight}:packed"
    copy = OperatorSpec(
        name=name,
        when=product.when,
        reads=(packed,),
        writes=(weight,),
        allocates=(weight,),
        transient=True,
        launches=launches,
    )
    again = replace(
        _backward_only(f"{name}_again", product, (packed,), (weight,)),
        backward_allocates=(weight,),
        backward_launches=launches,
        transient=True,
    )
    return [copy, replace(product, reads=(weight,), packed=True), again]


def _backward_only(name: str, product: OperatorSpec, reads: tuple[str, ...], writes: tuple[str, ...]) -> OperatorSpec:
    return OperatorSpec(name=name, when=product.when, launches=0.0, backward_reads=reads, backward_writes=writes)


def _keeping_what_is_needed(operators: Sequence[OperatorSpec], *, own_copy: bool) -> list[OperatorSpec]:
    """Return the operators with frozen products that save their input only if a weight gradient needs it.

    In a description the first of several products that read one input saves it for all. An adapter reads that input, or
    its `own_copy` of it, which is saved already.
    """
    found = list(operators)
    group: list[int] = []
    needed, given = False, ""
    for place, operator in enumerate([*operators, None]):
        if operator is not None and not operator.weight:
            continue
        mine = " ".join(parse_matmul(operator.matmul)[0]) if operator is not None else ""
        if operator is not None and operator.adapter:
            needed = needed or (not own_copy and mine == given)
            continue
        if mine != given:
            if not needed:
                for other in group:
                    found[other] = replace(found[other], saves=())
            group, needed, given = [], False, mine
        if operator is not None:
            group.append(place)
            needed = needed or operator.weight_gradient
    return found


def adapted_ends(
    embedding: Sequence[OperatorSpec], head: Sequence[OperatorSpec], model: Model, adapter: Adapter
) -> tuple[tuple[OperatorSpec, ...], tuple[OperatorSpec, ...]]:
    """Return the operators of embedding and head: a frozen embedding has no backward pass, a frozen head only computes
    the gradient of its input.
    """
    frozen = frozen_projections(model, adapter)
    still = {part: adapter.freezes_all or part in frozen for part in ("embedding", "head")}
    if still["embedding"]:
        silent = {"backward_reads": (), "backward_writes": (), "backward_launches": 0.0}
        embedding = [o if o.collective else replace(o, **silent) for o in embedding]  # type: ignore[arg-type]
    if still["head"] and (still["embedding"] or not model.tied_embeddings):
        head = [replace(o, weight_gradient=False, saves=()) if o.matmul else o for o in head]
    return tuple(embedding), tuple(head)
