"""Reductions, norms, attention, losses, and what works along one dim or over space."""

from __future__ import annotations

from typing import Any

from planner.sharding.frontends.rules.statement import (
    Call,
    NotKnownError,
    Shape,
    Statement,
    letters,
    result_axes,
    written,
)

REDUCTIONS = frozenset(("sum", "mean", "amax", "amin"))


def reduction(call: Call) -> list[Statement]:
    shape = call.shape(0)
    given = call.argument(1)
    listed = [given] if isinstance(given, int) else (given or list(range(len(shape))))
    reduced = {int(d) % max(len(shape), 1) for d in listed} if isinstance(listed, list) else set()
    keep = bool(call.argument(2, default=False)) or bool(call.node.kwargs.get("keepdim"))
    args = (call.argument(0), sorted(reduced), keep)
    formula = f"{call.name}({call.tensor(0)}, {sorted(reduced)}, keepdim={keep})" if shape else call.tensor(0)
    more: dict[str, Any] = {"args": args, "kwargs": call.node.kwargs if call.name in {"sum", "mean"} else {}}
    return [call.statement(formula, op=f"reduce.{call.name}", **more)]


def softmax(call: Call) -> list[Statement]:
    dim = call.dim(1, len(call.shape(0)))
    word = "log_softmax" if "log" in call.name else "softmax"
    return [call.statement(f"{word}({call.tensor(0)}, {dim})", op=word, args=(call.argument(0), dim), kwargs={})]


def norm(call: Call) -> list[Statement]:
    """Layer norm and RMS norm over the last dims; several of them are needed whole."""
    shape, over = call.shape(0), len(call.argument(1))
    word = "layernorm" if call.name == "layer_norm" else "rmsnorm"
    affine = [name for name in (call.optional_tensor(2, "weight"), call.optional_tensor(3, "bias")) if name]
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
    return [call.statement(formula, annotation, op=word, args=args, kwargs={})]


def group_norm(call: Call) -> list[Statement]:
    shape, groups = call.shape(0), int(call.argument(1))
    width = shape[1] // groups
    n = "a" if shape[0] > 1 else "1"
    space = [f"p{d}" if k > 1 else "1" for d, k in enumerate(shape[2:])]
    channels, plain = f"(g{groups} k{width}^)", f"(g{groups} k{width})"
    affine = [name for name in (call.optional_tensor(2, "weight"), call.optional_tensor(3, "bias")) if name]
    left = [" ".join([n, channels, *(s + ("^" if s != "1" else "") for s in space)]), *(channels for _ in affine)]
    annotation = f"{', '.join(left)} -> {' '.join([n, plain, *space])}"
    tensors = [{"tensor": name} for name in (call.tensor(0), *affine)]
    return [
        call.statement(
            f"groupnorm({', '.join([call.tensor(0), *affine])})",
            annotation,
            sizes={f"g{groups}": groups, f"k{width}": width},
            op="groupnorm",
            args=(tensors, width, call.argument(4, 1e-5)),
            kwargs={},
        )
    ]


def attention(call: Call) -> list[Statement]:
    q, k = call.shape(0), call.shape(1)
    mask = call.optional_tensor(3, "attn_mask")
    if call.argument(4, 0.0) or len(q) < 3 or len(k) != len(q) or q[:-3] != k[:-3] or call.node.kwargs.get("dropout_p"):
        raise NotKnownError
    names = [call.tensor(p) for p in range(3)] + ([mask] if mask else [])
    causal = bool(call.argument(5, default=False) or call.node.kwargs.get("is_causal"))
    args = ([{"tensor": name} for name in names], causal, call.node.kwargs.get("scale"))
    listed = ", ".join([*names, "True"] if causal and not mask else names)
    return [call.statement(f"attn({listed})", op="attention", args=args, kwargs={})]


def cross_entropy(call: Call) -> list[Statement]:
    """Rows of the loss, then their mean over the targets that are not ignored."""
    logits, targets = call.tensor(0), call.tensor(1)
    if len(call.shape(0)) != 2 or call.argument(2) is not None or call.argument(5, 0.0):
        raise NotKnownError
    rows, reduction, ignored = call.shape(0)[0], call.argument(3, 1), call.argument(4, -100)

    def of(tensor: str) -> dict[str, str]:
        return {"tensor": tensor}

    def made(suffix: str, formula: str, op: str, args: tuple[Any, ...], shape: Shape) -> Statement:
        result = f"{call.node.name}_{suffix}"[-64:] if suffix else call.node.name
        return call.statement(formula, result=result, op=op, args=args, kwargs={}, shape=shape)

    def total_of(suffix: str, tensor: str) -> Statement:
        return made(suffix, f"sum({tensor})", "reduce.sum", (of(tensor), [0], False), ())

    loss = f"cross_entropy({logits}, {targets})"
    own = made("rows" if reduction else "", loss, "cross_entropy", (of(logits), of(targets), ignored), (rows,))
    if reduction == 0:
        return [own]
    total = total_of("total" if reduction == 1 else "", own.result)
    if reduction == 2:
        return [own, total]
    valid = made("valid", f"ne({targets}, {int(ignored)})", "not_equal", (of(targets), ignored), (rows,))
    count = total_of("count", valid.result)
    args = (of(total.result), of(count.result))
    return [own, total, valid, count, made("", f"{total.result} / {count.result}", "aten.div.Tensor", args, ())]


def topk(call: Call) -> list[Statement]:
    shape = call.shape(0)
    dim = call.dim(2, len(shape), -1)
    dims = letters(shape)
    made, sizes = result_axes(call.node.shape, [dim])
    right = [made[0] if d == dim else n for d, n in enumerate(dims)]
    args = (call.argument(0), call.argument(1), dim, call.node.index)
    annotation = f"{written(dims, {dim: '^'})} -> {' '.join(right)}"
    return [call.statement(f"topk_part({call.tensor(0)})", annotation, sizes=sizes, op="topk", args=args, kwargs={})]


def along_one_dim(call: Call) -> list[Statement]:
    """Operators along one dim, which is needed whole: running sums, sorts, flips."""
    shape = call.shape(0)
    dim = call.dim(1, len(shape), -1)
    if call.node.shape != shape:
        raise NotKnownError
    return [call.statement(f"{call.name}({call.tensor(0)}, {dim})")]


def over_space(call: Call) -> list[Statement]:
    """Pooling, resampling and padding: the dims that an operator changes are needed whole, those before them pass."""
    shape, after = call.shape(0), call.node.shape
    if call.name.endswith("2d"):
        space = [len(shape) - 2, len(shape) - 1]
    else:  # pairs of widths, those of the last dim first
        pairs = list(call.argument(1))
        last = len(shape) - 1
        space = sorted(last - n // 2 for n in range(0, len(pairs), 2) if any(pairs[n : n + 2]))
    passes = all(d in space or n == after[d] for d, n in enumerate(shape))
    if not passes or min(space, default=0) < 0 or len(after) != len(shape) or len(call.node.operands()) != 1:
        raise NotKnownError
    dims = letters(shape)
    made, sizes = result_axes(after, space)
    right = [dict(zip(space, made, strict=True)).get(d, n) for d, n in enumerate(dims)]
    annotation = f"{written(dims, dict.fromkeys(space, '^'))} -> {' '.join(right)}"
    return [call.statement(f"space_{call.name}({call.tensor(0)})", annotation, sizes=sizes)]
