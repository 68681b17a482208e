"""`planner trace`: the simulated timeline of one step, as a Chrome trace that Perfetto opens."""

from __future__ import annotations

from click.exceptions import Exit

from planner.explain.traced import write_trace
from planner.io import output
from planner.io.inputs import measurements, warn_of_doubts
from planner.question.cases import case_from_flags, case_of_plan_file, named_case
from planner.question.flags import flags_of_plan
from planner.question.overrides import with_flags
from planner.question.plan_file import refuse_overwrite
from planner.requests.training import Trace
from simulator.legality.rules import is_legal
from simulator.lowering.block_code import Detail
from topology.errors import UserError


def trace(asked: Trace) -> None:
    """Print what `planner trace` answers."""
    if asked.case is not None and asked.plan is not None:
        raise UserError("--case and --plan exclude each other", remedy="give one of them")
    refuse_overwrite(asked.out, force=asked.force)
    flags, measured = flags_of_plan(asked.stated), measurements(asked.profile, strict=asked.strict)
    if asked.plan is not None:
        loaded = with_flags(case_of_plan_file(asked.plan, measured), flags, measured)
    elif asked.case is not None:
        loaded = with_flags(named_case(asked.case, asked.case_id, measured), flags, measured)
    else:
        loaded = case_from_flags(flags, measured)
    if asked.detail is not None and asked.detail not in set(Detail):
        raise UserError(f"--detail {asked.detail!r} is unknown", why=f"known: {', '.join(Detail)}")
    warn_of_doubts(measured)
    problems = loaded.question.problems(loaded.plan)
    if not is_legal(problems):
        for problem in problems:
            output.warn(problem.message)
        raise Exit(3)
    written = write_trace(loaded, asked.out, Detail(asked.detail) if asked.detail else Detail.LAYER)
    if asked.json:
        output.emit_json(written)
        return
    for line in loaded.changed:
        print(f"changed: {line}")
    drawn, every = written["drawn_micro_batches"], written["micro_batches"]
    some = f"; {drawn} of its {every} micro batches are drawn, as the others repeat them" if drawn < every else ""
    print(
        f"{asked.out}: {written['spans']:,} spans of {len(written['drawn_ranks'])} of {written['ranks']} ranks, "
        f"{written['detail']} by {written['detail']}, of a step of {written['step']}{some}"
    )
