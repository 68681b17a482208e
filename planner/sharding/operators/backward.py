"""A graph with its backward pass: operators that compute the gradients of its parameters, from the last to the first.

    graph = add_backward(forward, {"y": "dy"})

`dy`, the gradient of the output y, becomes an input. A tensor that several operators use has the sum of their
gradients; sums that are pending stay so through it, and are reduced once. `graph.gradients` names all gradients of
parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.sharding.operators.graph import Graph, GraphBuilder
from planner.sharding.operators.single_steps import is_elementwise, is_view, single_steps, viewed
from planner.sharding.ops.annotation import called_name, number_of
from planner.sharding.ops.axis_flow import NotUnderstood, Shape
from planner.sharding.ops.elementwise import gradient_texts
from planner.sharding.ops.op import Step, View, padded
from planner.sharding.ops.table import FUNCTIONS, shape_of
from topology.errors import BadInput


def add_backward(graph: Graph, seeds: Mapping[str, str], *, with_respect_to: Collection[str] = ()) -> Graph:
    """Return `graph` with its formulas in single steps and a backward pass.

    `seeds` maps an output to the name of its gradient, an input of the new graph. Gradients are computed for all
    parameters and for the inputs in `with_respect_to`. Raises BadInput for a function without a gradient rule.
    """
    unknown = [name for name in (*seeds, *with_respect_to) if name not in graph.tensors]
    if unknown or not seeds:
        raise BadInput(
            f"no gradient of {unknown[0][:60]!r}" if unknown else "no output has a gradient",
            why="the graph has no such tensor" if unknown else "the backward pass starts there",
            remedy="name an output of the graph",
        )
    return _Backward(graph, seeds, frozenset(with_respect_to) | graph.parameters).derive()


@dataclass(slots=True)
class _Line:
    """A step of the forward pass: its result, its formula, and the index of the result if there are several."""

    name: str
    tree: ast.expr
    index: int


@dataclass(slots=True)
class _Backward:
    graph: Graph
    seeds: Mapping[str, str]
    wanted: frozenset[str]
    builder: GraphBuilder = field(init=False)
    lines: list[_Line] = field(default_factory=list)
    gradients: dict[str, list[str]] = field(default_factory=dict)  # by tensor: the parts of its gradient so far
    done: dict[str, str] = field(default_factory=dict)

    def derive(self) -> Graph:
        self.builder = GraphBuilder()
        self._forward()
        start = len(self.builder.operators)
        needed = self._depends_on_wanted()
        for output, seed in self.seeds.items():
            tensor = self.builder.tensors[output]
            self.builder.add_input(seed, tensor.shape, tensor.dtype, axes=tensor.axes if _plain(tensor.axes) else ())
            self.gradients.setdefault(output, []).append(seed)
        handled: set[str] = set()
        for line in reversed(self.lines):
            if line.name in self.gradients and line.name in needed and line.name not in handled:
                handled |= self._step_back(line, needed)
        for name in sorted(self.wanted):
            self._gradient_of(name)
        built = self.builder.build()
        return replace(
            built,
            outputs=tuple(
                dict.fromkeys([*self.graph.outputs, *(self.done[n] for n in sorted(self.wanted) if n in self.done)])
            ),
            gradients={name: self.done[name] for name in sorted(self.wanted) if name in self.done},
            backward_start=start,
        )

    def _forward(self) -> None:
        """Add the forward pass, in single steps."""
        graph, builder = self.graph, self.builder
        for name in graph.inputs:
            tensor = graph.tensors[name]
            builder.add_input(
                name,
                tensor.shape,
                tensor.dtype,
                axes=tensor.axes,
                parameter=name in graph.parameters,
                origin=tensor.origin,
            )
        for operator in graph.operators:
            name = operator.result.name
            steps = single_steps(operator, self._free_names(f"{name}_in"))
            if len(steps) == 1:  # unchanged, with its annotation
                builder.operators.append(operator)
                builder.tensors[name] = operator.result
            else:
                for step_name, tree in steps:
                    self._add(f"{step_name} = {ast.unparse(tree)}")
            self.lines += [_Line(step_name, tree, operator.index) for step_name, tree in steps]

    def _add(self, line: str) -> str:
        return self.builder.apply(line)[0].name

    def _depends_on_wanted(self) -> set[str]:
        """Return the tensors through which gradients flow to a wanted tensor."""
        found = {name for name in self.wanted if not self.builder.tensors[name].dtype.startswith(("i", "b8", "bool"))}
        for line in self.lines:
            if any(isinstance(n, ast.Name) and n.id in found for n in ast.walk(line.tree)):
                found.add(line.name)
        return found

    def _gradient_of(self, name: str) -> str | None:
        """Return the gradient of a tensor, the sum of its parts, added once."""
        if name not in self.done and name in self.gradients:
            parts = self.gradients[name]
            dtype = self.builder.tensors[name].dtype
            self.done[name] = parts[0] if len(parts) == 1 else self._emit(f"d_{name}", " + ".join(parts), dtype)
        return self.done.get(name)

    def _emit(self, wanted: str, text: str, dtype: str | None = None) -> str:
        name = next(self._free_names(wanted))
        return self.builder.apply(f"{name} = {text}", dtype=dtype)[0].name

    def _free_names(self, wanted: str) -> Iterator[str]:
        """Yield `wanted` and numbered variants of it, as long as no tensor has the name."""
        wanted = wanted[:56]
        for number in range(1, 10_000):
            name = f"{wanted}_{number}" if number > 1 else wanted
            if name not in self.builder.tensors and name not in self.graph.tensors:
                yield name

    def _step_back(self, line: _Line, needed: set[str]) -> set[str]:
        """Emit the gradients of the tensors that one step uses; return the results that are finished."""
        handled = {line.name}
        try:
            gradient = self._gradient_of(line.name)
            if gradient is None:
                return handled
            texts, more = self._through(line, gradient)
            handled |= more
            for name, text in texts.items():
                if name in needed:
                    dtype = self.builder.tensors[name].dtype
                    part = text if text.isidentifier() else self._emit(f"d_{name}", text, dtype)
                    self.gradients.setdefault(name, []).append(part)
        except NotUnderstood as error:
            raise BadInput(
                f"{line.name} has no gradient", why=str(error), remedy="write it in functions that have one"
            ) from error
        return handled

    def _through(self, line: _Line, gradient: str) -> tuple[dict[str, str], set[str]]:
        """Return the gradient of each tensor through one step, and the other results that are finished with it."""
        tree = line.tree
        if is_elementwise(tree):
            return self._elementwise(tree, gradient), set()
        if is_view(tree):
            return dict([_through_views(tree, gradient, self._shapes(tree))]), set()
        if isinstance(tree, ast.Call | ast.Subscript):
            return self._call(line, gradient)
        if isinstance(tree, ast.Name):
            return {tree.id: gradient}, set()
        raise NotUnderstood(f"a {type(tree).__name__.lower()}")

    def _shapes(self, tree: ast.expr) -> dict[str, Shape]:
        """Return the shapes of the tensors in a formula."""
        tensors = self.builder.tensors
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return {name: tensors[name].shape for name in names if name in tensors}

    def _elementwise(self, tree: ast.expr, gradient: str) -> dict[str, str]:
        shapes = self._shapes(tree)
        shape = shape_of(tree, shapes)
        found = gradient_texts(tree, gradient, FUNCTIONS)
        return {name: _sum_to_shape(text, shape, shapes[name]) for name, text in found.items()}

    def _call(self, line: _Line, gradient: str) -> tuple[dict[str, str], set[str]]:
        """Return the gradients through a call, and the other results of the same call."""
        tree = line.tree
        call = tree.value if isinstance(tree, ast.Subscript) else tree
        if not isinstance(call, ast.Call):
            raise NotUnderstood("the gradient of one of several results")
        name = called_name(call)
        op = FUNCTIONS.get(name)
        if op is None or op.gradient is None:
            raise NotUnderstood(f"{name} has no gradient rule")
        siblings = self._siblings(call) if op.several else {}
        parts = [
            self._gradient_of(siblings[n]) or "" if n in siblings else "" for n in range(max(siblings, default=-1) + 1)
        ]
        step = Step(
            call=call,
            result=line.name,
            gradient=gradient,
            emit=lambda text: self._emit(f"d_{line.name}", text),
            shape=lambda name: self.builder.tensors[name].shape,
            parts=parts,
        )
        return op.gradient(step), set(siblings.values())

    def _siblings(self, call: ast.Call) -> dict[int, str]:
        """Return the results of a call with several, by index."""
        text = ast.unparse(call)
        found: dict[int, str] = {}
        for line in self.lines:
            tree, number = line.tree, line.index
            if isinstance(tree, ast.Subscript) and number_of(tree.slice) is not None:
                number = number_of(tree.slice) or 0
                tree = tree.value
            if isinstance(tree, ast.Call) and ast.unparse(tree) == text:
                found.setdefault(number, line.name)
        return found


def _plain(axes: tuple[str, ...]) -> bool:
    return bool(axes) and all(axis.isidentifier() for axis in axes) and len(set(axes)) == len(axes)


def _sum_to_shape(text: str, shape: Shape, wanted: Shape) -> str:
    """Return the formula `text`, of `shape`, summed over the dims that were broadcast from `wanted`."""
    extra = len(shape) - len(wanted)
    if extra:
        text = f"({text}).sum({tuple(range(extra))!r})" if extra > 1 else f"({text}).sum(0)"
    kept = [n for n, size in enumerate(wanted) if size == 1 and shape[n + extra] != 1]
    for n in kept:
        text = f"({text}).sum({n}, keepdim=True)"
    return text


def _through_views(node: ast.expr, gradient: str, shapes: Mapping[str, Shape]) -> tuple[str, str]:
    """Return (tensor, formula of its gradient) for a chain of views of it. Raises NotUnderstood."""
    text = gradient
    while is_view(node):
        inner = viewed(node)
        text = _taken_back(node, text, shape_of(inner, shapes), shape_of(node, shapes))
        node = inner
    if not isinstance(node, ast.Name):
        raise NotUnderstood("a view of no tensor")
    return node.id, text


def _taken_back(node: ast.expr, text: str, before: Shape, after: Shape) -> str:
    """Return the formula of a view's gradient, from the shape `after` it to the shape `before` it."""
    match node:
        case ast.Attribute(attr=attr):
            return f"{text}.{attr}"
        case ast.Subscript(slice=index):
            return _put_back(text, index.elts if isinstance(index, ast.Tuple) else [index], before)
        case ast.Call(args=[_, *arguments], keywords=keywords):
            name, back = called_name(node), FUNCTIONS[called_name(node)].back
            given = [each for one in (*arguments, *(k.value for k in keywords)) for each in _listed(one)]
            if back is not None:
                return back(text, View(name, [number_of(one) for one in given], before, after))
    raise NotUnderstood("the gradient of a view")


def _listed(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple | ast.List) else [node]


def _put_back(text: str, parts: Sequence[ast.expr], before: tuple[int, ...]) -> str:
    """Return the formula that puts indexed elements back among zeros."""
    taken = sum(1 for p in parts if not (isinstance(p, ast.Constant) and (p.value is None or p.value is ...)))
    at = out = 0  # positions in the indexed tensor, and in the result
    pads: list[tuple[int, int, int]] = []
    for part in parts:
        match part:
            case ast.Constant(value=None):
                text = f"{text}.squeeze({out})"
            case ast.Constant(value=value) if value is ...:
                at, out = at + len(before) - taken, out + len(before) - taken
            case ast.Slice(lower=lower, upper=upper, step=step):
                ends = [None if end is None else number_of(end) for end in (lower, upper, step)]
                start, stop, stride = slice(*ends).indices(before[at])
                if stride != 1:
                    raise NotUnderstood("the gradient of a slice with a step")
                pads.append((at, start, before[at] - stop))
                at, out = at + 1, out + 1
            case _:
                number = number_of(part)
                if number is None:
                    raise NotUnderstood("the gradient of an index by a tensor")
                text = f"{text}.unsqueeze({out})"
                pads.append((at, number % before[at], before[at] - number % before[at] - 1))
                at, out = at + 1, out + 1
    for where, front, back in pads:
        text = padded(text, where, front, back, len(before))
    return text
