"""A graph with its backward pass: operators that compute the gradients of its parameters, from the last to the first.

    graph = add_backward(forward, {"y": "dy"})

`dy`, the gradient of the output y, becomes an input. A tensor that several operators use has the sum of their gradients;
sums that are pending stay so through it, and are reduced once. `graph.gradients` names all gradients of parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from planner.sharding.backward import elementwise, views
from planner.sharding.backward.formulas import is_elementwise, is_view, shape_of_node, single_steps
from planner.sharding.backward.rules import Step, gradient_texts
from planner.sharding.formulas.axis_flow import NotUnderstood, number_of
from planner.sharding.formulas.formula import called_name
from planner.sharding.operators.graph import Graph, GraphBuilder
from topology.errors import BadInput


def add_backward(graph: Graph, seeds: Mapping[str, str], *, with_respect_to: Collection[str] = ()) -> Graph:
    """Return `graph` with its formulas in single steps and a backward pass.

    `seeds` gives by output the name of its gradient, an input of the new graph. Gradients are computed of all parameters
    and of the inputs in `with_respect_to`. Raises BadInput for a function without a gradient rule.
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
    """A step of the forward pass: its result, its formula, and for one of several results, which."""

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
    gradients: dict[str, list[str]] = field(default_factory=dict)  # by tensor: its parts so far
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
            if len(steps) == 1:  # as it is, with its annotation
                builder.operators.append(operator)
                builder.tensors[name] = operator.result
            else:
                for step_name, tree in steps:
                    self._add(f"{step_name} = {ast.unparse(tree)}")
            self.lines += [_Line(step_name, tree, operator.index) for step_name, tree in steps]

    def _add(self, line: str) -> str:
        return self.builder.apply(line)[0].name

    def _depends_on_wanted(self) -> set[str]:
        """Return the tensors through which gradients flow to a wanted one."""
        found = {name for name in self.wanted if not self.builder.tensors[name].dtype.startswith(("i", "b8", "bool"))}
        for line in self.lines:
            if any(isinstance(n, ast.Name) and n.id in found for n in ast.walk(line.tree)):
                found.add(line.name)
        return found

    def _gradient_of(self, name: str) -> str | None:
        """Return the gradient of a tensor, adding its parts up once."""
        if name not in self.done and name in self.gradients:
            parts = self.gradients[name]
            dtype = self.builder.tensors[name].dtype
            self.done[name] = parts[0] if len(parts) == 1 else self._emit(f"d_{name}", " + ".join(parts), dtype)
        return self.done.get(name)

    def _emit(self, wanted: str, text: str, dtype: str | None = None) -> str:
        name = next(self._free_names(wanted))
        return self.builder.apply(f"{name} = {text}", dtype=dtype)[0].name

    def _free_names(self, wanted: str) -> Iterator[str]:
        """Yield `wanted` and numbered names like it, as far as no tensor has them."""
        wanted = wanted[:56]
        for number in range(1, 10_000):
            name = f"{wanted}_{number}" if number > 1 else wanted
            if name not in self.builder.tensors and name not in self.graph.tensors:
                yield name

    def _step_back(self, line: _Line, needed: set[str]) -> set[str]:
        """Emit the gradients of what one step uses; return the results that are dealt with."""
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
        """Return by tensor the gradient through one step, and the results that are dealt with besides."""
        tree = line.tree
        if is_elementwise(tree):
            return self._elementwise(tree, gradient), set()
        if is_view(tree):
            return dict([views.gradient_text(tree, gradient, self._shapes(tree))]), set()
        if isinstance(tree, ast.Call | ast.Subscript):
            return self._call(line, gradient)
        if isinstance(tree, ast.Name):
            return {tree.id: gradient}, set()
        raise NotUnderstood(f"a {type(tree).__name__.lower()}")

    def _shapes(self, tree: ast.expr) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in a formula."""
        tensors = self.builder.tensors
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return {name: tensors[name].shape for name in names if name in tensors}

    def _elementwise(self, tree: ast.expr, gradient: str) -> dict[str, str]:
        shapes = self._shapes(tree)
        shape = shape_of_node(tree, shapes)
        return {
            name: elementwise.sum_to_shape(text, shape, shapes[name])
            for name, text in elementwise.gradient_texts(tree, gradient).items()
        }

    def _call(self, line: _Line, gradient: str) -> tuple[dict[str, str], set[str]]:
        """Return the gradients through a call, and the other results of the same call."""
        tree = line.tree
        call = tree.value if isinstance(tree, ast.Subscript) else tree
        if not isinstance(call, ast.Call):
            raise NotUnderstood("the gradient of one of several results")
        siblings: dict[int, str] = {}
        if called_name(call) in {"chunk", "split"}:
            siblings = self._siblings(call)
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
        return gradient_texts(step), set(siblings.values())

    def _siblings(self, call: ast.Call) -> dict[int, str]:
        """Return the results of a call that has several, by their number."""
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
