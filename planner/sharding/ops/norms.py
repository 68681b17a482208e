"""Functions that normalize over an axis, and losses: computed from statistics of pieces where the axis is sharded."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from planner.sharding.layouts.layout import Layout
from planner.sharding.ops.aten import (
    AtenCall,
    NotKnownError,
    Shape,
    Statement,
    annotated,
    axes_but,
    letters,
    written,
)
from planner.sharding.ops.axis_flow import NotUnderstood, Value
from planner.sharding.ops.op import Op, Phase, Saves, Step, reduced_phase, statistic, summed, tensor
from planner.sharding.ops.walker import Call, merge_or_keep, position

_EPS = 1e-5


def _softmax(call: Call) -> Value:
    value = call.flow.finish(call.value(0), f"{call.name} needs finished sums")
    dim = value.dims[position(call.number(1, "dim", -1), value)]
    merge_or_keep(call, "softmax", dim, f"{call.name} divides by a sum over it")
    return value


def _cross_entropy(call: Call) -> Value:
    """One loss a row: logits `[..., v]` and targets `[...]`."""
    flow, logits = call.flow, call.flow.finish(call.value(0), "a loss needs finished sums")
    if not logits.dims:
        raise NotUnderstood("logits without classes")
    flow.reduced.update(flow.dim(logits.dims[-1]))
    flow.positional.update(flow.dim(logits.dims[-1]))
    merge_or_keep(call, "cross_entropy", logits.dims[-1], "a loss divides by a sum over it")
    rows = [logits.dims[:-1], call.value(1).dims]
    return Value(flow.broadcast(rows, "the loss"))


def _root_mean_square(call: Call) -> Value:
    flow, value = call.flow, call.flow.finish(call.value(0), "a norm needs finished sums")
    weights = [v for v in call.values()[1:] if v.dims]
    merge_or_keep(call, "rmsnorm", value.dims[-1], "a norm divides by a mean over it")
    return flow.elementwise([value, *weights], call.name)


def _layer_norm(call: Call) -> Value:
    flow, value = call.flow, call.flow.finish(call.value(0), "a norm needs finished sums")
    weights = [v for v in call.values()[1:] if v.dims]
    trailing = max([len(v.dims) for v in weights], default=1)
    for dim in value.dims[-trailing:]:
        merge_or_keep(call, "layernorm", dim, "a norm subtracts a mean over it")
    return flow.elementwise([value, *weights], call.name)


def _group_norm(call: Call) -> Value:
    flow, value = call.flow, call.flow.finish(call.value(0), "a norm needs finished sums")
    for dim in value.dims[1:] if call.name != "batch_norm" else (value.dims[0], *value.dims[2:]):
        flow.keep_unsharded(dim, f"{call.name} takes means over it")
    for weight in call.values()[1:]:
        for dim in weight.dims:
            if call.name == "batch_norm":
                flow.unify(dim, value.dims[1], call.name)
            else:
                flow.keep_unsharded(dim, f"{call.name} takes means over it")
    return value


def _normalized_gradient(call: Call) -> Value:
    flow, (gradient, *saved) = call.flow, call.values()
    values = [gradient, *(flow.finish(value, "a gradient needs finished sums") for value in saved)]
    kind = call.name.removesuffix("_bwd").removesuffix("_backward") + "_bwd"
    merge_or_keep(call, kind, values[0].dims[-1], "the gradient of a norm takes means over it")
    return Value(flow.broadcast([value.dims for value in values], call.name), gradient.pending)


# --- gradients


def _softmax_gradient(step: Step) -> dict[str, str]:
    dim = step.number(1, "dim", -1)
    total = step.emit(f"({step.gradient} * {step.result}).sum({dim}, keepdim=True)")
    return {step.tensor(0): f"({step.gradient} - {total}) * {step.result}"}


def _log_softmax_gradient(step: Step) -> dict[str, str]:
    dim = step.number(1, "dim", -1)
    total = step.emit(f"{step.gradient}.sum({dim}, keepdim=True)")
    return {step.tensor(0): f"{step.gradient} - exp({step.result}) * {total}"}


def _cross_entropy_gradient(step: Step) -> dict[str, str]:
    logits, targets = step.tensor(0), step.tensor(1)
    shares = step.emit(f"softmax({logits}, -1)")
    hit = f"one_hot({targets}, {step.shape(logits)[-1]})"
    return {logits: f"({shares} - {hit}) * {step.gradient}.unsqueeze(-1)"}


def _root_mean_square_gradient(step: Step) -> dict[str, str]:
    """With r = 1 / rms(x) and g the gradient times the weight: r g - x r^3 mean(g x)."""
    x, weights = step.tensor(0), step.weights
    square = step.emit(f"({x} * {x}).mean(-1, keepdim=True)")
    scale = step.emit(f"rsqrt({square} + {_EPS})")
    scaled = f"({step.gradient} * {weights[0]})" if weights else step.gradient
    mean = step.emit(f"({scaled} * {x}).mean(-1, keepdim=True)")
    found = {x: f"{scale} * {scaled} - {x} * ({scale} * {scale} * {scale} * {mean})"}
    if weights:
        found[weights[0]] = summed(f"{step.gradient} * {x} * {scale}", len(step.shape(x)) - 1)
    return found


def _layer_norm_gradient(step: Step) -> dict[str, str]:
    """With z the normalized x, r = 1 / std(x), g the gradient times the weight: r (g - mean(g) - z mean(g z))."""
    x, weights = step.tensor(0), step.weights
    rank = len(step.shape(x))
    if weights and len(step.shape(weights[0])) != 1:
        raise NotUnderstood("the gradient of a norm over several dims")
    mean = step.emit(f"{x}.mean(-1, keepdim=True)")
    square = step.emit(f"({x} * {x}).mean(-1, keepdim=True)")
    scale = step.emit(f"rsqrt({square} - {mean} * {mean} + {_EPS})")
    normal = step.emit(f"({x} - {mean}) * {scale}")
    scaled = f"({step.gradient} * {weights[0]})" if weights else step.gradient
    first = step.emit(f"({scaled}).mean(-1, keepdim=True)")
    second = step.emit(f"({scaled} * {normal}).mean(-1, keepdim=True)")
    found = {x: f"{scale} * ({scaled} - {first} - {normal} * {second})"}
    if weights:
        found[weights[0]] = summed(f"{step.gradient} * {normal}", rank - 1)
    if len(weights) > 1:
        found[weights[1]] = summed(step.gradient, rank - 1)
    return found


# --- captured


def _capture_softmax(call: AtenCall) -> list[Statement]:
    dim = call.dim(1, len(call.shape(0)))
    word = "log_softmax" if "log" in call.name else "softmax"
    name, casts = call.tensor(0), list[Statement]()
    if call.dtypes[name] != call.node.dtype:  # `softmax(x, -1, dtype=float32)` of half precision
        wide = f"{call.node.name}_cast"[-64:]
        casts.append(call.statement(f"to({name})", result=wide, op="cast", args=(tensor(name),), kwargs={}))
        name = wide
    return [*casts, call.statement(f"{word}({name}, {dim})", op=word, args=(tensor(name), dim), kwargs={})]


def _weight_and_bias(call: AtenCall, at: int) -> list[str]:
    """Return those tensors of weight and bias, in arguments `at` and after, that are given."""
    return [name for n, word in enumerate(("weight", "bias")) if (name := call.optional_tensor(at + n, word))]


def _capture_norm(call: AtenCall) -> list[Statement]:
    """Layer norm and RMS norm over the last dims; if there are several, they are needed whole."""
    shape, over = call.shape(0), len(call.argument(1))
    word = "layernorm" if call.name == "layer_norm" else "rmsnorm"
    affine = _weight_and_bias(call, 2)
    eps = call.argument(4, 1e-5) if word == "layernorm" else call.argument(3)
    tensors = [{"tensor": name} for name in (call.tensor(0), *affine)]
    args = (tensors, over, call.node.kwargs.get("eps", eps))
    formula = f"{word}({', '.join([call.tensor(0), *affine])})"
    annotation = ""
    if over > 1:  # the formula does not say how many
        dims = letters(shape)
        last = range(len(shape) - over, len(shape))
        parts = [written(dims, dict.fromkeys(last, "^")), *(" ".join(dims[d] for d in last) for _ in affine)]
        annotation = f"{', '.join(parts)} -> {' '.join(dims)}"
    return [call.statement(formula, annotation, op=word, args=args)]


def _capture_group_norm(call: AtenCall) -> list[Statement]:
    shape, groups = call.shape(0), int(call.argument(1))
    width = shape[1] // groups
    n = "a" if shape[0] > 1 else "1"
    space = [f"p{d}" if k > 1 else "1" for d, k in enumerate(shape[2:])]
    channels, plain = f"(g{groups} k{width}^)", f"(g{groups} k{width})"
    affine = _weight_and_bias(call, 2)
    left = [" ".join([n, channels, *(s + ("^" if s != "1" else "") for s in space)]), *(channels for _ in affine)]
    annotation = f"{', '.join(left)} -> {' '.join([n, plain, *space])}"
    tensors = [{"tensor": name} for name in (call.tensor(0), *affine)]
    formula = f"groupnorm({', '.join([call.tensor(0), *affine])})"
    args, sizes = (tensors, width, call.argument(4, 1e-5)), {f"g{groups}": groups, f"k{width}": width}
    return [call.statement(formula, annotation, sizes=sizes, op="groupnorm", args=args)]


def _capture_batch_norm(call: AtenCall) -> list[Statement]:
    """Batch norm with running statistics: channels pass. For training see `batch_norms.py`."""
    training = call.argument(5, default=False) if call.name == "batch_norm" else False
    if training or call.node.index not in {0, None}:
        raise NotKnownError
    axes = axes_but(len(call.shape(0)), [])
    vectors = _weight_and_bias(call, 1)
    vectors += [call.tensor(3), call.tensor(4)]
    return annotated(call, [(call.tensor(0), axes), *((one, axes[1:2]) for one in vectors)], axes)


def _capture_instance_norm(call: AtenCall) -> list[Statement]:
    """Means over space: rows and channels pass. Running statistics would be written, so they are not supported."""
    if call.optional_tensor(3, "running_mean") or call.optional_tensor(4, "running_var"):
        raise NotKnownError
    rank = len(call.shape(0))
    axes = axes_but(rank, range(2, rank))
    vectors = _weight_and_bias(call, 1)
    return annotated(call, [(call.tensor(0), axes), *((one, axes[1:2]) for one in vectors)], axes)


def _capture_weight_norm(call: AtenCall) -> list[Statement]:
    """`v * (g / |v|)`, a norm for every element of one dim; that dim passes."""
    v, g, dim = call.tensor(0), call.tensor(1), call.argument(2, 0)
    rank = len(call.shape(0))
    axes = axes_but(rank, [d for d in range(rank) if d != dim % rank])
    args = (call.argument(0), call.argument(1), dim)
    return annotated(call, [(v, axes), (g, axes)], axes, op="weight_norm", args=args)


def _capture_losses(call: AtenCall) -> list[Statement]:
    """A loss for every row, by a kernel that needs all classes, and its reduction.

    Supports class weights, smoothing and dims after the classes; targets are class numbers or probabilities.
    """
    x, targets = call.shape(0), call.shape(1)
    word = "nll_loss" if "nll" in call.name else "cross_entropy"
    smoothing = call.argument(5, 0.0) if word == "cross_entropy" else 0.0
    weights, reduction, ignored = call.optional_tensor(2, "weight"), call.argument(3, 1), call.argument(4, -100)
    at = min(1, len(x) - 1)  # the dim of classes
    axes = axes_but(len(x), [at])
    shares = targets == x
    if not shares and targets != (*x[:at], *x[at + 1 :]):
        raise NotKnownError
    kept = [axis for d, axis in enumerate(axes) if d != at]
    of_rows = tuple(n for d, n in enumerate(x) if d != at)
    operands = [(call.tensor(0), axes), (call.tensor(1), axes if shares else kept)]
    operands += [(weights, [axes[at]])] if weights else []
    names = [name for name, _ in operands]
    if len(set(names)) != len(names) or len(x) < 2:
        raise NotKnownError
    given = (call.argument(0), call.argument(1), tensor(weights) if weights else None)

    def losses(suffix: str, kernel: str, more: tuple[Any, ...]) -> Statement:
        parts = [
            " ".join("1" if size == 1 else axis for axis, size in zip(dims, call.shapes[name], strict=True))
            for name, dims in operands
        ]
        right = " ".join("1" if size == 1 else axis for axis, size in zip(kept, of_rows, strict=True))
        formula = f"{kernel}_of({', '.join(names)})"
        return _made(call, suffix, formula, kernel, (*given, *more), of_rows, f"{', '.join(parts)} -> {right}")

    own = losses("rows" if reduction else "", "loss_rows", (word, ignored, smoothing))
    if shares:  # the mean is over rows, for any weights
        return _reduced_loss(call, own, reduction, prod(of_rows))
    return _reduced_loss(call, own, reduction, lambda: losses("counted", "loss_weights", (ignored,)))


def _made(
    call: AtenCall, suffix: str, formula: str, op: str, args: tuple[Any, ...], shape: Shape, annotation: str = ""
) -> Statement:
    """Return a statement of a captured operator that takes several; the last one, without a suffix, has its name."""
    result = f"{call.node.name}_{suffix}"[-64:] if suffix else call.node.name
    return call.statement(formula, annotation, result=result, op=op, args=args, shape=shape)


def _reduced_loss(
    call: AtenCall, own: Statement, reduction: int, counted: int | Callable[[], Statement]
) -> list[Statement]:
    """Return the losses of all rows with their sum (2) or mean (1) after them; 0 is neither.

    A mean is over a number of rows, or over the sum of what `counted` computes of each.
    """

    def total_of(suffix: str, one: Statement) -> Statement:
        args = (tensor(one.result), list(range(len(one.shape))), False)
        return _made(call, suffix, f"sum({one.result})", "reduce.sum", args, ())

    if reduction == 0:
        return [own]
    total = total_of("total" if reduction == 1 else "", own)
    if reduction == 2:
        return [own, total]
    if isinstance(counted, int):
        args: tuple[Any, ...] = (tensor(total.result), counted)
        return [own, total, _made(call, "", f"{total.result} / {counted}", "aten.div.Scalar", args, ())]
    each = counted()
    count = total_of("count", each)
    args = (tensor(total.result), tensor(count.result))
    return [own, total, each, count, _made(call, "", f"{total.result} / {count.result}", "aten.div.Tensor", args, ())]


def _capture_cross_entropy(call: AtenCall) -> list[Statement]:
    """Rows of the loss, then their mean over the targets that are not ignored."""
    if len(call.shape(0)) != 2 or call.argument(2) is not None or call.argument(5, 0.0) or len(call.shape(1)) != 1:
        return _capture_losses(call)
    logits, targets = call.tensor(0), call.tensor(1)
    rows, reduction, ignored = call.shape(0)[0], call.argument(3, 1), call.argument(4, -100)

    def valid() -> Statement:
        of_targets = (tensor(targets), ignored)
        return _made(call, "valid", f"ne({targets}, {int(ignored)})", "not_equal", of_targets, (rows,))

    loss, args = f"cross_entropy({logits}, {targets})", (tensor(logits), tensor(targets), ignored)
    own = _made(call, "rows" if reduction else "", loss, "cross_entropy", args, (rows,))
    return _reduced_loss(call, own, reduction, valid)


# --- over a sharded axis


def _softmax_phases(statement: Statement, layout: Layout, result: Layout) -> list[Phase]:
    del result
    (x,), dim = statement.operands, statement.args[1]
    rows = statistic(layout, statement.shape, dim)
    top = reduced_phase("top", "row_max", (x,), (tensor(x), dim), "max", **rows)
    total = reduced_phase("total", "row_exp_sum", (x, "top"), (tensor(x), tensor("top"), dim), "sum", **rows)
    args = (tensor(x), tensor("top"), tensor("total"))
    return [*top, *total, Phase(reads=(x, "top", "total"), op=f"{statement.op}.finish", args=args, share=0.4)]


def _norm_phases(statement: Statement, layout: Layout, result: Layout) -> list[Phase]:
    del result
    tensors, _, eps = statement.args
    size, names = statement.shape[-1], tuple(one["tensor"] for one in tensors)
    rows = statistic(layout, statement.shape, len(statement.shape) - 1)
    x = (tensor(names[0]),)
    sums = ("sums", "squares") if statement.op == "layernorm" else ("squares",)
    kernels = {"sums": "row_sum", "squares": "row_squares"}
    found = [one for name in sums for one in reduced_phase(name, kernels[name], names[:1], x, "sum", **rows)]
    args = (list(tensors), *(tensor(name) for name in sums), size, eps)
    share = 1.0 - 0.3 * len(sums)
    return [*found, Phase(reads=(*names, *sums), op=f"{statement.op}.finish", args=args, share=share)]


def _cross_entropy_phases(statement: Statement, layout: Layout, result: Layout) -> list[Phase]:
    del result
    logits, targets, ignored = statement.args
    names = (logits["tensor"], targets["tensor"])
    rows = statistic(layout, (statement.shape[0], 1), 1)
    top = reduced_phase("top", "row_max", names[:1], (logits, 1), "max", **rows)
    total = reduced_phase("total", "row_exp_sum", (names[0], "top"), (logits, tensor("top"), 1), "sum", **rows)
    hit = reduced_phase("hit", "target_logit", names, (logits, targets), "sum", **rows)
    args = (tensor("top"), tensor("total"), tensor("hit"), targets, ignored)
    finish = Phase(reads=("top", "total", "hit", names[1]), op="cross_entropy.finish", args=args, share=0.1)
    return [*top, *total, *hit, finish]


_ROWS = (("rows", "max"), ("rows", "sum"))
OPS = (
    Op(
        names="softmax",
        axes=_softmax,
        kind="softmax",
        merges=True,
        statistics=_ROWS,
        gradient=_softmax_gradient,
        gradient_axes=_normalized_gradient,
        aten="softmax _softmax",
        capture=_capture_softmax,
        kernels="softmax",
        saves=Saves.RESULT,
        phases=_softmax_phases,
    ),
    Op(
        names="log_softmax",
        axes=_softmax,
        kind="softmax",
        merges=True,
        statistics=_ROWS,
        gradient=_log_softmax_gradient,
        gradient_axes=_normalized_gradient,
        aten="log_softmax _log_softmax",
        capture=_capture_softmax,
        kernels="log_softmax",
        saves=Saves.RESULT,
        phases=_softmax_phases,
    ),
    Op(
        names="cross_entropy",
        axes=_cross_entropy,
        kind="cross_entropy",
        merges=True,
        statistics=(*_ROWS, ("rows", "sum")),
        gradient=_cross_entropy_gradient,
        aten="cross_entropy_loss",
        capture=_capture_cross_entropy,
        kernels="cross_entropy",
        phases=_cross_entropy_phases,
    ),
    Op(
        names="rmsnorm rms_norm",
        axes=_root_mean_square,
        kind="rmsnorm",
        merges=True,
        statistics=(("rows", "sum"),),
        gradient=_root_mean_square_gradient,
        gradient_axes=_normalized_gradient,
        aten="rms_norm",
        capture=_capture_norm,
        kernels="rmsnorm",
        phases=_norm_phases,
    ),
    Op(
        names="layernorm layer_norm",
        axes=_layer_norm,
        kind="layernorm",
        merges=True,
        statistics=(("pairs of rows", "sum"),),
        gradient=_layer_norm_gradient,
        gradient_axes=_normalized_gradient,
        aten="layer_norm",
        capture=_capture_norm,
        kernels="layernorm",
        phases=_norm_phases,
    ),
    Op(names="group_norm batch_norm instance_norm", axes=_group_norm),
    Op(aten="group_norm", capture=_capture_group_norm),
    Op(
        aten="batch_norm _native_batch_norm_legit_no_training _batch_norm_no_update",
        capture=_capture_batch_norm,
    ),
    Op(aten="instance_norm", capture=_capture_instance_norm),
    Op(aten="_weight_norm", capture=_capture_weight_norm),
    Op(aten="nll_loss_nd nll_loss nll_loss2d", capture=_capture_losses),
)
