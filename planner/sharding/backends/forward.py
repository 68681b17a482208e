"""A plan's steps as instructions on two streams: kernels on a rank's own pieces, and exchanges between ranks.

Every instruction waits for the events of the buffers it reads, so a gather overlaps a product that does not need it.
Tokens of routed experts go to the ranks of their experts and back:

    route.plan      who sends how many rows to whom, and in which order they stand: numbers of rows and of places
    route.send      rows of this rank's tokens to the ranks of their experts, in the order of experts there
    routed.*, ...   the operators between, on the rows that came
    route.back      and back, in the order of pairs

The number of rows of a rank is known only when the program runs. Buffers have the sizes of pieces before the exchange;
those after it are equal if all experts have the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec

from planner.sharding.backends.chunks import Site
from planner.sharding.backends.overlapped_products import write_overlapped
from planner.sharding.backends.ring_attention import RingSite, write_ring
from planner.sharding.backends.works import Work, Writer, bound, describe, primitive
from planner.sharding.layouts.collectives import ALL_REDUCE, SEND_RECV
from planner.sharding.layouts.layout import Layout
from planner.sharding.ops.aten import Statement
from planner.sharding.ops.op import Phase
from planner.sharding.ops.routed import ROUTED, SENT
from planner.sharding.ops.table import kernel
from planner.sharding.plans.plan import OperatorStep, ShardingPlan, TensorMove
from planner.sharding.problem.problem import ShardingProblem
from simulator.sharded.graph import tensors_in
from simulator.sharded.program import ROUTE, Buffer, Exchange, Kernel
from topology.errors import Infeasible


@dataclass(slots=True)
class ForwardWriter:
    """Writes the forward pass of a plan. `versions` has the buffer of every tensor in each of its layouts."""

    problem: ShardingProblem
    plan: ShardingPlan
    statements: Mapping[str, Statement]
    out: Writer
    # By result: products or attention in chunks, with the number of chunks or the name of the way.
    chunks: Mapping[str, tuple[Site | RingSite, int | str]] = field(default_factory=dict)
    split: frozenset[str] = frozenset()  # inputs with a separate value for every micro batch
    micro_batches: int = 1
    versions: dict[tuple[str, Layout], str] = field(default_factory=dict)
    inputs: dict[str, str] = field(
        default_factory=dict
    )  # buffers by input; of those in `split`, by `x[0]`, `x[1]`, ...
    outputs: list[str] = field(default_factory=list)  # buffers of all results, those of the first micro batch first
    suffix: str = ""  # of the buffers of the present micro batch
    _once: set[str] = field(default_factory=set)  # tensors that are the same for all micro batches
    _scopes: dict[tuple[int, int], dict[tuple[str, Layout], str]] = field(default_factory=dict)

    def write(self, outputs: Sequence[str]) -> None:
        """Write all steps, for one micro batch after another. Raises Infeasible if ranks' pieces are not equal."""
        if self.problem.routed:
            raise Infeasible("routed tokens are not run by this back end", remedy="leave them out")
        layouts = self.plan.choice.layouts
        self._once = {name for name in self.problem.inputs if name not in self.split}
        for operator in self.problem.operators:  # results of parameters only are computed once
            if all(name in self._once for name, _ in operator.operands):
                self._once.add(operator.result.name)
        for number in range(self.micro_batches):
            self.suffix = f"[{number}]" if self.micro_batches > 1 else ""
            for step in self.plan.steps:
                self._enter(step.stage, number)
                self.out.micro_batch = -1 if self._is_once(step) else number
                if isinstance(step, TensorMove):
                    self._move(step)
                elif not number or self.problem.operators[step.operator].result.name not in self._once:
                    self._operator(step)
            for name in outputs:
                self._enter(self._stage_of(name), number)
                self.outputs.append(self.versions[name, layouts[name]])

    def _is_once(self, step: OperatorStep | TensorMove) -> bool:
        """Return whether a step is done once for all micro batches."""
        if isinstance(step, TensorMove):
            return step.tensor in self._once
        return self.problem.operators[step.operator].result.name in self._once

    def _enter(self, stage: int, number: int) -> None:
        """Switch to the buffers of a stage and a micro batch: at first its inputs, and what all micro batches share."""
        if self.problem.stages is not None:
            self.out.stage = stage
        key = (stage, number)
        if key not in self._scopes:
            shared = self._scopes.get((stage, 0), {})
            self.versions = self._scopes[key] = {k: v for k, v in shared.items() if k[0] in self._once}
            for name in self.problem.inputs:
                layout = self.plan.choice.layouts[name]
                called = f"{name}{self.suffix}" if name in self.split else name
                if called not in self.inputs:
                    self.inputs[called] = self._new_buffer(name, layout, called)
                self.versions[name, layout] = self.inputs[called]
        self.versions = self._scopes[key]

    def _stage_of(self, name: str) -> int:
        made = self.problem.graph.producers.get(name)
        return 0 if self.problem.stages is None or made is None else self.problem.stages.operator_stages[made]

    def version(self, tensor: str, layout: Layout) -> str:
        """Return the buffer of `tensor` in `layout`, a new one if there is none yet."""
        key = (tensor, layout)
        if key not in self.versions:
            number = sum(name == tensor for name, _ in self.versions)
            there = f"@{self.out.stage}" if self.out.stage and self.out.stage != self._stage_of(tensor) else ""
            suffix = "" if tensor in self._once else self.suffix
            name = (f"{tensor}.{number}" if number else tensor) + there + suffix
            self.versions[key] = self._new_buffer(tensor, layout, name)
        return self.versions[key]

    def _new_buffer(self, tensor: str, layout: Layout, name: str) -> str:
        about = self.problem.tensors[tensor]
        return self.out.add_buffer(name, describe(tensor, about.shape, about.dtype, layout, self.out.mesh))

    def _move(self, move: TensorMove) -> None:
        if any(one.kind == SEND_RECV for one in move.collectives):
            self._send(move)
            return
        here, steps = move.source, move.steps
        site, _ = self.chunks.get(move.consumer, (None, 1))
        if site is not None and site.gathers(move):
            steps = steps[:-1]  # the last gather runs in chunks with the product
        for step in steps:
            if (move.tensor, step.after) not in self.versions:
                source = self.version(move.tensor, here)
                target = self.version(move.tensor, step.after)
                self.out.add(Work(do=primitive(step, here, source, self.out.mesh), reads=(source,), writes=(target,)))
            here = step.after

    def _send(self, move: TensorMove) -> None:
        """Write the message of a tensor to the stage that uses it, with the same layout."""
        stages = self.problem.stages
        assert stages is not None  # noqa: S101 - by the caller
        there = stages.operator_stages[self.problem.graph.producers[move.consumer]]
        here, number = move.stage, int(self.suffix[1:-1] or 0)
        source = self.versions[move.tensor, move.source]
        self._enter(there, number)
        if (move.tensor, move.source) not in self.versions:
            target = self.version(move.tensor, move.source)
            do = Exchange(kind=SEND_RECV, axes=(stages.axis,), stages=(here, there))
            self._enter(here, number)
            self.out.add(Work(do=do, reads=(source,), writes=(target,)))

    def _operator(self, step: OperatorStep) -> None:
        operator = self.problem.operators[step.operator]
        statement = self.statements[operator.result.name]
        site, way = self.chunks.get(operator.result.name, (None, 1))
        if isinstance(site, RingSite):
            at = dict(step.option.operands) | {one.tensor: site.start for one in site.moves}
            result = self.version(operator.result.name, step.option.result)
            operands = {name: self.versions[name, layout] for name, layout in at.items()}
            write_ring(self.out, step, statement, site, operands, result)
            return
        if site is not None:
            write_overlapped(self, step, statement, site, way)
            return
        operands = {name: self.versions[name, layout] for name, layout in step.option.operands}
        result = self.version(operator.result.name, step.option.result)
        if statement.op in {ROUTED, SENT}:
            write_routed(self.out, step, statement, operands, result)
            return
        if not step.collectives:
            do = Kernel(
                op=statement.op,
                args=bound(statement.args, operands),
                kwargs=bound(statement.kwargs, operands),
                index=statement.index,
            )
            self.out.add(Work(do=do, reads=tuple(operands.values()), writes=(result,), step=step))
            return
        op = kernel(statement.op)
        if op is None or op.phases is None:
            raise Infeasible(
                f"{operator.result.name} ({statement.op}) over a sharded axis is not run by this back end",
                remedy="pin its operand whole along that axis",
            )
        first = next(layout for name, layout in step.option.operands if name in statement.operands)
        for phase in op.phases(statement, first, step.option.result):
            self._phase(phase, step, operands, result)

    def _phase(self, phase: Phase, step: OperatorStep, operands: dict[str, str], result: str) -> None:
        """Write one part of an operator that exchanges statistics: a kernel, or the reduction of its result."""
        name = result if not phase.name else f"{result}.{phase.name}"
        axes = tuple(step.collectives[0].axes)
        if phase.name and phase.layout is not None:
            waiting = tuple((axis, phase.waits) for axis in self.out.mesh.names if phase.waits and axis in axes)
            layout = Layout(phase.layout.dims, (*phase.layout.pending, *waiting))
            self.out.add_buffer(name, describe(name, phase.shape, phase.dtype, layout, self.out.mesh))
        reads = tuple(operands.get(one) or f"{result}.{one}" for one in phase.reads)
        if phase.reduce:
            do: Kernel | Exchange = Exchange(kind=ALL_REDUCE, axes=axes, reducer=phase.reduce)
        else:
            buffers = dict(zip(phase.reads, reads, strict=True))
            do = Kernel(op=phase.op, args=bound(phase.args, buffers))
        self.out.add(Work(do=do, reads=reads, writes=(name,), step=step, share=phase.share))


def write_routed(
    out: Writer, step: OperatorStep, statement: Statement, operands: Mapping[str, str], result: str
) -> None:
    """Write the instructions of a node made by `frontends/routes.py`; `operands` are buffers by tensor."""
    ids, by_expert, by_token, others, body, last = statement.args
    pairs, matrices = out.buffers[operands[ids["tensor"]]], out.buffers[operands[by_expert[0]["tensor"]]]
    given = {"axes": [axis for axis in matrices.dims[0] if isinstance(axis, str)]}
    plan = _rows(out, f"{result}.route", pairs, pairs.shape[:1], "i64")
    made = Kernel(op=f"{ROUTE}plan", args=({"tensor": operands[ids["tensor"]]}, matrices.shape[0]), kwargs=given)
    out.add(Work(do=made, reads=(operands[ids["tensor"]],), writes=(plan,)))
    local = {f"w{n}": operands[one["tensor"]] for n, one in enumerate(by_expert)}
    local |= {f"p{n}": operands[one["tensor"]] for n, one in enumerate(others)} | {"ends": plan}
    for number, (one, every) in enumerate(by_token):
        source = operands[one["tensor"]]
        about = out.buffers[source]
        name = _rows(out, f"{result}.sent{number}", pairs, (*pairs.shape[:1], *about.shape[1:]), about.dtype)
        do = Kernel(op=f"{ROUTE}send", args=({"tensor": source}, {"tensor": plan}, every), kwargs=given)
        out.add(Work(do=do, reads=(source, plan), writes=(name,)))
        local[f"u{number}"] = name
    total = sum(_products(line, out, local) for line in body)
    for line in body:
        share = _products(line, out, local) / total if total else 0.0
        name = _rows(out, f"{result}.{line['name']}", pairs, line["shape"], line["dtype"])
        args = tuple(_bound(one, local) for one in line["args"])
        do = Kernel(op=line["op"], args=args, kwargs=_bound(line["kwargs"], local), index=line["index"])
        reads = tensors_in([*args, *do.kwargs.values()])
        out.add(Work(do=do, reads=reads, writes=(name,), step=step if share else None, share=share or 1.0))
        local[line["name"]] = name
    do = Kernel(op=f"{ROUTE}back", args=({"tensor": local[last]}, {"tensor": plan}), kwargs=given)
    out.add(Work(do=do, reads=(local[last], plan), writes=(result,)))


def _rows(out: Writer, name: str, like: Buffer, shape: Any, dtype: str) -> str:
    """Add a buffer with a row for each pair; ranks have as many pairs as rows of `like`."""
    spare = [()] * (len(shape) - 1)
    local = (like.local[0], *shape[1:])
    about = msgspec.structs.replace(
        like, tensor=name, shape=tuple(shape), dims=(like.dims[0], *spare), local=local, dtype=dtype
    )
    return out.add_buffer(name, about)


def _products(line: Mapping[str, Any], out: Writer, local: Mapping[str, str]) -> int:
    """Return the products of a row in a line of the body."""
    return prod(out.buffers[local[line["args"][1]["local"]]].local[1:]) if line["op"] == "routed.product" else 0


def _bound(value: Any, local: Mapping[str, str]) -> Any:
    """Return arguments with names of the body replaced by buffers."""
    if isinstance(value, dict):
        return (
            {"tensor": local[value["local"]]}
            if "local" in value
            else {key: _bound(one, local) for key, one in value.items()}
        )
    return [_bound(one, local) for one in value] if isinstance(value, list | tuple) else value
