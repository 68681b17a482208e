"""Capture a module as a graph of ATen operators, with the names of its parameters and modules.

`torch.export` runs the module's own Python once with tensors that have shapes but no values. Values that do not depend
on the module's inputs or parameters (masks, rotary angles) are computed here and become constants of the graph.
`exported.py` describes what torch.export changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from executor.sharding.call import Signature, autocast_of, signature_of
from executor.sharding.exported import attribute_of, export
from executor.sharding.in_place import line_of
from executor.sharding.operations import RECURRENT
from executor.sharding.places import DTYPES
from simulator.sharded.graph import BUFFER, CONSTANT, INPUT, PARAMETER, CapturedGraph, GraphInput, GraphNode
from topology.errors import UserError

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_KINDS = {InputKind.PARAMETER: PARAMETER, InputKind.BUFFER: BUFFER, InputKind.CONSTANT_TENSOR: CONSTANT}
_IN_PLACE_OF = {"aten.dropout.default": 0, "aten.feature_dropout.default": 0, "aten.alias.default": 0}
_CASTS = ("aten.to.", "aten._to_copy.", "aten.type_as.")
_SKIPPED = ("aten._assert", "aten.sym_constrain", "aten._assert_tensor_metadata")


@dataclass(frozen=True, slots=True)
class Captured:
    """The graph, the values of its constants by name, and how the module's results are arranged.

    `results` has for each leaf of `result_tree` its index among the graph's outputs, or a constant (None, a number).
    `call` is the form of the call, and `training` the mode of the module.
    """

    graph: CapturedGraph
    constants: Mapping[str, torch.Tensor]
    result_tree: Any = None
    results: tuple[Output | Any, ...] = ()
    call: Signature = field(default_factory=lambda: signature_of((), {}))
    training: bool = False
    autocast: torch.dtype | None = None  # around the capture
    written: Mapping[str, str] = field(default_factory=dict)  # by buffer of the module, the output with its new value


@dataclass(frozen=True, slots=True)
class Output:
    """A result that is output `number` of the graph."""

    number: int


def capture(module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Captured:
    """Return the graph of `module` called with `args` and `kwargs`, for their shapes.

    The module is not changed. Raises UserError where torch.export cannot capture it or it draws random numbers.
    """
    autocast = autocast_of(args)
    exported = export(module, args, kwargs or {})
    reader = _Reader(tied=_tied(module), autocast=autocast is not None)
    values = {**dict(exported.named_parameters()), **dict(exported.named_buffers()), **exported.constants}
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    environment: Environment = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            environment[node.name] = reader.input(node, specs[node.name], values)
    outputs = reader.walk(exported.graph_module, environment)
    kinds = [spec.kind.name for spec in exported.graph_signature.output_specs]
    returned = [v for v, kind in zip(outputs, kinds, strict=True) if kind in {"USER_OUTPUT", "LOSS_OUTPUT"}]
    named, results = list[str](), list[Any]()
    for value in returned:
        results.append(Output(len(named)) if isinstance(value, _Tensor) else value)
        named += [value.name] if isinstance(value, _Tensor) else []
    written = dict[str, str]()
    for value, spec in zip(outputs, exported.graph_signature.output_specs, strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            written[str(spec.target)] = reader.written(value)
            named.append(written[str(spec.target)])
        elif spec.kind not in {OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT}:
            raise UserError(
                f"{type(module).__name__} writes into {spec.target}",
                why="what a call writes is kept of buffers alone",
                remedy="a module that writes into a copy, x.clone()",
            )
    graph = CapturedGraph(inputs=tuple(reader.inputs), nodes=tuple(reader.nodes), outputs=tuple(named))
    return Captured(
        graph=graph,
        constants=reader.constants,
        result_tree=exported.call_spec.out_spec,
        results=tuple(results),
        call=signature_of(args, kwargs or {}),
        training=module.training,
        autocast=autocast,
        written=written,
    )


def _tied(module: nn.Module) -> dict[str, str]:
    """Return by name of a parameter or buffer the first name of the same tensor."""
    first: dict[int, str] = {}
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(one), name) for name, one in every}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the graph. `fake` has its shape and dtype."""

    name: str
    fake: torch.Tensor


Environment = dict[str, Any]  # by name of a node, its value in torch.fx: a tensor of the graph, or a constant


@dataclass(slots=True)
class _Reader:
    tied: Mapping[str, str] = field(default_factory=dict)
    autocast: bool = False  # whether results have the dtypes of autocast
    inputs: list[GraphInput] = field(default_factory=list)
    nodes: list[GraphNode] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    _given: dict[str, _Tensor] = field(default_factory=dict)  # parameters and buffers, by their first name
    _casts: dict[tuple[str, torch.dtype], _Tensor] = field(default_factory=dict)
    _constant_names: dict[int, str] = field(default_factory=dict)
    _alive: list[torch.Tensor] = field(default_factory=list)  # keeps tensors alive, so that no id is used twice

    def input(self, node: torch.fx.Node, spec: Any, values: Mapping[str, Any]) -> Any:
        """Return the value for a placeholder: a named tensor, or a constant."""
        kind = _KINDS.get(spec.kind, INPUT)
        value = node.meta.get("val")
        if kind == CONSTANT and isinstance(values.get(spec.target), torch.Tensor):
            return values[spec.target]
        if not isinstance(value, torch.Tensor):
            return value
        if kind in {PARAMETER, BUFFER} and not value.numel():
            return _empty(value)
        target = self.tied.get(spec.target or "", spec.target or "")
        if target and target in self._given:
            return self._given[target]
        name = self._new_name(target or node.name)
        called = target or (node.name if node.name != name else "")
        frozen = kind == PARAMETER and not values[spec.target].requires_grad
        self.inputs.append(
            GraphInput(
                name=name, shape=tuple(value.shape), dtype=_dtype_name(value), kind=kind, target=called, frozen=frozen
            )
        )
        self._given[target] = _Tensor(name, value)
        return self._given[target]

    def written(self, value: Any) -> str:
        """Return the name of a buffer's new value, through which no gradient passes."""
        if not isinstance(value, _Tensor):
            raise UserError("a buffer becomes what depends on no tensor", remedy="a module without it")
        detached = value.fake.detach()
        return self._add(f"{value.name}_kept", "aten.detach.default", [value], {}, detached, "", None).name

    def walk(self, module: torch.fx.GraphModule, environment: Environment) -> list[Any]:
        """Read the nodes of a graph; return its results."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                environment[node.name] = attribute_of(module, node.target)
            elif node.op == "call_function":
                environment[node.name] = self._call(node, environment)
            elif node.op == "output":
                return list(_mapped(node.args[0], environment))
        return []

    def _call(self, node: torch.fx.Node, environment: Environment) -> Any:
        args, kwargs = _mapped(node.args, environment), _mapped(node.kwargs, environment)
        op = str(node.target)
        if op == "wrap_with_set_grad_enabled":
            return self._region(args[1], args[2:], autocast=self.autocast)
        if op == "wrap_with_autocast":
            return self._region(args[4], args[5:], autocast=args[2])
        if getattr(node.target, "__name__", "") == "getitem":
            return args[0][args[1]]
        if op.startswith(_SKIPPED):
            return None
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _draws_nothing(op, args):
            raise UserError(
                f"{node.name} draws random numbers ({op})",
                why="ranks would have to draw the same for what they hold copies of",
                remedy="call module.eval(), or set its dropout to 0",
            )
        if op == "aten.instance_norm.default" and args[3] is not None and args[5]:
            raise UserError(
                f"{node.name} writes running statistics of an instance norm{line_of(node)}",
                why="torch.export drops the write",
                remedy="call module.eval(), or make it with track_running_stats=False",
            )
        if op.startswith("aten.as_strided") and isinstance(args[0], _Tensor) and not args[0].fake.is_contiguous():
            raise UserError(
                f"{node.name} depends on how {args[0].name} lies in memory ({op}){line_of(node)}",
                why="its pieces on ranks lie otherwise",
                remedy="as_strided of x.contiguous(), or unfold",
            )
        if not any(isinstance(leaf, _Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return _constant(node.target, args, kwargs)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.numel():
            return _empty(value)
        if op.startswith("aten.cat."):
            args = ([one for one in args[0] if not _is_empty(one)], *args[1:])
        if op.endswith("_like.default") and isinstance(value, torch.Tensor):  # depends only on a tensor's shape
            return _constant(
                node.target, [torch.empty(args[0].fake.shape, dtype=args[0].fake.dtype), *args[1:]], kwargs
            )
        if op == "aten.copy.default" and _alike(args[0], args[1]):
            return args[1]
        if op == "aten.index_put.default" and self._inverts(args):
            op, args = "aten.argsort.default", args[1]
        if op in _IN_PLACE_OF:
            return args[_IN_PLACE_OF[op]]
        module = next(reversed(list(node.meta.get("nn_module_stack", {}).values())), ("",))[0]
        if self.autocast and isinstance(value, torch.Tensor):
            args, kwargs = self._cast(op, args, kwargs, value.dtype, module)
        if isinstance(value, torch.Tensor):
            return self._add(node.name, op, args, kwargs, value, module, None)
        if isinstance(value, list | tuple):
            return [
                self._add(f"{node.name}_{i}", op, args, kwargs, one, module, i)
                if isinstance(one, torch.Tensor) and one.numel()
                else _empty(one)
                for i, one in enumerate(value)
            ]
        raise UserError(f"{node.name} makes a number of a tensor's values ({op})", remedy="a module without it")

    def _inverts(self, args: Any) -> bool:
        """Return whether a scatter writes 0, 1, 2, ... to the indices of a sort, which inverts its permutation."""
        if len(args) != 3 or len(args[1]) != 1 or not isinstance(args[1][0], _Tensor):
            return False
        made = next((one for one in self.nodes if one.name == args[1][0].name), None)
        sorts = made is not None and made.op.startswith(("aten.sort.", "aten.argsort.")) and made.index in {None, 1}
        if made is None or not sorts or len(made.shape) != 1 or not isinstance(args[2], torch.Tensor):
            return False
        return args[2].dtype == torch.int64 and torch.equal(args[2], torch.arange(made.shape[0]))

    def _region(self, inner: torch.fx.GraphModule, args: Sequence[Any], *, autocast: bool) -> list[Any]:
        """Read a graph in which autocast is on or off."""
        before, self.autocast = self.autocast, autocast
        names = [node.name for node in inner.graph.nodes if node.op == "placeholder"]
        found = self.walk(inner, dict(zip(names, args, strict=True)))
        self.autocast = before
        return found

    def _cast(self, op: str, args: Any, kwargs: Any, dtype: torch.dtype, module: str) -> tuple[Any, Any]:
        """Return arguments as autocast passes them on: in the dtype of the result, if both are floating."""
        if not dtype.is_floating_point or op.startswith(_CASTS):
            return args, kwargs

        def cast(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim and value.dtype != dtype:
                return value.to(dtype)
            floating = isinstance(value, _Tensor) and value.fake.is_floating_point() and value.fake.ndim
            if not floating or value.fake.dtype == dtype:
                return value
            key = (value.name, dtype)
            if key not in self._casts:
                fake = value.fake.to(dtype)
                name = f"{value.name}_as_{DTYPE_NAMES[dtype]}"
                self._casts[key] = self._add(
                    name, "aten._to_copy.default", [value], {"dtype": dtype}, fake, module, None
                )
            return self._casts[key]

        found: tuple[Any, Any] = pytree.tree_map(cast, (args, kwargs))
        return found

    def _add(
        self, name: str, op: str, args: Any, kwargs: Any, value: torch.Tensor, module: str, index: int | None
    ) -> _Tensor:
        name = self._new_name(name if name[-1].isdigit() else f"{name}_0")
        self.nodes.append(
            GraphNode(
                name=name,
                op=op,
                args=tuple(self._plain(a) for a in args),
                kwargs={k: self._plain(v) for k, v in kwargs.items() if k not in {"device", "layout", "pin_memory"}},
                shape=tuple(int(n) for n in value.shape),
                dtype=_dtype_name(value),
                index=index,
                module=module,
            )
        )
        return _Tensor(name, value)

    def _plain(self, value: Any) -> Any:
        """Return an argument as JSON data; tensors with known values become constants of the graph."""
        match value:
            case _Tensor():
                return {"tensor": value.name}
            case torch.Tensor():
                return {"tensor": self._constant(value)}
            case torch.dtype():
                return {"dtype": DTYPE_NAMES[value]}
            case list() | tuple():
                return [self._plain(one) for one in value]
            case float() if not math.isfinite(value):
                return {"float": repr(value)}
            case complex():
                return {"complex": repr(value)}
            case torch.device() | torch.layout() | torch.memory_format():
                return None
            case None | bool() | int() | float() | str():
                return value
        raise UserError(f"an argument of the kind {type(value).__name__}", remedy="operators on tensors and numbers")

    def _constant(self, value: torch.Tensor) -> str:
        if id(value) not in self._constant_names:
            name = self._new_name(f"constant_{len(self.constants)}")
            shape, dtype = tuple(value.shape), _dtype_name(value)
            self.inputs.append(GraphInput(name=name, shape=shape, dtype=dtype, kind=CONSTANT, target=name))
            self.constants[name] = value.detach()
            self._constant_names[id(value)] = name
            self._alive.append(value)
        return self._constant_names[id(value)]

    def _new_name(self, name: str) -> str:
        """Return an unused name for a tensor. Names of results end with a digit, names of functions do not."""
        name = re.sub(r"\W", "_", name)[-56:].lstrip("_0123456789") or "tensor"
        if hasattr(torch.ops.aten, name):
            name = f"{name}_0"
        unique, number = name, 1
        while unique in self.names:
            unique, number = f"{name}_{number}", number + 1
        self.names.add(unique)
        return unique


def _empty(value: Any) -> Any:
    """Return a new tensor in place of one without elements, for which its shape is enough; anything else unchanged."""
    return torch.empty(tuple(value.shape), dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.numel()


def _alike(one: Any, other: Any) -> bool:
    """Return whether two tensors of the graph have the same shape and dtype."""
    tensors = isinstance(one, _Tensor) and isinstance(other, _Tensor)
    return tensors and (one.fake.shape, one.fake.dtype) == (other.fake.shape, other.fake.dtype)


def _dtype_name(value: torch.Tensor) -> str:
    """Return the name of a tensor's dtype. Raises UserError for one that programs do not support."""
    if value.dtype not in DTYPE_NAMES:
        raise UserError(f"a tensor of {value.dtype}", remedy=f"one of {', '.join(map(str, DTYPE_NAMES))}")
    return DTYPE_NAMES[value.dtype]


def _draws_nothing(op: str, args: Sequence[Any]) -> bool:
    """Return whether an operator that can draw random numbers does not do so here: attention, dropout or recurrent
    layers without dropout, or in evaluation.
    """
    if op.startswith("aten.scaled_dot_product_attention"):
        return len(args) < 5 or not args[4]
    if op.startswith(RECURRENT):
        return len(args) == 9 and (not args[5] or not args[6] or args[4] == 1)
    return op in _IN_PLACE_OF and not (args[1] and args[2])


def _mapped(arguments: Any, environment: Mapping[str, Any]) -> Any:
    return torch.fx.node.map_aggregate(
        arguments, lambda leaf: environment[leaf.name] if isinstance(leaf, torch.fx.Node) else leaf
    )


def _constant(target: Any, args: Any, kwargs: Any) -> Any:
    """Return the value of an operator with known arguments."""
    with torch.no_grad():
        return target(*args, **kwargs)
