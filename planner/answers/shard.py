"""Placements of the tensors of a graph, and the collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.io import output
from planner.io.inputs import measurements, read_cluster
from planner.pictures.sharding import sharding_picture
from planner.requests.flag import values_of
from planner.requests.tools import Shard
from planner.sharding.answer import Answer, shard_case
from planner.sharding.backends.dtensor_file import write_dtensor_file
from planner.sharding.frontends.decoder import decoder_case
from planner.sharding.frontends.request import is_request
from planner.sharding.layouts.layout import Layout, make_mesh
from planner.sharding.layouts.loop_domain import loop_text
from planner.sharding.plans.explanation import explain_plan
from planner.sharding.plans.plan import ShardingPlan, TensorMove
from planner.sharding.plans.report import Limits
from planner.sharding.problem.deadline import Deadline
from planner.sharding.problem.problem import ShardingProblem, split_cases
from simulator.config.hf_config import load_model
from topology import codec
from topology.codec import JsonObject
from topology.errors import UserError
from topology.rates.reach import cluster_caveats, require_plannable
from topology.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """The answer of `planner shard`. `rows` are its cases as JSON: placements and collectives, or why there are
    none.
    """

    rows: tuple[JsonObject, ...]

    @property
    def answered(self) -> bool:
        """Whether some case has an answer."""
        return any(row["rejected"] is None for row in self.rows)

    def to_dict(self) -> JsonObject:
        """Return the JSON document of the command."""
        return {"schema_version": output.SCHEMA_VERSION, "cases": list(self.rows)}


def shard(asked: Shard, progress: Callable[[str], None] = lambda _: None) -> Sharded:
    """Return the answer, and write the files that it names. Raises UserError and BadInput."""
    _refuse_unused(asked)
    limits = Limits(Deadline.after(asked.time_limit), None if asked.memory_limit is None else asked.memory_limit * GIB)
    machine = None if asked.cluster is None else read_cluster(asked.cluster, asked.gpus, gpu=asked.gpu)
    if machine is not None:
        require_plannable(machine)
    known = measurements(asked.profile, strict=asked.strict)
    measured = None if machine is None else known.on(machine)
    for doubt in (*cluster_caveats(machine), *known.doubts(machine)) if machine is not None else ():
        output.warn(f"warning: {doubt}")
    if asked.model is not None:
        cases = [_model_case(asked.model, asked)]
    else:
        text, where = codec.read_path_or_stdin(str(asked.file))
        cases = split_cases(codec.parse_json(text, where=where), where=where)
    _check_files(cases, asked)
    rows = []
    for number, case in enumerate(cases):
        progress(f"case {number + 1} of {len(cases)}")
        row, found = shard_case(case, number, machine, measured, limits=limits)
        if isinstance(found, Answer):
            _write_captured(found, asked)
        if found is not None and asked.listing:
            row["listing"] = program_text(found.problem, found.plan)
        if found is not None and asked.explain:
            explained = explain_plan(found.problem, found.plan, machine, measured)
            row["explanations"] = [codec.to_builtins(one) for one in explained]
        if found is not None and asked.picture is not None:
            codec.write_text(asked.picture, sharding_picture(found.problem, found.plan, title=row["id"]).text())
        rows.append(row)
    return Sharded(rows=tuple(rows))


def _refuse_unused(asked: Shard) -> None:
    """Raise UserError if an option refers to something that is not named, or if cases are named twice or not at all."""
    stated = {name for name, value in values_of(asked).items() if value is not None}
    if "model" not in stated and stated & {"layers", "mesh", "seq_len", "micro_batch"}:
        raise UserError(
            "--layers, --mesh, --seq-len and --micro-batch are about a model", remedy="name it with --model"
        )
    if ("file" in stated) == ("model" in stated):
        raise UserError("shard takes a FILE or --model", remedy="one of the two")
    if "cluster" in stated:
        return
    if stated & {"gpus", "gpu", "profile"}:
        raise UserError("--gpus, --gpu and --profile are about a machine", remedy="name it with --cluster")
    if stated & {"time_limit", "memory_limit"}:
        raise UserError(
            "--time-limit and --memory-limit need --cluster",
            why="without a machine the bytes that ranks send decide alone",
            remedy="--cluster dgx-h100, say",
        )
    if "model" in stated:
        raise UserError(
            "--model needs --cluster",
            why="the placements of its layers are chosen by their time on a machine",
            remedy="--cluster dgx-h100, say",
        )


def _model_case(model: str, asked: Shard) -> JsonObject:
    """Return the case of a model's layers. Raises UserError and BadInput."""
    sizes: dict[str, int] = {}
    for part in (asked.mesh or "").split(","):
        name, _, size = part.partition("=")
        if not (size.isascii() and size.isdigit() and len(size) < 8) or name in sizes:
            raise UserError(f"--mesh {str(asked.mesh)[:60]} is no mesh", remedy="axes with their sizes: data=8,model=8")
        sizes[name] = int(size)
    ranks = make_mesh(list(sizes), list(sizes.values())).ranks
    return decoder_case(
        load_model(model), sizes, layers=asked.layers, batch=asked.micro_batch or ranks, seq_len=asked.seq_len or 4096
    )


def _check_files(cases: Sequence[Mapping[str, Any]], asked: Shard) -> None:
    """Raise UserError if a file is requested that these cases do not produce."""
    for flag, path in (("--program", asked.program), ("--python", asked.python)):
        if path is not None and (len(cases) != 1 or not is_request(cases[0])):
            raise UserError(f"{flag} is about one captured graph", remedy="a file with a graph, from executor.sharding")
    if asked.picture is not None and len(cases) != 1:
        raise UserError(f"--picture is about one case, and there are {len(cases)}", remedy="a file with one case")


def _write_captured(answer: Answer, asked: Shard) -> None:
    if asked.program is not None:
        codec.write_text(asked.program, codec.to_json(answer.written.program, indent=None))
    if asked.python is not None:
        if answer.request.stages is not None:
            raise UserError("pipeline stages are no DTensor placements", remedy="--program, which the executor runs")
        graph = answer.request.graph
        codec.write_text(asked.python, write_dtensor_file(answer.captured, graph, answer.plan, title=answer.request.id))


def program_text(problem: ShardingProblem, plan: ShardingPlan) -> str:
    """Return the program: `y = linear(a, w): [t, h, r{d}]`, then `all_reduce over d: y [t, h]`."""

    def domain(name: str, layout: Layout) -> str:
        tensor = problem.tensors[name]
        return loop_text(layout, tensor.shape, problem.mesh, tensor.axes)

    lines: list[str] = []
    shown: set[str] = set()
    for step in plan.steps:
        needed = [step.tensor] if isinstance(step, TensorMove) else [name for name, _ in step.option.operands]
        for name in needed:
            if name in problem.inputs and name not in shown:
                shown.add(name)
                lines.append(f"{name}: {domain(name, plan.choice.layouts[name])}")
        if isinstance(step, TensorMove):
            joined = not step.collectives and any(one.collectives for one in step.steps)
            kinds = [one.kind for one in step.collectives] or ["in the next buffer" if joined else "local slice"]
            for kind in dict.fromkeys(kinds):
                times = f"{kinds.count(kind)} x " if kinds.count(kind) > 1 else ""
                over = f" over {step.collectives[0].mesh_dim}" if step.collectives else ""
                lines.append(f"    {times}{kind}{over}: {step.tensor} {domain(step.tensor, step.target)}")
            continue
        operator = problem.operators[step.operator]
        name = operator.result.name
        lines += [f"    {one.kind} over {one.mesh_dim}, {one.note}" for one in step.collectives]
        lines.append(f"{name} = {operator.text}: {domain(name, step.option.result)}")
    return "\n".join(lines)
