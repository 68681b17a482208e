"""A computation as it was captured for one GPU: inputs, operators with their arguments, outputs.

The operators are those of PyTorch's ATen library by name (`aten.linear.default`), with arguments as plain data. Where
an argument is a tensor it is `{"tensor": NAME}`; a dtype is `{"dtype": "bf16"}`. Graphs are read from files, so sizes
are bounded and no code in a file is run: planner and executor look operators up by name in tables of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import msgspec

from simulator.config.runtime import ELEMENT_BYTES
from topology.codec import JsonObject
from topology.errors import BadInput

FORMAT = "meshwright captured graph"
MAX_NODES = 20_000
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 50
PARAMETER, BUFFER, CONSTANT, INPUT = "parameter", "buffer", "constant", "input"


class GraphInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input tensor of the computation. `target` is its name in the module; `kind` one of this module's four.

    A `frozen` parameter has no gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = INPUT
    target: str = ""
    frozen: bool = False

    @property
    def is_trained(self) -> bool:
        return self.kind == PARAMETER and not self.frozen


class GraphNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operator and its result. `module` is the path of the module that called it; shapes are global.

    `index` picks one of several results of an operator.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str
    kwargs: JsonObject = {}
    index: int | None = None
    module: str = ""

    def operands(self) -> tuple[str, ...]:
        """Return the names of the tensors among the arguments, in order, each once."""
        return tensors_in([*self.args, *self.kwargs.values()])


class CapturedGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Inputs, operators in an order in which they can run, and names of the results."""

    inputs: tuple[GraphInput, ...]
    nodes: tuple[GraphNode, ...]
    outputs: tuple[str, ...]
    format: str = FORMAT
    schema_version: int = 1


def tensors_in(arguments: Any) -> tuple[str, ...]:
    """Return the names of the tensors in `arguments`, in order, each once."""
    return tuple(dict.fromkeys(_tensors(arguments)))


def _tensors(arguments: Any) -> Iterator[str]:
    for argument in arguments:
        if isinstance(argument, dict) and "tensor" in argument:
            if not isinstance(argument["tensor"], str):
                raise TypeError("a tensor is named by a string")
            yield argument["tensor"]
        elif isinstance(argument, dict):
            yield from _tensors(argument.values())
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)


def renamed(arguments: Any, names: Mapping[str, str]) -> Any:
    """Return arguments with tensors renamed as in `names`; others keep their names."""
    if isinstance(arguments, dict):
        if "tensor" in arguments:
            return {"tensor": names.get(arguments["tensor"], arguments["tensor"])}
        return {key: renamed(one, names) for key, one in arguments.items()}
    if isinstance(arguments, tuple):
        return tuple(renamed(one, names) for one in arguments)
    return [renamed(one, names) for one in arguments] if isinstance(arguments, list) else arguments


def read_graph(data: Any, *, where: str) -> CapturedGraph:
    """Return decoded JSON as a graph; every name is defined before its use. Raises BadInput."""
    try:
        graph = msgspec.convert(data, CapturedGraph, strict=True)
        uses = [node.operands() for node in graph.nodes]
    except (msgspec.ValidationError, RecursionError, TypeError) as error:
        raise BadInput(
            f"{where} is no captured graph", why=str(error), remedy="write one with executor.sharding.capture"
        ) from error
    if graph.format != FORMAT or graph.schema_version != 1:
        raise BadInput(
            f"{where} is {graph.format[:40]!r}, version {graph.schema_version}", remedy=f"{FORMAT}, version 1"
        )
    if len(graph.nodes) > MAX_NODES:
        raise BadInput(f"{where} has {len(graph.nodes):,} operators", why=f"at most {MAX_NODES:,} are read")
    known: set[str] = set()
    for one in graph.inputs:
        _check(one, known, where)
    for node, operands in zip(graph.nodes, uses, strict=True):
        missing = [name for name in operands if name not in known]
        if missing:
            raise BadInput(f"{where}: {node.name} uses {str(missing[0])[:60]!r}, which nothing before it makes")
        _check(node, known, where)
    if not graph.outputs or not set(graph.outputs) <= known:
        raise BadInput(f"{where} has outputs that it does not make", remedy="names of its tensors")
    return graph


def _check(tensor: GraphInput | GraphNode, known: set[str], where: str) -> None:
    if not tensor.name.isidentifier() or len(tensor.name) > 64 or tensor.name in known:
        raise BadInput(f"{where}: {tensor.name[:64]!r} is no new name", remedy="letters, digits and _, each name once")
    if len(tensor.shape) > MAX_DIMS or any(n < 1 for n in tensor.shape) or prod(tensor.shape) > MAX_ELEMENTS:
        raise BadInput(f"{where}: {tensor.name} has shape {list(tensor.shape)[:MAX_DIMS]}", why="sizes are positive")
    if tensor.dtype not in ELEMENT_BYTES:
        raise BadInput(f"{where}: {tensor.name} has dtype {tensor.dtype[:20]!r}", remedy=", ".join(ELEMENT_BYTES))
    known.add(tensor.name)
