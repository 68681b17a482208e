"""Reductions, norms, attention, losses, and what works along one dim or over space."""

from __future__ import annotations

from typing import Any

from planner.sharding.frontends.rules.statement import (
    LETTERS,
    Call,
    NotKnownError,
    Shape,
    Statement,
    letters,
    result_axes,
    written,
)

REDUCTIONS = {"sum": "sum", "mean": "mean", "amax": "amax", "amin": "amin"}


def reduction(call: Call) -> list[Statement]:
    shape = call.shape(0)
    given = call.argument(1)
    listed = [given] if isinstance(given, int) else (given or list(range(len(shape))))
    reduced = {int(d) % max(len(shape), 1) for d in listed} if isinstance(listed, list) else set()
    keep = bool(call.argument(2, default=False)) or bool(call.node.kwargs.get("keepdim"))
    dims = letters(shape)
    right = [("1" if d in reduced else n) for d, n in enumerate(dims) if keep or d not in reduced]
    left = written(dims, dict.fromkeys(reduced, "+"))
    if all(shape[d] == 1 for d in reduced):
        left = " ".join(dims)
    args = (call.argument(0), sorted(reduced), keep)
    over = ", ".join(map(str, sorted(reduced)))
    formula = f"{REDUCTIONS[call.name]}({call.tensor(0)}, ({over},), keepdim={keep})" if shape else call.tensor(0)
    more: dict[str, Any] = {"args": args, "kwargs": call.node.kwargs if call.name in {"sum", "mean"} else {}}
    return [call.statement(formula, f"{left} -> {' '.join(right)}", op=f"reduce.{call.name}", **more)]


def softmax(call: Call) -> list[Statement]:
    shape = call.shape(0)
    dim = call.dim(1, len(shape))
    dims = letters(shape)
    word = "log_softmax" if "log" in call.name else "softmax"
    annotation = f"{written(dims, {dim: '*'})} -> {' '.join(dims)}"
    args = (call.argument(0), dim)
    return [call.statement(f"{word}({call.tensor(0)}, {dim})", annotation, op=word, args=args, kwargs={})]


def norm(call: Call) -> list[Statement]:
    """Layer norm and RMS norm over the last dims; several of them are needed whole."""
    shape, over = call.shape(0), len(call.argument(1))
    word = "layernorm" if call.name == "layer_norm" else "rmsnorm"
    dims = letters(shape)
    last = range(len(shape) - over, len(shape))
    mark = "*" if over == 1 else "^"
    affine = [name for name in (call.optional_tensor(2, "weight"), call.optional_tensor(3, "bias")) if name]
    parts = [written(dims, dict.fromkeys(last, mark)), *(" ".join(dims[d] for d in last) for _ in affine)]
    eps = call.argument(4, 1e-5) if word == "layernorm" else call.argument(3)
    tensors = [{"tensor": name} for name in (call.tensor(0), *affine)]
    args = (tensors, over, call.node.kwargs.get("eps", eps))
    formula = f"{word}({', '.join([call.tensor(0), *affine])})"
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
    q, k, v = (call.shape(p) for p in range(3))
    mask = call.optional_tensor(3, "attn_mask")
    if call.argument(4, 0.0) or len(q) < 3 or len(k) != len(q) or q[:-3] != k[:-3] or call.node.kwargs.get("dropout_p"):
        raise NotKnownError
    lead = [LETTERS[d] if n > 1 else "1" for d, n in enumerate(q[:-3])]
    heads, key_heads = q[-3], k[-3]
    sizes: dict[str, int] = {}
    if heads == key_heads:
        query_heads = kv_heads = "x" if heads > 1 else "1"
    elif heads % key_heads == 0 and key_heads > 1:
        query_heads, kv_heads = f"(x{key_heads} r{heads // key_heads})", f"x{key_heads}"
        sizes = {f"x{key_heads}": key_heads, f"r{heads // key_heads}": heads // key_heads}
    else:
        query_heads, kv_heads = "x", "1"
    s, z = ("s" if q[-2] > 1 else "1"), ("z+" if k[-2] > 1 else "1")
    value = "e" if v[-1] != q[-1] else "d"
    parts = [
        " ".join([*lead, query_heads, s, "d^"]),
        " ".join([*lead, kv_heads, z, "d^"]),
        " ".join([*lead, kv_heads, z, f"{value}^"]),
    ]
    names = [call.tensor(p) for p in range(3)]
    if mask:
        full = [*lead, query_heads, s, z]
        shape = call.shapes[mask]
        own = full[len(full) - len(shape) :]
        parts.append(" ".join("1" if n == 1 else axis for axis, n in zip(own, shape, strict=True)))
        names.append(mask)
    causal = bool(call.argument(5, default=False) or call.node.kwargs.get("is_causal"))
    args = ([{"tensor": name} for name in names], causal, call.node.kwargs.get("scale"))
    annotation = f"{', '.join(parts)} -> {' '.join([*lead, query_heads, s, value])}"
    formula = f"attn({', '.join(names)})"
    return [call.statement(formula, annotation, sizes=sizes, op="attention", args=args, kwargs={})]


def cross_entropy(call: Call) -> list[Statement]:
    """Rows of the loss, then their mean over the targets that are not ignored."""
    logits, targets = call.tensor(0), call.tensor(1)
    if len(call.shape(0)) != 2 or call.argument(2) is not None or call.argument(5, 0.0):
        raise NotKnownError
    rows, reduction, ignored = call.shape(0)[0], call.argument(3, 1), call.argument(4, -100)
    name, dtype = call.node.name, call.node.dtype

    def made(suffix: str, formula: str, annotation: str, op: str, args: tuple[Any, ...], shape: Shape) -> Statement:
        result = f"{name}_{suffix}"[-64:] if suffix else name
        return Statement(
            result=result, formula=formula, annotation=annotation, op=op, args=args, shape=shape, dtype=dtype
        )

    def of(tensor: str) -> dict[str, str]:
        return {"tensor": tensor}

    own = made(
        "rows" if reduction else "",
        f"cross_entropy({logits}, {targets})",
        "x y*, x -> x",
        "cross_entropy",
        (of(logits), of(targets), ignored),
        (rows,),
    )
    if reduction == 0:
        return [own]
    total = made(
        "total" if reduction == 1 else "",
        f"sum({own.result})",
        "x+ -> ",
        "reduce.sum",
        (of(own.result), [0], False),
        (),
    )
    if reduction == 2:
        return [own, total]
    valid = made("valid", f"valid({targets})", "x -> x", "not_equal", (of(targets), ignored), (rows,))
    count = made("count", f"sum({valid.result})", "x+ -> ", "reduce.sum", (of(valid.result), [0], False), ())
    args = (of(total.result), of(count.result))
    mean = made("", f"{total.result} / {count.result}", " ,  -> ", "aten.div.Tensor", args, ())
    return [own, total, valid, count, mean]


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
    dims = letters(shape)
    return [call.statement(f"along_{call.name}({call.tensor(0)})", f"{written(dims, {dim: '^'})} -> {' '.join(dims)}")]


def over_space(call: Call) -> list[Statement]:
    """Pooling and resampling: batch and channels pass, the rest is needed whole."""
    shape, after = call.shape(0), call.node.shape
    if len(shape) < 3 or len(after) != len(shape) or len(call.node.operands()) != 1:
        raise NotKnownError
    dims = letters(shape)
    space = list(range(2, len(shape)))
    made, sizes = result_axes(after, space)
    annotation = f"{written(dims, dict.fromkeys(space, '^'))} -> {' '.join([*dims[:2], *made])}"
    return [call.statement(f"space_{call.name}({call.tensor(0)})", annotation, sizes=sizes)]
