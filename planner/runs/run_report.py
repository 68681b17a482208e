"""The full report of a run: quantities against the prediction, terms, collectives, settings that took effect,
timelines.

A run is a directory that `planner apply` wrote, or an id of the store. Timelines need the directory, as the store has
only the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.runs import comparison, runs_store
from planner.runs.run_document import verify_run
from simulator.analytical.scenario import Scenario
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.fitting.calibrations import Calibrations
from simulator.lowering.simulation import simulate_plan
from simulator.program.chrome_trace import from_kineto
from simulator.program.trace import Trace
from topology import codec
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import PlannerError
from topology.units import MIB

MAX_TRACE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run and its timelines. `notes`: what is missing, and why."""

    document: JsonObject
    directory: Path | None
    simulated: Trace | None
    measured: tuple[Trace, ...]  # one per rank, in order
    notes: tuple[str, ...]

    @property
    def slowest(self) -> Trace | None:
        """Return the measured timeline of the rank with the most compute."""
        return max(self.measured, key=lambda t: (t.busy_s(t.ranks[0], "compute"), -t.ranks[0]), default=None)

    def terms(self) -> tuple[comparison.Term, ...]:
        slowest = self.slowest
        if self.simulated is None or slowest is None or not any(slowest.of(category="compute")):
            return ()
        return comparison.compare_terms(self.simulated, slowest)

    def answer(self, tolerance_percent: float | None) -> JsonObject:
        """Return the report as data for JSON; `within` is None if nothing can be compared."""
        document, terms = self.document, self.terms()
        rows = comparison.quantities(document)
        comparison_ = comparison.compare(document, tolerance_percent)
        slowest = self.slowest
        return {
            "schema_version": 1,
            "id": document.get("id") or runs_store.run_id(document),
            "directory": str(self.directory) if self.directory else None,
            "status": document["status"],
            "complete": document.get("complete"),
            "taken_at": document["taken_at"],
            "model": document["model"]["name"],
            "plan": document["plan"],
            "quantities": [
                {**codec.to_builtins(row), "source": row.source or None, "error": row.error} for row in rows
            ],
            "terms": [{**codec.to_builtins(term), "difference_s": term.difference_s} for term in terms],
            "blame": comparison.main_cause(terms) if terms else None,
            "collectives": {
                "predicted": comparison.collectives(self.simulated) if self.simulated else {},
                "measured": comparison.collectives(slowest) if slowest else {},
            },
            "effects": document.get("effects") or [],
            "gpus": document.get("gpus") or [],
            "tolerance_percent": tolerance_percent,
            "within": comparison_["within"] if comparison_ else None,
            "notes": list(self.notes),
        }


def load_run(name: str, *, simulate: bool = True, measured: Calibrations | None = None) -> RunReport:
    """Return the report of a run: `name` is its directory, its `run.json`, or an id of the store.

    The predicted timeline is simulated with the calibrations `measured`, which are not part of a run. Raises BadInput
    when there is no such run.
    """
    document, directory = _document(name)
    notes: list[str] = []
    traces: list[Trace] = []
    if directory is not None:
        for path in sorted((directory / "records").glob("rank*.trace.json"), key=_rank_of):
            try:
                text = codec.read_text(path, max_bytes=MAX_TRACE_BYTES)
                traces.append(from_kineto(codec.parse_json(text, where=str(path)), rank=_rank_of(path)))
            except PlannerError as error:
                notes.append(f"{path.name} is left out: {error.what}")
    traces = [trace for trace in traces if trace.spans]
    if not traces:
        notes.append("no measured timeline: " + ("the run has none" if directory else "its directory does not exist"))
    elif not any(any(trace.of(category="compute")) for trace in traces):
        notes.append("the measured timeline is of CPU operators, so there are no terms to compare")
    simulated = None
    if simulate:
        simulated, why = _simulated(document, measured)
        notes += [why] if why else []
        notes += measured.all_doubts() if measured is not None else []
    return RunReport(
        document=document, directory=directory, simulated=simulated, measured=tuple(traces), notes=tuple(notes)
    )


def _document(name: str) -> tuple[JsonObject, Path | None]:
    path = Path(name)
    file = path / "run.json" if path.is_dir() else path
    directory: Path | None = file.parent.resolve()
    if file.is_file():
        document = codec.read_json(file)
    else:
        document = runs_store.read_run(name)
        key = runs_store.run_id(document)
        places = [Path(run.directory) for run in runs_store.list_runs() if run.id == key]
        # Another run may have been made in the same directory since.
        same = [at for at in places if (at / "run.json").is_file() and codec.read_json(at / "run.json") == document]
        directory = same[0] if same else None
    return verify_run(document, where=name), directory


def _rank_of(path: Path) -> int:
    digits = "".join(c for c in path.name.split(".")[0] if c.isdigit())
    return int(digits or 0)


def _simulated(document: Mapping[str, Any], measured: Calibrations | None) -> tuple[Trace | None, str]:
    """Return the predicted timeline, simulated from the report, or the reason why there is none."""
    if not document.get("predicted") or not document.get("cluster"):
        return None, "no predicted timeline: only runs of saved plans on the planned GPUs are predicted"
    try:
        cluster = codec.convert(document["cluster"], Cluster, where="the run's cluster")
        simulated = simulate_plan(
            Scenario(
                model=codec.convert(document["model"], Model, where="the run's model"),
                cluster=cluster,
                workload=codec.convert(document["workload"], Workload, where="the run's workload"),
                runtime=codec.convert(document["runtime"], Runtime, where="the run's runtime"),
                calibration=measured.on(cluster) if measured is not None else None,
            ),
            codec.convert(document["plan"], Plan, where="the run's plan"),
        )
    except (PlannerError, ValueError) as error:
        return None, f"no predicted timeline: {error}"
    return simulated.run.trace, ""
