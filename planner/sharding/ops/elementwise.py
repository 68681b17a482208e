"""Elementwise functions, copies and casts; and derivatives of their expressions, written as formulas.

`NAME_bwd(gradient, x)` stands for the gradient of the function NAME at x.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from planner.sharding.ops.annotation import called_name
from planner.sharding.ops.aten import AtenCall, NotKnownError, Statement, annotated, axes_but, made
from planner.sharding.ops.axis_flow import NotUnderstood, Value
from planner.sharding.ops.op import Op, Partials, Saves
from planner.sharding.ops.walker import Call

FLOATS = frozenset(("f64", "f32", "bf16", "f16"))
_CASTS = "to float double half bfloat16 type type_as"
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "true_divide": "/"}
_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}


def _elementwise(call: Call) -> Value:
    return call.flow.elementwise(call.values(), call.name)


def _product(call: Call) -> Value:
    return call.flow.multiply(call.values())


def _sum(call: Call) -> Value:
    if call.keywords or len(call.arguments) < 2:
        return _elementwise(call)
    return call.flow.add([call.walker.value(node) for node in call.arguments])


def _same(call: Call) -> Value:
    return call.value(0)


def _elementwise_gradient(call: Call) -> Value:
    """`NAME_bwd(gradient, ...)`, linear in the gradient."""
    gradient, *saved = call.values()
    finished = [call.flow.finish(value, "a gradient needs finished values") for value in saved]
    return call.flow.multiply([gradient, *finished], call.name)


def _pointwise(call: AtenCall) -> list[Statement]:
    """A formula that shows the operands in which it is linear."""
    node = call.node
    operands = node.operands()
    if not operands or len(operands) > 3:
        raise NotKnownError
    formula = f"{call.name}({', '.join(operands)})"
    if call.name == "masked_fill" and len(node.args) == 3 and isinstance(node.args[2], int | float):
        formula = f"masked_fill({call.tensor(0)}, {call.tensor(1)}, {node.args[2]!r})"
    elif call.name in _SIGNS and len(node.args) == 2 and not node.kwargs:
        one, other = (a.get("tensor") if isinstance(a, dict) else a for a in node.args)
        if isinstance(one, str | int | float) and isinstance(other, str | int | float):
            formula = f"{one} {_SIGNS[call.name]} {other}"
    return [call.statement(formula)]


def _pointwise_of_its_own(call: AtenCall) -> list[Statement]:
    """An elementwise function without a name in formulas."""
    rank = len(call.node.shape)
    axes = axes_but(rank, [])
    operands = [(name, axes[rank - len(call.shapes[name]) :]) for name in call.node.operands()]
    op = re.sub(r"aten\.__(\w+)__\.", r"aten.bitwise_\1.", call.node.op)  # Python's name of it is `__and__`
    op = "aten.conj_physical.default" if call.name in {"_conj", "conj", "resolve_conj"} else op
    return annotated(call, operands, axes, op=op)


def _capture_pairs(call: AtenCall) -> list[Statement]:
    """Complex numbers as pairs of real ones, and back."""
    axes = axes_but(len(call.shape(0)), [])
    if call.name == "view_as_real":
        return annotated(call, [(call.tensor(0), axes)], [*axes, made("r", 2)])
    operands = [(call.tensor(0), [*axes[:-1], f"{axes[-1]}^"])]
    return annotated(call, operands, axes[:-1], op="view_as_complex", args=(call.argument(0),))


def _cast(call: AtenCall) -> list[Statement]:
    operands, dtype = call.node.operands(), call.node.dtype
    if not operands or len(operands) > 3:
        raise NotKnownError
    kind = "to" if dtype in FLOATS else "bool" if dtype == "bool" else "long"
    return [call.statement(f"{kind}({operands[0]})", op="cast", args=(call.argument(0),))]


def _copied(call: AtenCall) -> list[Statement]:
    """`copy(x, y)`: the elements of y, with the shape and dtype of x."""
    name, shape, found = call.tensor(1), call.node.shape, list[Statement]()
    if call.shape(1) != shape:
        wide = f"{call.node.name}_wide"[-64:]
        args = ({"tensor": name},)
        found.append(call.statement(f"expand({name}, {list(shape)})", result=wide, op="expand", args=args))
        name = wide
    return [*found, call.statement(f"to({name})", op="cast", args=({"tensor": name},))]


def same_elements(call: AtenCall) -> list[Statement]:
    return [call.statement(f"contiguous({call.tensor(0)})", op="same", args=(call.argument(0),))]


def _detach(call: AtenCall) -> list[Statement]:
    return [call.statement(f"detach({call.tensor(0)})", op="detach", args=(call.argument(0),))]


# --- derivatives


def _of_product(arguments: Sequence[str], gradient: str) -> list[tuple[int, str]]:
    a, b = arguments
    return [(0, f"({gradient} * ({b}))"), (1, f"({gradient} * ({a}))")]


def _of_quotient(arguments: Sequence[str], gradient: str) -> list[tuple[int, str]]:
    a, b = arguments
    return [(0, f"({gradient} / ({b}))"), (1, f"(-{gradient} * ({a}) / (({b}) * ({b})))")]


def _of_larger(sign: str) -> Partials:
    def partials(arguments: Sequence[str], gradient: str) -> list[tuple[int, str]]:
        chosen = f"where({arguments[0]} {sign} {arguments[1]}"
        return [(0, f"{chosen}, {gradient}, 0.0)"), (1, f"{chosen}, 0.0, {gradient})")]

    return partials


def gradient_texts(node: ast.expr, gradient: str, ops: dict[str, Op]) -> dict[str, str]:
    """Return the gradient of each tensor in an elementwise expression of `ops`, whose own gradient is `gradient`.

    Raises NotUnderstood for a function without a derivative here.
    """
    found: dict[str, list[str]] = {}

    def collect(node: ast.expr, gradient: str) -> None:
        match node:
            case ast.Name(id=name):
                found.setdefault(name, []).append(gradient)
            case ast.Constant() | ast.Compare():
                return
            case ast.UnaryOp(op=op, operand=operand):
                collect(operand, f"(-{gradient})" if isinstance(op, ast.USub) else gradient)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(n) | float(n))):
                collect(left, f"({gradient} * {n} * ({ast.unparse(left)}) ** {n - 1})")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                through(_BINARY[type(op)], [left, right], gradient)
            case ast.Call(args=arguments):
                through(called_name(node), arguments, gradient)
            case ast.BinOp(op=op):
                raise NotUnderstood(f"the derivative of {type(op).__name__.lower()}")
            case _:
                raise NotUnderstood(f"the derivative of a {type(node).__name__.lower()}")

    def through(name: str, arguments: Sequence[ast.expr], gradient: str) -> None:
        for at, partial in _partials(name, arguments, gradient, ops):
            collect(arguments[at], partial)

    collect(node, gradient)
    return {name: " + ".join(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


def _partials(name: str, arguments: Sequence[ast.expr], gradient: str, ops: dict[str, Op]) -> list[tuple[int, str]]:
    """Return by argument of a function the formula of its gradient. Raises NotUnderstood."""
    op, texts = ops.get(name), [ast.unparse(argument) for argument in arguments]
    if op is not None and not op.sloped:
        return []
    if op is not None and op.partials is not None:
        try:
            return op.partials(texts, gradient)
        except (IndexError, ValueError) as error:
            raise NotUnderstood(f"the derivative of {name} of {len(texts)} arguments") from error
    if name.endswith("_bwd"):
        raise NotUnderstood("a gradient of a gradient")
    if not arguments:
        raise NotUnderstood(f"{name} of nothing")
    if any(isinstance(n, ast.Name) for argument in arguments[1:] for n in ast.walk(argument)):
        raise NotUnderstood(f"the derivative of {name} in several tensors")
    more = "".join(f", {part}" for part in texts[1:])
    return [(0, f"{name}_bwd({gradient}, {texts[0]}{more})")]


def _of_sum(sign: str) -> Partials:
    def partials(arguments: Sequence[str], gradient: str) -> list[tuple[int, str]]:
        _, _ = arguments
        return [(0, gradient), (1, gradient if sign == "+" else f"(-{gradient})")]

    return partials


def _of_same(arguments: Sequence[str], gradient: str) -> list[tuple[int, str]]:
    del arguments
    return [(0, gradient)]


def _op(names: str, *, aten: str | None = None, **more: object) -> Op:
    """Return elementwise functions with the same names in ATen."""
    known = {"axes": _elementwise, "gradient_axes": _elementwise_gradient, "capture": _pointwise, **more}
    return Op(names=names, aten=names if aten is None else aten, pointwise=True, **known)  # type: ignore[arg-type]


OPS = (
    _op("add", axes=_sum, partials=_of_sum("+"), kernels="add", saves=Saves.NOTHING),
    _op("sub", axes=_sum, partials=_of_sum("-"), kernels="sub", saves=Saves.NOTHING),
    _op("mul multiply", axes=_product, partials=_of_product),
    _op("div true_divide", partials=_of_quotient),
    _op(
        "neg",
        axes=_same,
        partials=lambda _, gradient: [(0, f"(-{gradient})")],
        keeps_zeros=True,
        kernels="neg",
        saves=Saves.NOTHING,
    ),
    _op(
        "where",
        partials=lambda a, gradient: [(1, f"where({a[0]}, {gradient}, 0.0)"), (2, f"where({a[0]}, 0.0, {gradient})")],
    ),
    _op("maximum", partials=_of_larger(">=")),
    _op("minimum", partials=_of_larger("<=")),
    _op("masked_fill", partials=lambda a, gradient: [(0, f"masked_fill({gradient}, {a[1]}, 0.0)")]),
    _op(
        "dropout",
        partials=lambda a, gradient: [(0, f"dropout_bwd({gradient}, {a[0]})")],
        keeps_zeros=True,
        capture=same_elements,
    ),
    _op("relu tanh", keeps_zeros=True, kernels="relu tanh", saves=Saves.RESULT),
    _op(
        "relu6 silu swish gelu elu leaky_relu mish hardswish selu abs square sin tan atan erf expm1 log1p softsign",
        keeps_zeros=True,
    ),
    _op("exp sigmoid sqrt rsqrt reciprocal", kernels="exp sigmoid sqrt rsqrt reciprocal", saves=Saves.RESULT),
    _op(
        "softplus celu hardsigmoid hardtanh logsigmoid log_sigmoid tanhshrink threshold log log2 log10 pow cos acos"
        " asin atan2 sinh cosh clamp clip clamp_max clamp_min fmod remainder lerp nan_to_num addcmul rsub"
    ),
    _op(
        "sign floor ceil round trunc floor_divide eq ne lt le gt ge isnan isfinite isinf logical_and logical_or"
        " logical_not logical_xor bitwise_and bitwise_not bitwise_or bitwise_xor",
        sloped=False,
    ),
    _op("bool long", sloped=False, capture=_cast),
    _op(
        _CASTS,
        aten=f"{_CASTS} _to_copy",
        axes=_same,
        partials=_of_same,
        keeps_zeros=True,
        capture=_cast,
        kernels="cast",
        saves=Saves.NOTHING,
    ),
    _op(
        "set contiguous clone identity requires_grad_ alias",
        aten="contiguous clone identity requires_grad_ alias lift_fresh_copy",
        axes=_same,
        partials=_of_same,
        keeps_zeros=True,
        rearranges=True,
        capture=same_elements,
        kernels="same",
        saves=Saves.VIEW,
    ),
    _op(
        "detach",
        aten="detach detach_",
        axes=_same,
        sloped=False,
        keeps_zeros=True,
        rearranges=True,
        capture=_detach,
        kernels="detach",
        saves=Saves.VIEW,
    ),
    Op(
        aten="__and__ __or__ __xor__ float_power polar complex real imag angle sgn digamma lgamma erfinv erfc"
        " logaddexp exp2 _conj conj conj_physical resolve_conj acosh asinh atanh hypot copysign hardshrink softshrink",
        capture=_pointwise_of_its_own,
    ),
    Op(aten="copy", capture=_copied),
    Op(aten="view_as_real view_as_complex", capture=_capture_pairs),
    Op(kernels="clone", saves=Saves.NOTHING),
)
