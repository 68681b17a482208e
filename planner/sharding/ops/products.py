"""Products of tensors: a sum over a sharded axis leaves partial sums."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from planner.sharding.ops.annotation import Dim, is_none
from planner.sharding.ops.aten import LETTERS, AtenCall, NotKnownError, Statement, annotated
from planner.sharding.ops.axis_flow import NotUnderstood, Value
from planner.sharding.ops.op import Op, Saves, Step, summed
from planner.sharding.ops.walker import Call, product_of_matrices

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _matmul(call: Call) -> Value:
    return product_of_matrices(call.flow, call.value(0), call.value(1))


def _outer(call: Call) -> Value:
    left, right = call.value(0), call.value(1)
    return Value((*left.dims, *right.dims), call.flow.pending_of_product([left, right], "outer"))


def _linear(call: Call) -> Value:
    flow, x, w = call.flow, call.value(0), call.value(1, "weight")
    if not x.dims or len(w.dims) not in {1, 2}:
        raise NotUnderstood("a linear layer whose weight has not two dims")
    over = flow.unify(x.dims[-1], w.dims[-1], "linear")
    pending = flow.pending_of_product([x, w], "linear")
    product_ = flow.contract([over], Value((*x.dims[:-1], *w.dims[:-1]), pending), "sum", "linear")
    bias = call.node(2, "bias")
    return product_ if bias is None or is_none(bias) else flow.add([product_, call.walker.value(bias)], "linear's bias")


def _addmm(call: Call) -> Value:
    return call.flow.add([call.value(0), product_of_matrices(call.flow, call.value(1), call.value(2))], call.name)


def _einsum(call: Call) -> Value:
    flow = call.flow
    text = call.arguments[0]
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
        raise NotUnderstood("an einsum whose letters are no text")
    left, arrow, right = text.value.replace(" ", "").partition("->")
    operands, values = left.split(","), [call.walker.value(node) for node in call.arguments[1:]]
    if not arrow or len(operands) != len(values) or not (left.replace(",", "") + right).isalpha():
        raise NotUnderstood("an einsum without an arrow, or with an ellipsis")
    letters: dict[str, Dim] = {}
    for operand, value in zip(operands, values, strict=True):
        if len(operand) != len(value.dims) or len(set(operand)) != len(operand):
            raise NotUnderstood("an einsum whose letters do not fit its tensors")
        for letter, dim in zip(operand, value.dims, strict=True):
            letters[letter] = flow.unify(letters.get(letter, ()), dim, "einsum")
    if not set(right) <= set(letters):
        raise NotUnderstood("an einsum whose result has other letters")
    pending = flow.pending_of_product(values, "einsum")
    kept = Value(tuple(letters[letter] for letter in right), pending)
    return flow.contract([letters[x] for x in letters if x not in right], kept, "sum", "einsum")


def _grouped_mm(call: Call) -> Value:
    """Rows in groups times one matrix per group: `[m, k] @ [g, k, n]`, with the ends of groups among rows."""
    flow, x, w = call.flow, call.value(0), call.value(1)
    if len(x.dims) != 2 or len(w.dims) != 3:
        raise NotUnderstood("a grouped product that is not of [m, k] and [g, k, n]")
    flow.keep_unsharded(w.dims[0], "rows of any group may be on any rank")
    flow.positional.update(flow.dim(x.dims[0]))
    if len(call.arguments) > 2 and call.walker.names_in(call.arguments[2]):
        for dim in call.value(2).dims:
            flow.keep_unsharded(dim, "the ends of groups are needed whole")
    over = flow.unify(x.dims[1], w.dims[1], "grouped_mm")
    return flow.contract(
        [over], Value((x.dims[0], w.dims[2]), flow.pending_of_product([x, w], "grouped_mm")), "sum", "grouped_mm"
    )


def _grouped_mm_weight_gradient(call: Call) -> Value:
    """`grouped_mm_weight_bwd(gradient, x, ends)`: `[m, n]` and `[m, k]` to `[g, k, n]`, a sum over the rows of a
    group.
    """
    flow, gradient = call.flow, call.value(0)
    x = flow.finish(call.value(1), "a gradient needs finished values")
    rows = flow.unify(gradient.dims[0], x.dims[0], call.name)
    flow.positional.update(flow.dim(rows))
    (groups,) = call.value(2).dims
    flow.keep_unsharded(groups, "rows of any group may be on any rank")
    pending = flow.pending_of_product([gradient, x], call.name)
    return flow.contract([rows], Value((groups, x.dims[1], gradient.dims[1]), pending), "sum", call.name)


# --- gradients


def _of_einsum(letters: Sequence[str], names: Sequence[str], result: str, step: Step) -> dict[str, str]:
    """Return the gradients of an einsum: each operand's letters from those of the result and of the others."""
    out: dict[str, list[str]] = {}
    for n, (mine, name) in enumerate(zip(letters, names, strict=True)):
        others = [(spec, other) for at, (spec, other) in enumerate(zip(letters, names, strict=True)) if at != n]
        have = set(result).union(*(spec for spec, _ in others))
        if not set(mine) <= have:
            raise NotUnderstood("the gradient of an einsum that sums an operand by itself")
        specs = ",".join([result, *(spec for spec, _ in others)])
        terms = ", ".join([step.gradient, *(other for _, other in others)])
        out.setdefault(name, []).append(f"einsum('{specs}->{mine}', {terms})")
    return {name: " + ".join(texts) for name, texts in out.items()}


def _linear_gradient(step: Step) -> dict[str, str]:
    x, w = step.tensor(0), step.tensor(1)
    rows = _LETTERS[: len(step.shape(x)) - 1]
    if len(step.shape(w)) != 2:
        raise NotUnderstood("the gradient of a linear layer of one output")
    found = _of_einsum([f"{rows}y", "zy"], [x, w], f"{rows}z", step)
    if len(step.arguments) > 2 and isinstance(step.arguments[2], ast.Name):
        found[step.tensor(2)] = summed(step.gradient, len(rows))
    return found


def _matmul_gradient(step: Step) -> dict[str, str]:
    a, b = step.tensor(0), step.tensor(1)
    rank_a, rank_b = len(step.shape(a)), len(step.shape(b))
    if min(rank_a, rank_b) < 2:
        raise NotUnderstood("the gradient of a product with a vector")
    batch = _LETTERS[: max(rank_a, rank_b) - 2]
    batch_a, batch_b = batch[len(batch) - (rank_a - 2) :], batch[len(batch) - (rank_b - 2) :]
    if any(step.shape(n)[at] == 1 for n, r in ((a, rank_a), (b, rank_b)) for at in range(r - 2)):
        raise NotUnderstood("the gradient of a product whose batch is broadcast")
    return _of_einsum([f"{batch_a}xy", f"{batch_b}yz"], [a, b], f"{batch}xz", step)


def _einsum_gradient(step: Step) -> dict[str, str]:
    text = step.arguments[0]
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str) or "->" not in text.value:
        raise NotUnderstood("an einsum whose letters are no text")
    left, right = text.value.replace(" ", "").split("->")
    names = [step.tensor(n + 1) for n in range(len(left.split(",")))]
    return _of_einsum(left.split(","), names, right, step)


def _grouped_mm_gradient(step: Step) -> dict[str, str]:
    x, w, ends = step.tensor(0), step.tensor(1), step.tensor(2)
    return {
        x: f"grouped_mm({step.gradient}, {w}.transpose(1, 2), {ends})",
        w: f"grouped_mm_weight_bwd({step.gradient}, {x}, {ends})",
    }


# --- captured


def with_bias(call: AtenCall, formula: str, bias: str, dim: int, **kernel: Any) -> list[Statement]:
    """A product and, as an operator of its own, its bias along `dim`, which is added once, after the product's pending
    sum.
    """
    if not bias:
        return [call.statement(formula, **kernel)]
    product_name = f"{call.node.name}_product"[-64:]
    first = call.statement(formula, result=product_name, **kernel)
    args = ({"tensor": product_name}, {"tensor": bias}, dim)
    after = len(call.node.shape) - 1 - dim
    added = f"reshape({bias}, {[-1, *[1] * after]})" if after else bias
    second = call.statement(f"{product_name} + {added}", op="bias", args=args)
    return [first, second]


def _capture_linear(call: AtenCall) -> list[Statement]:
    x, w = call.shape(0), call.shape(1)
    if not x or len(w) != 2:
        raise NotKnownError
    formula = f"linear({call.tensor(0)}, {call.tensor(1)})"
    args = (call.argument(0), call.argument(1))
    bias = call.optional_tensor(2, "bias")
    return with_bias(call, formula, bias, len(x) - 1, op="aten.linear.default", args=args)


def _capture_addmm(call: AtenCall) -> list[Statement]:
    if call.node.kwargs or len(call.shape(0)) != 1 or call.argument(3, 1) != 1 or call.argument(4, 1) != 1:
        return _capture_batched_sum(call)
    formula = f"{call.tensor(1)} @ {call.tensor(2)}"
    args = (call.argument(1), call.argument(2))
    return with_bias(call, formula, call.tensor(0), 1, op="aten.matmul.default", args=args)


def _capture_matmul(call: AtenCall) -> list[Statement]:
    if len(call.shape(0)) < 2 or len(call.shape(1)) < 2:
        raise NotKnownError
    return [call.statement(f"{call.tensor(0)} @ {call.tensor(1)}")]


def _capture_batched_sum(call: AtenCall) -> list[Statement]:
    """`baddbmm(b, x, y, beta, alpha)`: a scaled product plus a tensor."""
    beta, alpha = (call.node.kwargs.get(word, call.argument(n, 1)) for word, n in (("beta", 3), ("alpha", 4)))
    pair, added, out = (call.argument(1), call.argument(2)), call.tensor(0), list[Statement]()

    def then(suffix: str, formula: str, op: str, args: tuple[Any, ...], shape: Sequence[int]) -> str:
        result = f"{call.node.name}_{suffix}"[-64:] if suffix else call.node.name
        out.append(call.statement(formula, result=result, op=op, args=args, shape=tuple(shape)))
        return result

    made_shape = call.node.shape
    alone = beta == 0
    word = "" if alone and alpha == 1 else "product"
    found = then(word, f"{call.tensor(1)} @ {call.tensor(2)}", "aten.matmul.default", pair, made_shape)
    if alpha != 1:
        word = "" if alone else "scaled"
        found = then(word, f"{found} * {alpha!r}", "aten.mul.Scalar", ({"tensor": found}, alpha), made_shape)
    if alone:
        return out
    if beta != 1:
        added = then("added", f"{added} * {beta!r}", "aten.mul.Scalar", ({"tensor": added}, beta), call.shapes[added])
    then("", f"{found} + {added}", "aten.add.Tensor", ({"tensor": found}, {"tensor": added}), made_shape)
    return out


def _capture_outer(call: AtenCall) -> list[Statement]:
    return annotated(call, [(call.tensor(0), ["a"]), (call.tensor(1), ["b"])], ["a", "b"])


def _capture_distances(call: AtenCall) -> list[Statement]:
    """`cdist(x, y)`: rows of both pass, and their width is needed whole."""
    batch = [f"{LETTERS[d]}" for d in range(len(call.node.shape) - 2)]
    x, y = call.shape(0), call.shape(1)
    left, right = ([*batch[len(batch) - len(shape) + 2 :], row, "k^"] for shape, row in ((x, "m"), (y, "n")))
    return annotated(call, [(call.tensor(0), left), (call.tensor(1), right)], [*batch, "m", "n"])


def _capture_einsum(call: AtenCall) -> list[Statement]:
    equation, listed = call.argument(0), call.argument(1)
    names = [str(one["tensor"]) for one in listed]
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow or not (left.replace(",", "") + right).isalpha() or len(set(names)) != len(names):
        raise NotKnownError
    return [call.statement(f'einsum("{left}->{right}", {", ".join(names)})')]


def _capture_grouped_product(call: AtenCall) -> list[Statement]:
    """Rows in groups, one matrix per group, and the ends of groups among rows: experts for tokens sorted by expert."""
    rows, matrices = call.shape(0), call.shape(1)
    ends = call.optional_tensor(2, "offs")
    if len(rows) != 2 or len(matrices) != 3 or not ends or call.argument(3, call.node.kwargs.get("bias")) is not None:
        raise NotKnownError
    names = (call.tensor(0), call.tensor(1), ends)
    args = tuple({"tensor": name} for name in names)
    return [call.statement(f"grouped_mm({', '.join(names)})", op="grouped_mm", args=args)]


OPS = (
    Op(names="matmul mm bmm", axes=_matmul, gradient=_matmul_gradient, aten="matmul mm bmm", capture=_capture_matmul),
    Op(names="dot", axes=_matmul),
    Op(names="outer", axes=_outer, aten="outer ger", capture=_capture_outer),
    Op(aten="baddbmm", capture=_capture_batched_sum),
    Op(aten="cdist _cdist_forward", capture=_capture_distances),
    Op(names="linear", axes=_linear, gradient=_linear_gradient, aten="linear", capture=_capture_linear),
    Op(names="addmm baddbmm", axes=_addmm, aten="addmm", capture=_capture_addmm),
    Op(names="einsum", axes=_einsum, gradient=_einsum_gradient, aten="einsum", capture=_capture_einsum),
    Op(
        names="grouped_mm",
        axes=_grouped_mm,
        gradient=_grouped_mm_gradient,
        aten="_grouped_mm transformers.grouped_mm_fallback",
        capture=_capture_grouped_product,
    ),
    Op(names="grouped_mm_weight_bwd", axes=_grouped_mm_weight_gradient),
    Op(kernels="bias", saves=Saves.NOTHING),
)
