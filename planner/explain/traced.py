"""One plan, simulated and written as a Chrome trace."""

from __future__ import annotations

from pathlib import Path

from planner.io.figures import last_digit_s, seconds_text
from planner.io.output import SCHEMA_VERSION
from planner.question.cases import Case
from simulator.lowering.block_code import Detail
from simulator.lowering.simulation import breakdown_s, drawn_micro_batches, program_length
from simulator.memory.over_time import with_memory
from simulator.program.chrome_trace import to_chrome
from topology.codec import JsonObject, to_json, write_text
from topology.errors import UserError

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
