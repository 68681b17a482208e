"""`planner trace`: the simulated timeline of one step, as a Chrome trace that Perfetto opens."""

from __future__ import annotations

from pathlib import Path

from click.exceptions import Exit

from planner.io import output
from planner.io.figures import last_digit_s, seconds_text
from planner.io.inputs import measurements, warn_of_doubts
from planner.io.output import SCHEMA_VERSION
from planner.question.cases import Case, case_from_flags, case_of_plan_file, named_case
from planner.question.flags import flags_of_plan
from planner.question.overrides import with_flags
from planner.question.plan_file import refuse_overwrite
from planner.requests.training import Trace
from simulator.legality.rules import is_legal
from simulator.lowering.block_code import Detail
from simulator.lowering.simulation import breakdown_s, drawn_micro_batches, program_length
from simulator.memory.replay import with_memory
from simulator.program.chrome_trace import to_chrome
from topology.codec import JsonObject, to_json, write_text
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


# --- the trace --------------------------------------------------------------------------------------------------------


# Longest timeline in instructions. Half as many take 19 s on one core, 0.6 GiB, and a file of 58 MB (measured).
MAX_INSTRUCTIONS = 1_000_000


def write_trace(case: Case, out: Path, detail: Detail = Detail.LAYER) -> JsonObject:
    """Simulate a step of the plan, write the spans of every rank and stream, and return a summary.

    Raises BadPlan as the simulation does, and UserError for a timeline that is too long.
    """
    question, plan = case.question, case.plan
    micro_batches = drawn_micro_batches(question.model, question.workload, plan)
    _require_short(case, micro_batches)
    simulated = question.simulate(plan, detail=detail, micro_batches=micro_batches)
    run = simulated.run
    trace = with_memory(question, plan, run, micro_batches)
    write_text(out, to_json(to_chrome(trace), indent=None))
    return {
        "schema_version": SCHEMA_VERSION,
        "id": case.id,
        "changed": list(case.changed),
        "out": str(out),
        "detail": str(simulated.detail),
        "micro_batches": plan.micro_batches(question.workload.global_batch_size),
        "drawn_micro_batches": micro_batches,
        "step_s": run.step_s,
        "step": seconds_text(run.step_s, last_digit_s(simulated.estimate.step_s)),
        "ranks": sum(len(c.ranks) for c in run.folding.classes),
        "drawn_ranks": list(run.trace.ranks),
        "spans": len(run.trace.spans),
        "breakdown_s": breakdown_s(run),  # of the spans; flushes of a full allocator are not simulated
    }


def _require_short(case: Case, micro_batches: int) -> None:
    question = case.question
    length = program_length(question.model, question.workload, case.plan, micro_batches=micro_batches)
    if length > MAX_INSTRUCTIONS:
        raise UserError(
            f"the timeline of this step has about {length:.2g} instructions",
            why=f"at most {MAX_INSTRUCTIONS:,} are written, and {micro_batches} micro batches are the fewest that show"
            " it",
            remedy="a smaller --pp: a pipeline takes as many micro batches to show as it has stages, and more",
        )
