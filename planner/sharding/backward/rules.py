"""The gradient of every function that is neither elementwise nor a view: one rule a function.

A rule gets the step `y = f(a, b, ...)`, whose arguments are names and literals, and the name of y's gradient; it emits the
operators that it needs and returns the formula of the gradient of each argument. Norms and softmax are written out as
products and means, so their sums over a sharded axis are pending sums like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planner.sharding.backward.formulas import arguments_of
from planner.sharding.backward.views import padded
from planner.sharding.formulas.axis_flow import NotUnderstood, number_of
from planner.sharding.formulas.formula import ATTENTION, called_name

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the forward pass: the call, the name of its result and of the result's gradient.

    `emit` adds an operator to the backward pass and returns its name; `shape` is of a tensor by name. `parts` are the
    gradients of all results where a call has several, empty where one has none.
    """

    call: ast.Call
    result: str
    gradient: str
    emit: Callable[[str], str]
    shape: Callable[[str], tuple[int, ...]]
    parts: Sequence[str] = ()

    @property
    def arguments(self) -> list[ast.expr]:
        return arguments_of(self.call)

    def tensor(self, at: int) -> str:
        """Return the name of the tensor that argument `at` is. Raises NotUnderstood."""
        argument = self.arguments[at] if at < len(self.arguments) else None
        if not isinstance(argument, ast.Name):
            raise NotUnderstood(f"{called_name(self.call)} whose argument {at} is no tensor")
        return argument.id

    def number(self, at: int, keyword: str, default: int) -> int:
        """Return an integer argument. Raises NotUnderstood."""
        node = self.keyword(keyword) or (self.arguments[at] if at < len(self.arguments) else None)
        found = default if node is None else number_of(node)
        if found is None:
            raise NotUnderstood(f"{called_name(self.call)} whose {keyword} is no number")
        return found

    def keyword(self, name: str) -> ast.expr | None:
        return next((k.value for k in self.call.keywords if k.arg == name), None)


Rule = Callable[[Step], dict[str, str]]


def _einsum(letters: Sequence[str], names: Sequence[str], result: str, step: Step) -> dict[str, str]:
    """Return the gradients of an einsum: each operand's letters out of the result's and the others'."""
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


def _linear(step: Step) -> dict[str, str]:
    x, w = step.tensor(0), step.tensor(1)
    rows = _LETTERS[: len(step.shape(x)) - 1]
    if len(step.shape(w)) != 2:
        raise NotUnderstood("the gradient of a linear layer of one output")
    found = _einsum([f"{rows}y", "zy"], [x, w], f"{rows}z", step)
    if len(step.arguments) > 2 and isinstance(step.arguments[2], ast.Name):
        found[step.tensor(2)] = _summed(step.gradient, len(rows))
    return found


def _summed(text: str, leading: int) -> str:
    return f"({text}).sum({tuple(range(leading))!r})" if leading > 1 else f"({text}).sum(0)" if leading else text


def _matmul(step: Step) -> dict[str, str]:
    a, b = step.tensor(0), step.tensor(1)
    rank_a, rank_b = len(step.shape(a)), len(step.shape(b))
    if min(rank_a, rank_b) < 2:
        raise NotUnderstood("the gradient of a product with a vector")
    batch = _LETTERS[: max(rank_a, rank_b) - 2]
    batch_a, batch_b = batch[len(batch) - (rank_a - 2) :], batch[len(batch) - (rank_b - 2) :]
    if any(step.shape(n)[at] == 1 for n, r in ((a, rank_a), (b, rank_b)) for at in range(r - 2)):
        raise NotUnderstood("the gradient of a product whose batch is broadcast")
    return _einsum([f"{batch_a}xy", f"{batch_b}yz"], [a, b], f"{batch}xz", step)


def _einsum_call(step: Step) -> dict[str, str]:
    text = step.arguments[0]
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str) or "->" not in text.value:
        raise NotUnderstood("an einsum whose letters are no text")
    left, right = text.value.replace(" ", "").split("->")
    names = [step.tensor(n + 1) for n in range(len(left.split(",")))]
    return _einsum(left.split(","), names, right, step)


def _grouped_mm(step: Step) -> dict[str, str]:
    x, w, ends = step.tensor(0), step.tensor(1), step.tensor(2)
    return {
        x: f"grouped_mm({step.gradient}, {w}.transpose(1, 2), {ends})",
        w: f"grouped_mm_weight_bwd({step.gradient}, {x}, {ends})",
    }


def _kept(step: Step) -> tuple[str, list[int], list[int]]:
    """Return the gradient of a reduction with its dims put back, the shape, and which dims were reduced."""
    shape = step.shape(step.tensor(0))
    node = step.keyword("dim") or (step.arguments[1] if len(step.arguments) > 1 else None)
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        dims = list(range(len(shape)))
    else:
        found = [number_of(n) for n in (node.elts if isinstance(node, ast.Tuple | ast.List) else [node])]
        dims = [n % len(shape) for n in found if n is not None]
    kept = [1 if n in dims else size for n, size in enumerate(shape)]
    return f"{step.gradient}.reshape({kept})", list(shape), dims


def _sum(step: Step) -> dict[str, str]:
    text, shape, _ = _kept(step)
    return {step.tensor(0): f"{text}.expand({shape})"}


def _mean(step: Step) -> dict[str, str]:
    text, shape, dims = _kept(step)
    count = 1
    for n in dims:
        count *= shape[n]
    return {step.tensor(0): f"({text} / {count}).expand({shape})"}


def _largest(step: Step) -> dict[str, str]:
    text, shape, dims = _kept(step)
    kept = [1 if n in dims else size for n, size in enumerate(shape)]
    x = step.tensor(0)
    return {x: f"where({x} == {step.result}.reshape({kept}), {text}, 0.0)"}


def _softmax(step: Step) -> dict[str, str]:
    dim = step.number(1, "dim", -1)
    total = step.emit(f"({step.gradient} * {step.result}).sum({dim}, keepdim=True)")
    return {step.tensor(0): f"({step.gradient} - {total}) * {step.result}"}


def _log_softmax(step: Step) -> dict[str, str]:
    dim = step.number(1, "dim", -1)
    total = step.emit(f"{step.gradient}.sum({dim}, keepdim=True)")
    return {step.tensor(0): f"{step.gradient} - exp({step.result}) * {total}"}


def _logsumexp(step: Step) -> dict[str, str]:
    x, dim = step.tensor(0), step.number(1, "dim", -1)
    if len(step.shape(x)) == len(step.shape(step.result)):
        return {x: f"{step.gradient} * exp({x} - {step.result})"}
    return {x: f"{step.gradient}.unsqueeze({dim}) * exp({x} - {step.result}.unsqueeze({dim}))"}


def _cross_entropy(step: Step) -> dict[str, str]:
    logits, targets = step.tensor(0), step.tensor(1)
    shares = step.emit(f"softmax({logits}, -1)")
    hit = f"one_hot({targets}, {step.shape(logits)[-1]})"
    return {logits: f"({shares} - {hit}) * {step.gradient}.unsqueeze(-1)"}


def _weights(step: Step) -> list[str]:
    """Return the tensors after the first argument: weight and bias of a norm."""
    return [n.id for n in step.arguments[1:] if isinstance(n, ast.Name)]


def _root_mean_square(step: Step) -> dict[str, str]:
    """With r = 1 / rms(x) and g the gradient times the weight: r g - x r^3 mean(g x)."""
    x, weights = step.tensor(0), _weights(step)
    square = step.emit(f"({x} * {x}).mean(-1, keepdim=True)")
    scale = step.emit(f"rsqrt({square} + {_EPS})")
    scaled = f"({step.gradient} * {weights[0]})" if weights else step.gradient
    mean = step.emit(f"({scaled} * {x}).mean(-1, keepdim=True)")
    found = {x: f"{scale} * {scaled} - {x} * ({scale} * {scale} * {scale} * {mean})"}
    if weights:
        found[weights[0]] = _summed(f"{step.gradient} * {x} * {scale}", len(step.shape(x)) - 1)
    return found


def _layer_norm(step: Step) -> dict[str, str]:
    """With z the normalized x, r = 1 / std(x), g the gradient times the weight: r (g - mean(g) - z mean(g z))."""
    x, weights = step.tensor(0), _weights(step)
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
        found[weights[0]] = _summed(f"{step.gradient} * {normal}", rank - 1)
    if len(weights) > 1:
        found[weights[1]] = _summed(step.gradient, rank - 1)
    return found


def _attention(step: Step) -> dict[str, str]:
    """From the logarithm of every row's sum of exponentials, which the forward kernel keeps."""
    q, k, v = (step.tensor(n) for n in range(3))
    flag = (
        step.keyword("is_causal") or step.keyword("causal") or (step.arguments[3] if len(step.arguments) > 3 else None)
    )
    causal = ", True" if isinstance(flag, ast.Constant) and flag.value is True else ""
    rows = step.emit(f"attention_rows({q}, {k}{causal})")
    along = step.emit(f"({step.gradient} * {step.result}).sum(-1)")
    given = f"({step.gradient}, {q}, {k}, {v}, {rows}, {along}{causal})"
    return {q: f"attention_bwd_q{given}", k: f"attention_bwd_k{given}", v: f"attention_bwd_v{given}"}


def _embedding(step: Step) -> dict[str, str]:
    ids, weight = step.tensor(0), step.tensor(1)
    return {weight: f"embedding_bwd({step.gradient}, {ids}, {step.shape(weight)[0]})"}


def _rotary(step: Step) -> dict[str, str]:
    """Angles are constants."""
    angles = "".join(f", {name}" for name in _weights(step))
    return {step.tensor(0): f"rope_bwd({step.gradient}{angles})"}


def _cat(step: Step) -> dict[str, str]:
    listed = step.arguments[0]
    if not isinstance(listed, ast.List | ast.Tuple):
        raise NotUnderstood("cat of tensors that are not listed")
    names = [n.id for n in listed.elts if isinstance(n, ast.Name)]
    at = step.number(1, "dim", 0)
    sizes = [step.shape(name)[at] for name in names]
    found: dict[str, list[str]] = {}
    for n, name in enumerate(names):
        if called_name(step.call) == "stack":
            text = f"{step.gradient}.select({at}, {n})"
        elif len(set(sizes)) == 1:
            text = f"{step.gradient}.chunk({len(names)}, {at})[{n}]"
        else:
            text = f"{step.gradient}.narrow({at}, {sum(sizes[:n])}, {sizes[n]})"
        found.setdefault(name, []).append(text)
    return {name: " + ".join(texts) for name, texts in found.items()}


def _chunk(step: Step) -> dict[str, str]:
    """All parts at once: those that have a gradient, each among zeros, or joined where all have one."""
    x, at = step.tensor(0), step.number(2, "dim", 0)
    before = step.shape(x)
    at %= len(before)
    lengths = _lengths(step, before[at])
    parts = [*step.parts, *[""] * (len(lengths) - len(step.parts))]
    if all(parts):
        return {x: f"cat([{', '.join(parts)}], {at})"}
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    texts = [
        padded(part, at, start, before[at] - start - length, len(before))
        for part, start, length in zip(parts, starts, lengths, strict=True)
        if part
    ]
    return {x: " + ".join(texts)}


def _lengths(step: Step, size: int) -> list[int]:
    """Return the lengths of all parts of a dim of `size` that `chunk` or `split` makes. Raises NotUnderstood."""
    given = step.keyword("split_size_or_sections") or (step.arguments[1] if len(step.arguments) > 1 else None)
    if isinstance(given, ast.List | ast.Tuple):
        found = [number_of(node) for node in given.elts]
        if None in found:
            raise NotUnderstood("a split that is not written out")
        return [n for n in found if n is not None]
    chunk = called_name(step.call) == "chunk"
    number = step.number(1, "chunks" if chunk else "split_size_or_sections", 1)
    each = -(-size // number) if chunk else number
    return [min(each, size - start) for start in range(0, size, each)]


def _cumsum(step: Step) -> dict[str, str]:
    dim = step.number(1, "dim", 0)
    return {step.tensor(0): f"{step.gradient}.flip({dim}).cumsum({dim}).flip({dim})"}


_RULES: Mapping[str, Rule] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    "einsum": _einsum_call,
    "grouped_mm": _grouped_mm,
    "sum": _sum,
    "mean": _mean,
    **dict.fromkeys(("amax", "amin"), _largest),
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "cross_entropy": _cross_entropy,
    **dict.fromkeys(("rmsnorm", "rms_norm"), _root_mean_square),
    **dict.fromkeys(("layernorm", "layer_norm"), _layer_norm),
    **dict.fromkeys(ATTENTION, _attention),
    "embedding": _embedding,
    **dict.fromkeys(("rope", "rotary", "apply_rotary"), _rotary),
    **dict.fromkeys(("cat", "concat", "stack"), _cat),
    **dict.fromkeys(("chunk", "split"), _chunk),
    "cumsum": _cumsum,
}
# functions of numbers and orders: nothing flows back through them
WITHOUT_GRADIENT = frozenset(
    ["argmax", "argmin", "argsort", "one_hot", "zeros", "ones", "zeros_like", "ones_like", "full", "any", "all"]
)


def gradient_texts(step: Step) -> dict[str, str]:
    """Return by tensor the formula of its gradient. Raises NotUnderstood where the function has no rule."""
    name = called_name(step.call)
    if name in WITHOUT_GRADIENT:
        return {}
    rule = _RULES.get(name)
    if rule is None:
        raise NotUnderstood(f"{name} has no gradient rule")
    return rule(step)
