"""Formulas computed on numpy arrays in float64: torch's functions and methods, as far as the tests of sharding use
them.

Written from torch's documentation and apart from the planner's rules, which it checks. `positions` says which elements
of the whole axes the arrays are, for functions that depend on it.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace

import numpy as np

MODULES = {"torch", "F", "nn"}
FUNCTIONS = {}


def known(*names):
    def keep(function):
        FUNCTIONS.update(dict.fromkeys(names or (function.__name__,), function))
        return function

    return keep


def evaluate(text, tensors, functions=None):
    """The value of a formula; `functions` go before those known here."""
    table = {**FUNCTIONS, **(functions or {})}

    def value(node):
        match node:
            case ast.Name(id=name):
                return np.asarray(tensors[name]) if name in tensors else {"int": int}[name]
            case ast.Constant(value=constant):
                return constant
            case ast.List(elts=elts) | ast.Tuple(elts=elts):
                return [value(each) for each in elts]
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*(None if end is None else value(end) for end in (lower, upper, step)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](value(left), value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return OPERATORS[type(op)](value(left), value(right))
            case ast.Attribute(value=inner, attr=attr):
                whole = value(inner)
                return {"T": lambda: whole.T, "mT": lambda: np.swapaxes(whole, -1, -2)}.get(
                    attr, lambda: getattr(whole, attr)
                )()
            case ast.Subscript(value=inner, slice=index):
                at = value(index)
                return value(inner)[tuple(at) if isinstance(at, list) else at]
            case ast.Call(func=func, args=arguments, keywords=keywords):
                given = [value(each) for each in arguments]
                if isinstance(func, ast.Attribute):
                    name = func.attr
                    if not (isinstance(func.value, ast.Name) and func.value.id in MODULES):
                        given.insert(0, value(func.value))
                else:
                    name = func.id
                return table[name](*given, **{k.arg: value(k.value) for k in keywords})
        raise NotImplementedError(ast.dump(node))

    return value(ast.parse(text.strip(), mode="eval").body)


OPERATORS = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.Pow: np.power,
    ast.MatMult: np.matmul,
    ast.Eq: np.equal,
    ast.GtE: np.greater_equal,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.Lt: np.less,
}


def numbers(given):
    return list(given[0]) if len(given) == 1 and isinstance(given[0], list) else list(given)


@known("set", "detach", "contiguous", "clone", "to", "float", "double", "rearrange", "dropout")
def same(x, *_, **__):
    return x


known("exp")(np.exp), known("sqrt")(np.sqrt), known("tanh")(np.tanh), known("cos")(np.cos), known("sin")(np.sin)
known("maximum")(np.maximum), known("where")(np.where), known("outer")(np.multiply.outer), known("log")(np.log)
known("rsqrt")(lambda x: 1 / np.sqrt(x)), known("relu")(lambda x: np.maximum(x, 0)), known("mul")(np.multiply)
known("sub")(np.subtract)
known("relu_bwd")(lambda d, x: d * (x > 0)), known("tanh_bwd")(lambda d, x: d * (1 - np.tanh(x) ** 2))
known("exp_bwd")(lambda d, x: d * np.exp(x)), known("rsqrt_bwd")(lambda d, x: -0.5 * d * x**-1.5)
known("sigmoid")(lambda x: 1 / (1 + np.exp(-x)))
known("sqrt_bwd")(lambda d, x: d / (2 * np.sqrt(x))), known("log_bwd")(lambda d, x: d / x)
known("matmul", "mm", "bmm")(np.matmul), known("masked_fill")(lambda x, m, v: np.where(m, v, x))


@known("silu")
def silu(x):
    return x / (1 + np.exp(-x))


@known("silu_bwd")
def silu_bwd(d, x):
    s = 1 / (1 + np.exp(-x))
    return d * (s + x * s * (1 - s))


@known("gelu")
def gelu(x):
    return 0.5 * x * (1 + np.tanh(0.8 * x))


@known("gelu_bwd")
def gelu_bwd(d, x):
    t = np.tanh(0.8 * x)
    return d * (0.5 * (1 + t) + 0.4 * x * (1 - t * t))


@known("sigmoid_bwd")
def sigmoid_bwd(d, x):
    s = 1 / (1 + np.exp(-x))
    return d * s * (1 - s)


@known("linear")
def linear(x, w, b=0.0):
    return x @ w.T + b


@known("einsum")
def einsum(text, *xs):
    return np.einsum(text, *xs)


def reduction(function):
    def reduced(x, dim=None, keepdim=False, keepdims=False):
        axis = tuple(dim) if isinstance(dim, list) else dim
        return function(x, axis=axis, keepdims=keepdim or keepdims)

    return reduced


known("sum")(reduction(np.sum)), known("mean")(reduction(np.mean)), known("amax", "max")(reduction(np.max))
known("amin")(reduction(np.min)), known("prod")(reduction(np.prod))


@known("var")
def var(x, dim=None, unbiased=True):
    return x.var(axis=dim, ddof=int(unbiased))


@known("reshape", "view")
def reshape(x, *shape):
    return np.reshape(x, numbers(shape))


@known("flatten")
def flatten(x, start_dim=0, end_dim=-1):
    end_dim %= x.ndim
    return x.reshape(*x.shape[:start_dim], -1, *x.shape[end_dim + 1 :])


@known("unflatten")
def unflatten(x, dim, sizes):
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


@known("transpose", "swapaxes")
def transpose(x, a, b):
    return np.swapaxes(x, a, b)


@known("permute")
def permute(x, *order):
    return np.transpose(x, numbers(order))


known("t")(np.transpose), known("movedim")(np.moveaxis), known("unsqueeze")(np.expand_dims)
known("cumsum")(lambda x, dim: np.cumsum(x, axis=dim))


@known("squeeze")
def squeeze(x, dim=None):
    return x if dim is not None and x.shape[dim] != 1 else np.squeeze(x, dim)


@known("expand", "broadcast_to")
def expand(x, *shape):
    sizes = numbers(shape)
    padded = (1,) * (len(sizes) - x.ndim) + x.shape
    return np.broadcast_to(x, [n if m == -1 else m for n, m in zip(padded, sizes, strict=True)])


@known("repeat_interleave")
def repeat_interleave(x, count, dim):
    return np.repeat(x, count, axis=dim)


@known("cat")
def cat(parts, dim=0):
    return np.concatenate(parts, dim)


@known("stack")
def stack(parts, dim=0):
    return np.stack(parts, dim)


@known("chunk")
def chunk(x, count, dim=0):
    return np.split(x, count, axis=dim)


@known("narrow")
def narrow(x, dim, start, length):
    return x.take(range(start, start + length), axis=dim)


@known("select")
def select(x, dim, index):
    return x.take(index, axis=dim)


@known("index_select")
def index_select(x, dim, index):
    return x.take(np.asarray(index, int), axis=dim)


@known("pad")
def pad(x, sizes):
    pairs = [*zip(sizes[::2], sizes[1::2], strict=True)][::-1]
    return np.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs)


@known("flip")
def flip(x, *dims):
    return np.flip(x, tuple(numbers(dims)))


known("roll")(np.roll), known("zeros")(lambda *shape, **_: np.zeros(numbers(shape)))


@known("sort")
def sort(x, dim=-1):
    return SimpleNamespace(values=np.sort(x, axis=dim))


@known("topk")
def topk(x, k, dim=-1):
    return SimpleNamespace(values=-np.sort(-x, axis=dim).take(range(k), axis=dim))


@known("softmax")
def softmax(x, dim=-1):
    e = np.exp(x - x.max(axis=dim, keepdims=True))
    return e / e.sum(axis=dim, keepdims=True)


@known("log_softmax")
def log_softmax(x, dim=-1):
    return np.log(softmax(x, dim))


@known("logsumexp")
def logsumexp(x, dim=-1):
    return np.log(np.exp(x).sum(dim))


@known("cross_entropy")
def cross_entropy(logits, targets):
    rows = np.take_along_axis(logits, np.asarray(targets, int)[..., None], -1)[..., 0]
    return logsumexp(logits) - rows


@known("rmsnorm", "rms_norm")
def rmsnorm(x, w=1.0):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


@known("layernorm", "layer_norm")
def layernorm(x, *more):
    g, b = [*(m for m in more if not isinstance(m, list)), 1.0, 0.0][:2]
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b


@known("conv1d")
def conv1d(x, w):
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[-1], axis=-1)
    return np.einsum("bclk,ock->bol", windows, w)


@known("rope")
def rope(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin


@known("rope_bwd")
def rope_bwd(d, cos, sin):
    half = d.shape[-1] // 2
    rotated = d * sin
    return d * cos + np.concatenate([rotated[..., half:], -rotated[..., :half]], -1)


def heads_like(x, many):
    """Keys (or values) repeated so that query heads have one each."""
    groups = many.shape[-3] // x.shape[-3] if x.ndim > 2 else 1
    return np.repeat(x, groups, axis=-3) if groups > 1 else x


def scores_of(q, k, rows=None, columns=None):
    """Scores, and those of keys after their query hidden if positions of rows and columns are given."""
    scores = q @ np.swapaxes(heads_like(k, q), -1, -2) / np.sqrt(q.shape[-1])
    return scores if rows is None else np.where(np.asarray(rows)[:, None] >= np.asarray(columns), scores, -1e30)


def positions_of(causal, rows, columns, q, k):
    if not causal:
        return None, None
    return (np.arange(x.shape[-2]) if at is None else at for x, at in ((q, rows), (k, columns)))


@known("attn", "sdpa", "scaled_dot_product_attention")
def attn(q, k, v, causal=False, is_causal=False, rows=None, columns=None):
    scores = scores_of(q, k, *positions_of(causal or is_causal, rows, columns, q, k))
    return softmax(scores) @ heads_like(v, q)


@known("attention_rows")
def attention_rows(q, k, causal=False, rows=None, columns=None):
    return np.log(np.exp(scores_of(q, k, *positions_of(causal, rows, columns, q, k))).sum(-1))


def attention_parts(d, q, k, v, total, along, causal, rows, columns):
    """Shares of attention, and the gradient of scores."""
    shares = np.exp(scores_of(q, k, *positions_of(causal, rows, columns, q, k)) - total[..., None])
    return shares, shares * (d @ np.swapaxes(heads_like(v, q), -1, -2) - along[..., None]) / np.sqrt(q.shape[-1])


def added_up(x, like):
    """Sums over the query heads that share a key head."""
    return x if x.shape == like.shape else x.reshape(*like.shape[:-2], -1, *x.shape[-2:]).sum(-3)


@known("attention_bwd_q")
def attention_bwd_q(d, q, k, v, total, along, causal=False, rows=None, columns=None):
    return attention_parts(d, q, k, v, total, along, causal, rows, columns)[1] @ heads_like(k, q)


@known("attention_bwd_k")
def attention_bwd_k(d, q, k, v, total, along, causal=False, rows=None, columns=None):
    scores = attention_parts(d, q, k, v, total, along, causal, rows, columns)[1]
    return added_up(np.swapaxes(scores, -1, -2) @ q, k)


@known("attention_bwd_v")
def attention_bwd_v(d, q, k, v, total, along, causal=False, rows=None, columns=None):
    shares = attention_parts(d, q, k, v, total, along, causal, rows, columns)[0]
    return added_up(np.swapaxes(shares, -1, -2) @ d, v)


@known("embedding")
def embedding(ids, w, rows=None):
    rows = np.arange(len(w)) if rows is None else rows
    out = np.zeros((*ids.shape, w.shape[-1]))
    for position, row in enumerate(rows):
        out[ids == row] = w[position]
    return out


@known("embedding_bwd")
def embedding_bwd(d, ids, count, rows=None):
    out = np.zeros((int(count), d.shape[-1]))
    np.add.at(out, np.asarray(ids, int).reshape(-1), d.reshape(-1, d.shape[-1]))
    return out if rows is None else out[rows]


@known("one_hot")
def one_hot(ids, count, rows=None):
    return (ids[..., None] == (np.arange(count) if rows is None else rows)).astype(float)


def _groups(ends, rows):
    """The group of each row; the last one has all rows that are left."""
    return np.searchsorted(np.sort(ends)[:-1], rows, side="right")


@known("grouped_mm")
def grouped_mm(x, w, ends, rows=None, groups=None):
    groups = np.arange(len(w)) if groups is None else groups
    of = _groups(ends, np.arange(len(x)) if rows is None else rows)
    return sum((of == group)[:, None] * (x @ w[at]) for at, group in enumerate(groups))


@known("grouped_mm_weight_bwd")
def grouped_mm_weight_bwd(d, x, ends, rows=None):
    of = _groups(ends, np.arange(len(x)) if rows is None else rows)
    return np.stack([x[of == group].T @ d[of == group] for group in range(len(ends))])
