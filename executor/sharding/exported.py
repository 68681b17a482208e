"""A module as `torch.export` captures it, and what becomes of that which it changes on its way.

| what a module has | what becomes of it |
|---|---|
| `detach`, reads of `data`, frozen parameters | kept: no gradient passes them |
| `no_grad`, `enable_grad` | kept: results of a region without autograd are detached where they leave it |
| the same inside an autocast of the module | refused: torch.export drops the switch |
| autocast, in the module or around `shard` | kept: casts are operators, as the results' dtypes say |
| in-place writes to intermediate tensors | kept, where autograd is on: operators that make new tensors |
| `detach_` | kept: `detach` |
| writes through `detach()` or `data` into a tensor that is read again | refused: its gradient would pass other values |
| `vmap`, `torch.func.jvp`, `torch.autograd.grad` with `create_graph` | kept: their operators |
| `torch.func.grad` and `vjp`, `torch.cond` and other functions of functions | refused |
| tied parameters | kept: one tensor |
| tensors without elements | kept by their shapes; as an argument of a call they are refused |
| forward hooks | kept: they run while the module is captured, and what they compute is part of the graph |
| sizes of arguments, and decisions on them | kept: other sizes are captured at their first call (`skeleton`) |
| what `deepcopy` refuses, as open files and locks | kept for the captured sizes; a call of others is refused |
| training mode | kept as it is at the capture; a `ShardedModule` cannot be switched |
| control flow that depends on values of tensors, as a loop over the experts that have tokens | refused, with its line |
| sizes that do, as of the rows of one expert (`torch.where(mask)`, `nonzero`, `x[mask]`) | refused, with its line |
| a number made of a tensor's values (`item`) | refused |
| writes into buffers, also in `no_grad`, as of batch norms in training | kept: the same on all ranks |
| gradients that are zero since all that they pass is overwritten | None |
| writes into arguments and parameters | refused |
| random numbers, as of dropout in training | refused |
| `autograd.Function`, and reentrant checkpoints | refused: torch.export drops their backward |
| hooks of the backward pass, on modules, parameters or tensors | refused |
| attributes that are numbers, and that a call changes | refused, unless the next call is the same |
"""

from __future__ import annotations

import copy
import linecache
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, cast

import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.export.graph_signature import InputKind

from executor.sharding.in_place import (
    detach_in_place,
    detach_operands,
    is_view,
    line_of,
    separate_detached_writes,
    writes_in_place,
)
from topology.errors import UserError

# Batch norms in training become sums, so that ranks with some of the rows can add up theirs.
_DECOMPOSED = get_decompositions([torch.ops.aten._native_batch_norm_legit_functional.default])  # noqa: SLF001
_NOT_COPIED = (TypeError, RuntimeError, copy.Error)  # by deepcopy: files, locks, operators' results, types that refuse
_EXPERTS = (
    "a module whose control flow and sizes do not depend on values of tensors; for experts, instead of a loop that "
    "takes each one's tokens, tokens sorted by expert and torch.nn.functional.grouped_mm, or of transformers "
    'model.set_experts_implementation("grouped_mm")'
)
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def export(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return `module` as torch.export has it, without writes into tensors, and with detached results of regions without
    autograd.

    Raises UserError where it cannot be captured, or something would be lost.
    """
    _refuse_backward_hooks(module)
    try:
        exported = _traced(module, args, kwargs)
        _refuse_unknown_constants(exported.constants)
        for one in exported.graph_module.modules():
            detach_in_place(_nodes(one))
            separate_detached_writes(_nodes(one))
        specs = exported.graph_signature.input_specs
        buffers = {spec.arg.name for spec in specs if spec.kind is InputKind.BUFFER}
        _detach_regions(exported.graph_module, buffers, graded=True)
        every = [node for one in exported.graph_module.modules() for node in _nodes(one)]
        if any(writes_in_place(node.target) or _is_function(node) for node in every):
            exported = exported.run_decompositions(_DECOMPOSED)
    except UserError:
        raise
    except Exception as error:  # torch.export raises many kinds of errors
        where = _line_of(module, error)
        raise UserError(
            f"torch.export cannot capture {type(module).__name__}" + (f", at {where}" if where else ""),
            why=str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__,
            remedy=_EXPERTS,
        ) from error
    _refuse_sizes_of_values(exported.graph_module)
    _refuse_functions(exported.graph_module)
    return exported


def _line_of(module: nn.Module, error: BaseException) -> str:
    """Return the last line of the module's own code in the traceback of an error, or an empty string."""
    classes = {type(one).__module__ for one in module.modules()} - {"torch.nn.modules.container"}
    codes = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_globals.get("__name__") in classes]
    if not codes:
        return ""
    frame, line = next((f, n) for f, n in reversed(list(walk_tb(error.__traceback__))) if f is codes[-1])
    file = frame.f_code.co_filename
    return f"{Path(file).name}:{line}, {linecache.getline(file, line).strip()[:120]}"


def _refuse_sizes_of_values(module: torch.fx.GraphModule) -> None:
    """Raise UserError if a tensor has a size that depends on values: every rank would have another program."""
    for one in module.modules():
        for node in _nodes(one):
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, torch.Tensor) else ()
            if not all(isinstance(size, int) for size in sizes):
                raise UserError(
                    f"the size of {node.name} depends on values of tensors ({node.target}){line_of(node)}",
                    why="a program has the same sizes in every call",
                    remedy=_EXPERTS,
                )


def _is_function(node: torch.fx.Node) -> bool:
    """Return whether a node calls something else than an operator, as vmap does."""
    name = getattr(node.target, "__name__", "")
    operators = torch._ops.OpOverload  # noqa: SLF001 - torch has no public name
    known = isinstance(node.target, operators) or name == "getitem" or str(node.target) in _REGIONS
    return node.op == "call_function" and not known


def _refuse_functions(module: torch.fx.GraphModule) -> None:
    """Raise UserError for calls of functions: programs on ranks run operators."""
    for one in module.modules():
        for node in _nodes(one):
            if _is_function(node):
                raise UserError(
                    f"{getattr(node.target, '__name__', node.name)} is no operator of tensors{line_of(node)}",
                    why="programs on ranks run operators, and torch.export has kept a function",
                    remedy="operators in its place, as torch.where for torch.cond",
                )


def _refuse_unknown_constants(constants: Mapping[str, Any]) -> None:
    """Raise UserError for a constant without values: what torch.func differentiates leaves the graph."""
    for name, one in constants.items():
        if isinstance(one, torch.Tensor):
            try:
                one.data_ptr()
            except RuntimeError as error:
                raise UserError(
                    f"{name} has no values where torch.func differentiates a function",
                    why="torch.export does not record how it follows from the arguments",
                    remedy="torch.autograd.grad(..., create_graph=True), or torch.func.jvp",
                ) from error


def skeleton(module: nn.Module) -> nn.Module | UserError:
    """Return a copy of the module whose parameters have no memory, for further captures; or why it cannot be copied, a
    reason that calls with other sizes raise.
    """
    own: dict[int, Any] = {id(one): one for one in module.buffers()}
    for one in module.parameters():
        empty = nn.Parameter(torch.empty_like(one, requires_grad=False), requires_grad=one.requires_grad)
        empty.untyped_storage().resize_(0)
        own[id(one)] = empty
    try:
        return copy.deepcopy(module, own)
    except _NOT_COPIED as error:
        return UserError(
            f"{type(module).__name__} has a program for the sizes that it was captured with alone",
            why=f"for others it is captured from a copy, and cannot be copied: {str(error)[:200]}",
            remedy="a module without open files, locks and the like, or shard it once more with these arguments",
        )


def _refuse_backward_hooks(module: nn.Module) -> None:
    """Raise UserError if a hook would run in the backward pass: the graph contains operators only."""
    hooks = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    named = (*module.named_modules(), *module.named_parameters())
    found = [name for name, one in named if any(getattr(one, each, None) for each in hooks)]
    if found:
        raise UserError(
            f"{found[0] or type(module).__name__} has a hook of the backward pass",
            why="programs on ranks run operators, and no Python between them",
            remedy="remove it, or look at gradients after the backward pass",
        )


@contextmanager
def _numbers_changed(module: nn.Module) -> Iterator[dict[tuple[str, str], tuple[nn.Module, Any]]]:
    """Collect, by module and attribute, the numbers that a call changes."""
    before = {id(one): (name, dict(vars(one))) for name, one in module.named_modules()}
    original, changed = nn.Module.__setattr__, dict[tuple[str, str], tuple[nn.Module, Any]]()

    def set_attribute(one: nn.Module, key: str, value: Any) -> None:
        name, had = before.get(id(one), ("", {}))
        if isinstance(value, int | float) and key in had and had[key] != value:
            changed[name or type(one).__name__, key] = one, value
        original(one, key, value)

    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
    try:
        yield changed
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]


def _traced(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return torch.export's result for a call. Raises UserError if the next call would give another program.

    A number that each call sets to the same value is accepted: two calls are captured and compared.
    """
    kept = [(one, dict(vars(one))) for one in module.modules()]
    try:
        with _recorded(), _numbers_changed(module) as changed:
            exported = torch.export.export(module, tuple(args), dict(kwargs), strict=False)
        if not changed:
            return exported
        for (_, key), (one, value) in changed.items():  # torch.export restores changed attributes
            vars(one)[key] = value
        with _recorded(), _numbers_changed(module) as again:
            second = torch.export.export(module, tuple(args), dict(kwargs), strict=False)
    finally:
        for one, attributes in kept:
            vars(one).update({key: had for key, had in attributes.items() if isinstance(had, int | float)})
    if again or str(second.graph) != str(exported.graph):
        name, key = next(iter(again or changed))
        raise UserError(
            f"{name} changes its attribute {key} when it is called",
            why="the graph has the number of one call",
            remedy="an argument in its place",
        )
    return exported


@contextmanager
def _recorded() -> Iterator[None]:
    """Switch autograd on, as in training, since only then regions without it are recorded. Refuse what torch.export
    would drop: functions with their own backward, hooks of tensors, and switches of autograd inside autocast.
    """
    applied = torch.autograd.Function.__dict__["apply"]
    autocasts: list[torch.autocast] = []

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.split(".")[0] != "torch" or cls.__name__ == "CheckpointFunction":
            raise _own_backward(cls)
        return applied.__get__(None, cls)(*args, **kwargs)

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        del tensor
        raise UserError(
            f"{getattr(hook, '__qualname__', 'a function')} is a hook of a tensor's gradient",
            why="torch.export drops it",
            remedy="operators that autograd knows",
        )

    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    switch, enable = torch.set_grad_enabled.__init__, torch.enable_grad.__enter__

    def entered(autocast: torch.autocast) -> Any:
        autocasts.append(autocast)
        return enter(autocast)

    def left(autocast: torch.autocast, *raised: Any) -> Any:
        autocasts.pop()
        return leave(autocast, *raised)

    def switched(one: torch.set_grad_enabled, mode: bool) -> None:
        _refuse_switch(mode, autocasts)
        switch(one, mode)

    def enabled(one: torch.enable_grad) -> None:
        _refuse_switch(True, autocasts)
        enable(one)

    replaced = (
        (torch.autograd.Function, "apply", classmethod(apply)),
        (torch.Tensor, "register_hook", register_hook),
        (torch.autocast, "__enter__", entered),
        (torch.autocast, "__exit__", left),
        (torch.set_grad_enabled, "__init__", switched),
        (torch.enable_grad, "__enter__", enabled),
        (torch.Tensor, "data", property(torch.Tensor.detach, _refuse_assigned)),  # otherwise a constant without values
    )
    originals = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in replaced]
    try:
        for owner, name, one in replaced:
            setattr(owner, name, one)
        with torch.inference_mode(mode=False), torch.enable_grad():
            yield
    finally:
        for owner, name, original in originals:
            if original is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _own_backward(cls: Any) -> UserError:
    return UserError(
        f"{cls.__qualname__} is an autograd.Function with a backward of its own",
        why="torch.export keeps what it computes and drops its backward",
        remedy="checkpoint(..., use_reentrant=False)"
        if cls.__name__ == "CheckpointFunction"
        else "a torch.library.custom_op with register_autograd, or operators that autograd knows",
    )


def _refuse_assigned(tensor: torch.Tensor, value: torch.Tensor) -> None:
    del tensor, value
    raise UserError(
        "a tensor's data is assigned",
        why="torch.export does not record it",
        remedy="y = y + (new - y).detach(), which has the new values and passes the gradient",
    )


def _refuse_switch(mode: bool, autocasts: Collection[torch.autocast]) -> None:
    """Raise UserError for a switch of autograd to `mode` inside an autocast that the module has entered."""
    if autocasts and mode != torch.is_grad_enabled():
        raise UserError(
            f"autograd is switched {'on' if mode else 'off'} inside torch.autocast",
            why="torch.export drops the switch, and gradients would pass",
            remedy="torch.autocast inside torch.no_grad(), or y.detach() of what is computed",
        )


def _nodes(module: nn.Module) -> Sequence[torch.fx.Node]:
    return list(module.graph.nodes) if isinstance(module, torch.fx.GraphModule) else []


def _detach_regions(module: torch.fx.GraphModule, buffers: Collection[str], *, graded: bool) -> set[int]:
    """Detach the results of regions without autograd, in place, and what they write into `buffers`, the nodes of
    buffers by name. Return the numbers of the results that are buffers.

    Raises UserError if such a region writes into another tensor.
    """
    known, same = set(buffers), dict[str, set[int]]()  # results of inner regions that are buffers
    for node in _nodes(module):
        op = str(node.target)
        if op in _REGIONS:
            switch, at = (node.args[0], 1) if op == "wrap_with_set_grad_enabled" else (graded, 4)
            region = attribute_of(module, str(cast("torch.fx.Node", node.args[at]).target))
            places = (one.name for one in region.graph.nodes if one.op == "placeholder")
            given = zip(places, node.args[at + 1 :], strict=True)
            inside = {place for place, one in given if _is_of(one, known)}
            same[node.name] = _detach_regions(region, inside, graded=bool(switch))
        elif _takes(node, same):
            known.add(node.name)
        elif not graded and writes_in_place(node.target) and _is_of(node.args[0], known):
            detach_operands(node)
        elif not graded and node.op == "call_function":
            _detach_uses(module.graph, node)
    module.recompile()
    results = cast("Sequence[Any]", module.graph.output_node().args[0])
    return {number for number, one in enumerate(results) if _is_of(one, known)}


def _takes(node: torch.fx.Node, same: Mapping[str, set[int]]) -> bool:
    """Return whether a node takes one of the results in `same`, numbers by the node of their region."""
    taken = getattr(node.target, "__name__", "") == "getitem"
    return taken and node.args[1] in same.get(str(node.args[0]), ())


def _is_of(node: Any, buffers: Collection[str]) -> bool:
    """Return whether a node is one of `buffers` by name, or a view of one."""
    while isinstance(node, torch.fx.Node) and node.name not in buffers:
        node = node.args[0] if is_view(node) else None
    return isinstance(node, torch.fx.Node)


def _detach_uses(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Detach the result of a node where it leaves its region or enters an inner one."""
    if writes_in_place(node.target):
        raise UserError(
            f"{node.name} writes into a tensor without autograd ({node.target})",
            why="gradients would pass what is overwritten",
            remedy="the same on a detached copy",
        )
    made = cast("torch.fx.Node", node.args[0]) if getattr(node.target, "__name__", "") == "getitem" else node
    leaves = [user for user in node.users if user.op == "output" or str(user.target) in _REGIONS]
    value = node.meta.get("val")
    if (
        not leaves
        or str(made.target) in _REGIONS
        or not (isinstance(value, torch.Tensor) and value.is_floating_point())
    ):
        return
    with graph.inserting_after(node):
        detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    for user in leaves:
        user.replace_input_with(node, detached)


def attribute_of(module: torch.fx.GraphModule, path: str) -> Any:
    """Return the attribute at a dotted path."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
