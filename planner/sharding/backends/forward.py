"""A plan's steps as instructions on two streams: kernels on a rank's own pieces, and exchanges between ranks.

Every instruction waits for the events of what it reads, so a gather runs beside a product that does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.sharding.backends.beside import write_beside
from planner.sharding.backends.chunks import Site
from planner.sharding.backends.phases import Phase, phases
from planner.sharding.backends.works import Work, Writer, bound, describe, primitive
from planner.sharding.frontends.rules.statement import Statement
from planner.sharding.layouts.collectives import ALL_GATHER, ALL_REDUCE
from planner.sharding.layouts.layout import Layout
from planner.sharding.plans.plan import OperatorStep, ShardingPlan, TensorMove
from planner.sharding.problem.problem import ShardingProblem
from simulator.sharded.program import Exchange, Kernel
from topology.errors import Infeasible


@dataclass(slots=True)
class ForwardWriter:
    """Writes the forward pass of a plan. `versions` has the buffer of every tensor in every layout it is in."""

    problem: ShardingProblem
    plan: ShardingPlan
    statements: Mapping[str, Statement]
    out: Writer
    chunks: Mapping[str, tuple[Site, int | str]] = field(
        default_factory=dict
    )  # by result: products that run in so many chunks
    versions: dict[tuple[str, Layout], str] = field(default_factory=dict)

    def write(self) -> None:
        """Write all steps. Raises Infeasible where a rank's pieces are not equal, or stages are given."""
        if self.problem.stages is not None or self.problem.routed:
            raise Infeasible("pipeline stages and routed tokens are not run by this back end", remedy="leave them out")
        for name in self.problem.inputs:
            self.version(name, self.plan.choice.layouts[name])
        for step in self.plan.steps:
            if isinstance(step, TensorMove):
                self._move(step)
            else:
                self._operator(step)

    def version(self, tensor: str, layout: Layout) -> str:
        """Return the buffer of `tensor` in `layout`, a new one where there is none yet."""
        key = (tensor, layout)
        if key not in self.versions:
            number = sum(name == tensor for name, _ in self.versions)
            about = self.problem.tensors[tensor]
            self.versions[key] = self.out.add_buffer(
                f"{tensor}.{number}" if number else tensor,
                describe(tensor, about.shape, about.dtype, layout, self.out.mesh),
            )
        return self.versions[key]

    def _move(self, move: TensorMove) -> None:
        here, steps = move.source, move.steps
        site, _ = self.chunks.get(move.consumer, (None, 1))
        if site is not None and site.exchange == ALL_GATHER and site.move is move:
            steps = steps[:-1]  # the last one runs in chunks, with the product
        for step in steps:
            if (move.tensor, step.after) not in self.versions:
                source = self.version(move.tensor, here)
                target = self.version(move.tensor, step.after)
                self.out.add(Work(do=primitive(step, here, source, self.out.mesh), reads=(source,), writes=(target,)))
            here = step.after

    def _operator(self, step: OperatorStep) -> None:
        operator = self.problem.operators[step.operator]
        statement = self.statements[operator.result.name]
        if operator.result.name in self.chunks:
            write_beside(self, step, statement, *self.chunks[operator.result.name])
            return
        operands = {name: self.versions[name, layout] for name, layout in step.option.operands}
        result = self.version(operator.result.name, step.option.result)
        if not step.collectives:
            kernel = Kernel(
                op=statement.op,
                args=bound(statement.args, operands),
                kwargs=bound(statement.kwargs, operands),
                index=statement.index,
            )
            self.out.add(Work(do=kernel, reads=tuple(operands.values()), writes=(result,), step=step))
            return
        for phase in phases(statement, operator, step):
            self._phase(phase, step, operands, result)

    def _phase(self, phase: Phase, step: OperatorStep, operands: dict[str, str], result: str) -> None:
        """Write one part of an operator that exchanges statistics: a kernel, or the reduction of its result."""
        name = result if not phase.name else f"{result}.{phase.name}"
        if phase.name and phase.layout is not None:
            self.out.add_buffer(name, describe(name, phase.shape, phase.dtype, phase.layout, self.out.mesh))
        reads = tuple(operands.get(one) or f"{result}.{one}" for one in phase.reads)
        if phase.reduce:
            axes = tuple(step.collectives[0].axes)
            do: Kernel | Exchange = Exchange(kind=ALL_REDUCE, axes=axes, reducer=phase.reduce)
        else:
            buffers = dict(zip(phase.reads, reads, strict=True))
            do = Kernel(op=phase.op, args=bound(phase.args, buffers))
        self.out.add(Work(do=do, reads=reads, writes=(name,), step=step, share=phase.share))
