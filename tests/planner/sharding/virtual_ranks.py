"""Runs a sharded program on numpy arrays, one per virtual rank, and holds every tensor against the unsharded run.

Independent of the planner's arithmetic: pieces are index sets, found here from the layout by taking chunks. A
collective may only use what the ranks of its own group hold, and moves no more than it says. Operators are run on local
pieces by their own formula; those that merge statistics over pieces (softmax, attention, ...) are written out as such.
"""

from __future__ import annotations

import re
from functools import partial, reduce
from itertools import permutations, product

import networkx as nx
import numpy as np

from planner.sharding.plans.plan import TensorMove, plan_sharding
from tests.planner.sharding.local_formula import local_formula
from tests.planner.sharding.numeric import FUNCTIONS, evaluate, heads_like, scores_of

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


def array(value):
    return np.asarray(value, dtype=np.float64)


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
                (reducer,) = {"sum" if how == "mask" else how for _, how in layout.pending}
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
            total = [merged(reducer, [pieces[m] for m in self.group(r, axes)]) for r in ranks]
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
    if option.collectives:
        return _merged(operator, option, pieces, world)
    ranks = range(len(world.coordinates))
    return [_local(operator, option, [pieces[n, at][r] for n, at in option.operands], world, r) for r in ranks]


def _computed(operator, tensors):
    """The result on whole tensors."""
    if "rearrange(" in operator.text:
        ((name, _),) = operator.operands
        return _viewed(operator, tensors[name], dict(operator.sizes))
    return _result(operator, evaluate(operator.text, tensors))


def _local(operator, option, values, world, rank):
    """The operator on one rank's pieces."""
    cuts = dict(option.axis_specs)
    mine = {axis: world.indices(size, cuts.get(axis, ()), rank) for axis, size in operator.sizes.items()}
    sizes = {axis: len(indices) for axis, indices in mine.items()}
    if "rearrange(" in operator.text:
        return _viewed(operator, values[0], sizes)
    named = dict(zip((n for n, _ in option.operands), values, strict=True))
    return _result(operator, evaluate(local_formula(operator, sizes), named, _placed_functions(operator, mine)))


def _placed_functions(operator, mine):
    """Functions that depend on where a piece starts, which they are given."""
    causal = operator.functions & {"attn", "scaled_dot_product_attention", "attention_rows"} or {
        name for name in operator.functions if name.startswith("attention_bwd")
    }
    if causal:
        names = [dims for _, dims in operator.operands]
        q, k = (names * 2)[0:2] if len(names) < 5 else names[1:3]  # one tensor may be both
        more = {"rows": mine[q[-2][0]], "columns": mine[k[-2][0]]}
    elif "grouped_mm" in operator.functions:
        rows, matrices = (dims for _, dims in operator.operands[:2])
        more = {"rows": mine[rows[0][0]], "groups": mine[matrices[0][0]]}
        return {"grouped_mm": partial(FUNCTIONS["grouped_mm"], **more)}
    elif "grouped_mm_weight_bwd" in operator.functions:
        rows = operator.operands[0][1][0][0]
        return {"grouped_mm_weight_bwd": partial(FUNCTIONS["grouped_mm_weight_bwd"], rows=mine[rows])}
    elif operator.functions & {"embedding", "embedding_bwd", "one_hot"}:
        positional = [axis for axis in operator.axes if axis in operator.roles.positional]
        more = {"rows": mine[positional[0]]} if positional else {}
    else:
        return {}
    whole = {
        "embedding_bwd": lambda d, ids, _, rows: FUNCTIONS["embedding_bwd"](
            d, ids, 1 + max(rows.max(), ids.max()), rows
        )
    }
    return {
        name: partial(whole.get(name, FUNCTIONS[name]), **more)
        for name in operator.functions & set(FUNCTIONS)
        if more and ((causal and name in causal) or name in {"embedding", "embedding_bwd", "one_hot"})
    }


def _positions(operator, option, world, rank):
    """Which rows of queries and of keys a rank has."""
    cuts = dict(option.axis_specs)
    axes = [dims[-2][0] for _, dims in operator.operands[:2]]
    return [world.indices(operator.sizes[axis], cuts.get(axis, ()), rank) for axis in axes]


def _result(operator, made):
    """The one of several results of a formula that is the operator's."""
    return array(made[operator.index] if isinstance(made, list) else made)


def _viewed(operator, value, sizes):
    """A view that only its annotation describes."""
    ((_, dims),) = operator.operands
    before = [axis for dim in dims for axis in dim]
    after = [axis for dim in operator.dims for axis in dim]
    apart = np.asarray(value).reshape([sizes[axis] for axis in before])
    moved = apart.transpose([before.index(axis) for axis in after])
    return array(moved.reshape([np.prod([sizes[a] for a in dim], dtype=int) for dim in operator.dims]))


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
        v = [heads_like(values, queries) for values, queries in zip(v, q, strict=True)]
        seen = [_positions(operator, option, world, r) if "True" in operator.text else (None, None) for r in ranks]
        scores = [scores_of(q[r], k[r], *seen[r]) for r in ranks]
        top = over([s.max(-1) for s in scores], np.maximum)
        e = [np.exp(s - t[..., None]) for s, t in zip(scores, top, strict=True)]
        total = over([x.sum(-1) for x in e], np.add)
        weighted = over([x @ v[r] for r, x in zip(ranks, e, strict=True)], np.add)
        return [array(w / t[..., None]) for w, t in zip(weighted, total, strict=True)]
    if operator.kind == "attention_rows":
        seen = [_positions(operator, option, world, r) if "True" in operator.text else (None, None) for r in ranks]
        e = [np.exp(scores_of(operands[0][r], operands[1][r], *seen[r])).sum(-1) for r in ranks]
        return [array(np.log(t)) for t in over(e, np.add)]
    if operator.kind == "topk":
        most = int(re.search(r"topk\((?:[A-Za-z_]\w*,\s*)?(?:k\s*=\s*)?(\d+)", operator.text)[1])
        best = [FUNCTIONS["topk"](x, min(most, x.shape[-1])).values for x in operands[0]]
        every = [np.concatenate([best[m] for m in world.group(r, axes)], -1) for r in ranks]
        return [array(FUNCTIONS["topk"](x, most).values) for x in every]
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
