"""Runs a sharded program on numpy arrays, one per virtual rank, and holds every tensor against the unsharded run.

Independent of the planner's arithmetic: pieces are index sets, found here from the layout by taking chunks. A collective
may only use what the ranks of its own group hold, and moves no more than it says. Operators are run on local pieces by
their own formula; those that merge statistics over pieces (softmax, attention, ...) are written out as such.
"""

from __future__ import annotations

from functools import reduce
from itertools import pairwise, permutations, product
from types import SimpleNamespace

import networkx as nx
import numpy as np

from planner.sharding.plan import TensorMove, plan_sharding

MERGE = {
    "sum": np.add,
    "mask": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}


def merged(reducer, pieces):
    if reducer == "avg":
        return reduce(np.add, pieces) / len(pieces)
    return reduce(MERGE[reducer], pieces)


class Array(np.ndarray):
    """An array with the few methods of torch that formulas use."""

    def permute(self, *order):
        return self.transpose(*order)

    def amax(self, dim):
        return self.max(axis=dim)

    def topk(self, k, dim):
        return SimpleNamespace(values=array(-np.sort(-np.asarray(self), axis=dim).take(range(k), axis=dim)))

    def sort(self, dim):
        return SimpleNamespace(values=np.sort(np.asarray(self), axis=dim).view(Array))

    def chunk(self, count, dim):
        return [array(part) for part in np.split(np.asarray(self), count, axis=dim)]

    def view(self, *shape):
        return super().view(*shape) if shape and isinstance(shape[0], type) else self.reshape(*shape)

    def unsqueeze(self, dim):
        return np.expand_dims(self, dim)

    def expand(self, *shape):
        return array(np.broadcast_to(self, [n if m == -1 else m for n, m in zip(self.shape, shape, strict=True)]))

    def softmax(self, dim):
        return softmax(self, dim)

    def flip(self, dim):
        return np.flip(self, dim)

    def index_select(self, dim, index):
        return self.take(np.asarray(index, int), axis=dim)

    def var(self, *dims, unbiased=True, **options):
        return super().var(*dims, ddof=int(unbiased) if dims else 0, **options)

    def to(self, *_):
        return self


def array(value):
    return np.asarray(value, dtype=np.float64).view(Array)


def softmax(x, dim=-1):
    e = np.exp(x - x.max(axis=dim, keepdims=True))
    return e / e.sum(axis=dim, keepdims=True)


def scores_of(q, k, rows=None, columns=None):
    """Scores, and those of keys after their query hidden if positions of rows and columns are given."""
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    return scores if rows is None else np.where(np.asarray(rows)[:, None] >= np.asarray(columns), scores, -1e30)


def attn(q, k, v, causal=False):
    rows, columns = (np.arange(x.shape[-2]) for x in (q, k))
    return softmax(scores_of(q, k, rows, columns) if causal else scores_of(q, k)) @ v


def logsumexp(x, dim=-1):
    return np.log(np.exp(x).sum(dim))


def cross_entropy(logits, targets):
    rows = np.take_along_axis(np.asarray(logits), np.asarray(targets, int)[..., None], -1)[..., 0]
    return logsumexp(np.asarray(logits)) - rows


def conv1d(x, w):
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(x), w.shape[-1], axis=-1)
    return np.einsum("bclk,ock->bol", windows, np.asarray(w))


def rmsnorm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def layernorm(x, g, b):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(np.asarray(x).var(-1, keepdims=True) + 1e-5) * g + b


def gelu(x):
    return 0.5 * x * (1 + np.tanh(0.8 * x))


def grouped_mm(x, w, offsets):
    starts = [0, *(min(int(o), len(x)) for o in np.sort(np.asarray(offsets))[:-1]), len(x)]
    pieces = [x[a:b] @ w[g] for g, (a, b) in enumerate(pairwise(starts))]
    return np.concatenate(pieces).view(Array)


FUNCTIONS = {
    "linear": lambda x, w, b=0.0: x @ w.T + b,
    "gelu": gelu,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_bwd": lambda d, x: d * np.cos(x),
    "einsum": lambda text, *xs: np.einsum(text, *xs).view(Array),
    "set": lambda x: x,
    "attn": attn,
    "softmax": softmax,
    "rmsnorm": rmsnorm,
    "layernorm": layernorm,
    "grouped_mm": grouped_mm,
    "embedding": lambda ids, w: w[np.asarray(ids, int)],
    "embedding_bwd": lambda d, ids, rows: _rows(d, ids, int(rows)),
    "torch": SimpleNamespace(softmax=softmax, cat=np.concatenate, stack=np.stack, roll=np.roll),
    "F": SimpleNamespace(conv1d=conv1d, layer_norm=lambda x, _, g, b: layernorm(x, g, b)),
    "layer_norm": layernorm,
    "logsumexp": logsumexp,
    "cross_entropy": cross_entropy,
    "exp": np.exp,
    "cat": np.concatenate,
}


def _rows(d, ids, rows):
    out = array(np.zeros((rows, d.shape[-1])))
    np.add.at(out, np.asarray(ids, int).reshape(-1), np.asarray(d).reshape(-1, d.shape[-1]))
    return out


def evaluate(text, tensors):
    return array(eval(text, {**FUNCTIONS, **tensors}))  # noqa: S307 - formulas of our own tests


class World:
    def __init__(self, mesh):
        self.mesh = mesh
        self.coordinates = list(product(*(range(n) for n in mesh.shape)))

    def at(self, rank, axis):
        return self.coordinates[rank][self.mesh.names.index(axis)]

    def group(self, rank, axes):
        """The ranks that differ from `rank` in `axes` alone, in the order of `axes`."""
        same = [a for a in self.mesh.names if a not in axes]
        members = [r for r in range(len(self.coordinates)) if all(self.at(r, a) == self.at(rank, a) for a in same)]
        return sorted(members, key=lambda r: [self.at(r, a) for a in axes])

    def indices(self, size, items, rank):
        """Which elements of a dim `rank` holds, in the order it holds them."""
        blocks = [np.arange(size)]
        for item in items:
            if isinstance(item, int):
                blocks = [part for block in blocks for part in np.split(block, item)]
            else:
                n = self.mesh.size(item)
                width = -(-len(blocks[0]) // n)
                blocks = [block[self.at(rank, item) * width :][:width] for block in blocks]
        return np.concatenate(blocks)

    def held(self, shape, layout, rank):
        return [self.indices(n, items, rank) for n, items in zip(shape, layout.dims, strict=True)]

    def cut(self, whole, layout, rank):
        return array(np.asarray(whole)[np.ix_(*self.held(whole.shape, layout, rank))])

    def scattered(self, whole, layout, rng):
        """Local pieces of `whole`. What is pending is given as terms, one by coordinates of the pending axes."""
        whole = np.asarray(whole)
        axes = [axis for axis, _ in layout.pending]
        places = list(product(*(range(self.mesh.size(axis)) for axis in axes)))
        reducer = layout.pending[0][1] if axes else "sum"
        noise = rng.normal(size=(len(places), *whole.shape))
        if reducer == "avg":
            terms = whole + noise - noise.mean(0)
        elif reducer == "sum":
            terms = noise.copy()
            terms[0] = whole - noise[1:].sum(0)
        else:
            terms = whole - np.abs(noise) * (1 if reducer == "max" else -1)
            terms[0] = whole
        ranks = range(len(self.coordinates))
        return [self.cut(terms[places.index(tuple(self.at(r, a) for a in axes))], layout, r) for r in ranks]

    def check(self, pieces, layout, whole, what):
        """Every rank's piece, with what is pending reduced, is its part of the whole."""
        for rank, piece in enumerate(pieces):
            value = piece
            if layout.pending:
                (reducer,) = {how for _, how in layout.pending}
                group = self.group(rank, tuple(axis for axis, _ in layout.pending))
                value = merged(reducer, [pieces[r] for r in group])
            np.testing.assert_allclose(value, self.cut(whole, layout, rank), rtol=1e-9, atol=1e-9, err_msg=what)

    def moved(self, step, before, pieces, shape):
        """Carry one primitive out."""
        ranks = range(len(pieces))
        if step.kind == "slice":
            return [self._from([r], r, before, step.after, pieces, shape) for r in ranks]
        axes = step.collectives[0].axes
        if step.kind == "collective_permute":
            source = self._renumbered(before, step.after, shape)
            return [pieces[source[r]] for r in ranks]
        if step.kind in {"all_reduce", "reduce_scatter"}:
            reducer = step.collectives[0].reducer
            total = [merged(reducer, [pieces[m] for m in self.group(r, axes)]).view(Array) for r in ranks]
            if step.kind == "all_reduce":
                return total
            return [self._from([r], r, before, step.after, total, shape) for r in ranks]
        out = [self._from(self.group(r, axes), r, before, step.after, pieces, shape) for r in ranks]
        even = len({p.size for p in pieces}) == len({p.size for p in out}) == 1
        if step.kind == "all_to_all" and even:  # nothing comes twice: a rank keeps 1/n of what it has
            assert all(new.size == old.size for new, old in zip(out, pieces, strict=True))
        return out

    def _from(self, members, rank, before, after, pieces, shape):
        """The piece that `rank` holds `after`, out of what `members` hold `before` and nothing else."""
        wanted = self.held(shape, after, rank)
        out = np.full([len(w) for w in wanted], np.nan)
        for member in members:
            have = self.held(shape, before, member)
            there = [np.isin(w, h) for w, h in zip(wanted, have, strict=True)]
            take = [[list(h).index(x) for x in w[t]] for w, h, t in zip(wanted, have, there, strict=True)]
            out[np.ix_(*there)] = pieces[member][np.ix_(*take)]
        assert not np.isnan(out).any(), "a piece that no rank of the group holds"
        return array(out)

    def _renumbered(self, before, after, shape):
        """For every rank the one whose whole block it takes over."""
        key_before = [str([list(h) for h in self.held(shape, before, r)]) for r in range(len(self.coordinates))]
        key_after = [str([list(h) for h in self.held(shape, after, r)]) for r in range(len(self.coordinates))]
        for order in permutations(range(len(self.mesh.names))):
            if [self.mesh.shape[i] for i in order] != list(self.mesh.shape):
                continue
            source = [self.coordinates.index(tuple(c[i] for i in order)) for c in self.coordinates]
            names = {self.mesh.names[i]: self.mesh.names[order[i]] for i in range(len(order))}
            pending = {(names[axis], how) for axis, how in before.pending}
            if [key_before[s] for s in source] == key_after and pending == set(after.pending):
                return source
        assert before.pending == after.pending
        held = [axis for axis, _ in before.pending]
        graph = nx.Graph()
        for r, wanted in enumerate(key_after):
            for s, have in enumerate(key_before):
                if wanted == have and all(self.at(r, a) == self.at(s, a) for a in held):
                    graph.add_edge(("to", r), ("from", s))
        found = nx.bipartite.maximum_matching(graph, [("to", r) for r in range(len(key_after))])
        return [found["to", r][1] for r in range(len(key_after))]


def run(problem, inputs, *, seed=0, found=None):
    """Run the planner's answer on `inputs` (whole arrays by name); every tensor is checked. Returns the answer."""
    rng, world = np.random.default_rng(seed), World(problem.mesh)
    found = found or plan_sharding(problem)
    layouts = found.choice.layouts
    whole = {name: array(value) for name, value in inputs.items()}
    pieces = {(n, layouts[n]): world.scattered(whole[n], layouts[n], rng) for n in problem.inputs}
    for step in found.steps:
        if isinstance(step, TensorMove):
            here, values = step.source, pieces[step.tensor, step.source]
            for one in step.steps:
                values = world.moved(one, here, values, whole[step.tensor].shape)
                here = one.after
                world.check(values, here, whole[step.tensor], f"{step.tensor} after {one.kind}")
            pieces[step.tensor, step.target] = values
            continue
        operator = problem.operators[step.operator]
        name = operator.result.name
        whole[name] = _computed(operator, whole)
        assert whole[name].shape == operator.result.shape
        local = ran(operator, step.option, pieces, world, whole)
        pieces[name, step.option.result] = local
        world.check(local, step.option.result, whole[name], f"{name} after its operator")
    return found


def ran(operator, option, pieces, world, whole):
    """Every rank's piece of the result, from its own pieces of the operands (`pieces` by tensor and layout)."""
    local = [
        _local(operator, option, [pieces[n, at][r] for n, at in option.operands], world, r, whole)
        for r in range(len(world.coordinates))
    ]
    return _merged(operator, option, pieces, world) if local[0] is None else local


def _formula(operator):
    """Two halves of a linear layer with bias are what their annotation says."""
    name = operator.result.name
    if name.endswith("__product"):
        return lambda x, w: x @ w.T
    if any(n == f"{name}__product" for n, _ in operator.operands):
        return lambda x, b: x + b
    return None


def _computed(operator, tensors):
    half = _formula(operator)
    if half is not None:
        return array(half(*(tensors[n] for n, _ in operator.operands)))
    return _result(operator, evaluate(operator.text, {n: tensors[n] for n in tensors if not n.endswith("__product")}))


def _merged_axes(operator, option):
    return [a for a, _ in option.axis_specs if a in operator.normalized or a in operator.reduced]


def _local(operator, option, values, world, rank, whole):
    """The operator on one rank's pieces; None if it merges statistics over ranks."""
    named = dict(zip((n for n, _ in option.operands), values, strict=True))
    half = _formula(operator)
    if half is not None:
        return array(half(*values))
    if option.collectives:
        return None
    if operator.is_view and "reshape(" in operator.text:
        return _viewed(operator, option, values[0], world, rank)
    if "embedding_bwd(" in operator.text or "embedding(" in operator.text:
        return _embedding(operator, option, named, world, rank, whole)
    if operator.kind == "attention" and "True" in operator.text:
        rows, columns = _positions(operator, option, world, rank)
        return array(softmax(scores_of(*values[:2], rows, columns)) @ values[2])
    return _result(operator, evaluate(operator.text, named))


def _result(operator, made):
    """The one of several results of a formula that is the operator's."""
    return array(made[operator.index]) if operator.text.endswith((".chunk(2, -1)", ".chunk(2, 0)")) else made


def _positions(operator, option, world, rank):
    """Which rows of queries and of keys a rank has."""
    cuts = dict(option.axis_specs)
    axes = [dims[-2][0] for _, dims in operator.operands[:2]]
    return [world.indices(operator.sizes[axis], cuts.get(axis, ()), rank) for axis in axes]


def _viewed(operator, option, value, world, rank):
    """A view by its annotation: the formula's numbers are those of the whole tensor."""
    cuts = dict(option.axis_specs)
    sizes = {axis: len(world.indices(operator.sizes[axis], cuts.get(axis, ()), rank)) for axis in operator.axes}
    ((_, dims),) = operator.operands
    before = [axis for dim in dims for axis in dim]
    after = [axis for dim in operator.dims for axis in dim]
    apart = np.asarray(value).reshape([sizes[axis] for axis in before])
    moved = apart.transpose([before.index(axis) for axis in after])
    return array(moved.reshape([np.prod([sizes[a] for a in dim], dtype=int) for dim in operator.dims]))


def _embedding(operator, option, named, world, rank, whole):
    """A lookup in, or a gradient of, the rows that this rank owns."""
    cuts = dict(option.axis_specs)
    rows = next(axis for axis in operator.axes if axis.startswith("v"))
    mine = world.indices(operator.sizes[rows], cuts.get(rows, ()), rank)
    ids_name = next(n for n, _ in operator.operands if n.startswith("ids"))
    ids = np.asarray(named[ids_name], int)
    other = next(n for n, _ in operator.operands if n != ids_name)
    if "embedding_bwd(" in operator.text:
        return _rows(named[other], ids, operator.sizes[rows])[mine]
    out = np.zeros((*ids.shape, named[other].shape[-1]))
    for position, row in enumerate(mine):
        out[ids == row] = named[other][position]
    return array(out)


def _merged(operator, option, pieces, world):
    """Softmax, norms, attention and top-k over a sharded axis, from statistics of the pieces."""
    axes = option.collectives[0].axes
    ranks = range(len(world.coordinates))
    operands = [pieces[n, at] for n, at in option.operands]

    def over(values, ufunc):
        return [reduce(ufunc, (values[m] for m in world.group(r, axes))) for r in ranks]

    if operator.kind == "softmax":
        top = over([x.max(-1, keepdims=True) for x in operands[0]], np.maximum)
        e = [np.exp(x - t) for x, t in zip(operands[0], top, strict=True)]
        total = over([x.sum(-1, keepdims=True) for x in e], np.add)
        return [array(x / t) for x, t in zip(e, total, strict=True)]
    if operator.kind == "rmsnorm":
        total = over([(x * x).sum(-1, keepdims=True) for x in operands[0]], np.add)
        size = operator.sizes[operator.dims[-1][0]]
        return [
            array(x / np.sqrt(t / size + 1e-5) * w) for x, t, w in zip(operands[0], total, operands[1], strict=True)
        ]
    if operator.kind == "attention":
        q, k, v = operands
        seen = [_positions(operator, option, world, r) if "True" in operator.text else (None, None) for r in ranks]
        scores = [scores_of(q[r], k[r], *seen[r]) for r in ranks]
        top = over([s.max(-1) for s in scores], np.maximum)
        e = [np.exp(s - t[..., None]) for s, t in zip(scores, top, strict=True)]
        total = over([x.sum(-1) for x in e], np.add)
        weighted = over([x @ v[r] for r, x in zip(ranks, e, strict=True)], np.add)
        return [array(w / t[..., None]) for w, t in zip(weighted, total, strict=True)]
    if operator.kind == "topk":
        best = [x.topk(min(operator.top_k, x.shape[-1]), -1).values for x in operands[0]]
        every = [np.concatenate([best[m] for m in world.group(r, axes)], -1).view(Array) for r in ranks]
        return [array(x.topk(operator.top_k, -1).values) for x in every]
    if operator.kind == "layernorm":
        size = operator.sizes[operator.dims[-1][0]]
        total = over([np.stack([x.sum(-1), (x * x).sum(-1)]) for x in operands[0]], np.add)
        mean = [t[0][..., None] / size for t in total]
        square = [t[1][..., None] / size - m * m for t, m in zip(total, mean, strict=True)]
        return [
            array((x - m) / np.sqrt(v + 1e-5) * g + b)
            for x, m, v, g, b in zip(operands[0], mean, square, *operands[1:], strict=True)
        ]
    if operator.kind in {"logsumexp", "cross_entropy"}:
        total = over([np.exp(x).sum(-1) for x in operands[0]], np.add)
        if operator.kind == "logsumexp":
            return [array(np.log(t)) for t in total]
        classes = operator.operands[0][1][-1][0]
        mine = [world.indices(operator.sizes[classes], dict(option.axis_specs)[classes], r) for r in ranks]
        hit = over(
            [
                (x * (np.asarray(targets, int)[..., None] == at)).sum(-1)
                for x, targets, at in zip(*operands, mine, strict=True)
            ],
            np.add,
        )
        return [array(np.log(t) - h) for t, h in zip(total, hit, strict=True)]
    raise NotImplementedError(operator.kind)
