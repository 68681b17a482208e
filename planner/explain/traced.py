"""One plan, simulated and written as a Chrome trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.io.figures import last_digit_s, seconds_text
from planner.io.output import SCHEMA_VERSION
from planner.question.cases import Case
from simulator.lowering.block_code import Detail
from simulator.lowering.simulation import breakdown_s
from simulator.program.chrome_trace import to_chrome
from topology.codec import to_json, write_text


def write_trace(case: Case, out: Path, detail: Detail | None = None) -> dict[str, Any]:
    """Simulate a step of the plan, write what every rank and stream does, and return what was written.

    Raises BadPlan as the simulation does.
    """
    simulated = case.question.simulate(case.plan, detail=detail)
    run = simulated.run
    write_text(out, to_json(to_chrome(run.trace), indent=None))
    return {
        "schema_version": SCHEMA_VERSION,
        "id": case.id,
        "changed": list(case.changed),
        "out": str(out),
        "detail": str(simulated.detail),
        "step_s": run.step_s,
        "step": seconds_text(run.step_s, last_digit_s(simulated.estimate.step_s)),
        "ranks": sum(len(c.ranks) for c in run.folding.classes),
        "drawn_ranks": list(run.trace.ranks),
        "spans": len(run.trace.spans),
        "breakdown_s": breakdown_s(run),  # of the spans: a full allocator is not simulated
    }
