"""Everything about one run: its quantities against the prediction, terms, collectives, what took effect, timelines.

A run is a directory that `planner apply` wrote, or an id of the store. Timelines need the directory: the store keeps
the report alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import comparison, runs_store
from simulator.chrome import from_kineto
from simulator.model import Model
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.trace import Trace
from simulator.workload import Workload
from topology import codec
from topology.cluster import Cluster
from topology.errors import BadInput, PlannerError
from topology.profile import Profile

MAX_TRACE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """`notes` say what is not there and why."""

    document: dict[str, Any]
    directory: Path | None
    simulated: Trace | None
    measured: tuple[Trace, ...]  # one a rank, in order of rank
    notes: tuple[str, ...]

    @property
    def slowest(self) -> Trace | None:
        """Return the measured timeline of the rank that computes longest."""
        return max(self.measured, key=lambda t: (t.busy_s(t.ranks[0], "compute"), -t.ranks[0]), default=None)

    def terms(self) -> tuple[comparison.Term, ...]:
        slowest = self.slowest
        if self.simulated is None or slowest is None or not any(slowest.of(category="compute")):
            return ()
        return comparison.compare_terms(self.simulated, slowest)

    def answer(self, tolerance_percent: float | None) -> dict[str, Any]:
        """Return the report as JSON data; `within` is None where nothing could be compared."""
        document, terms = self.document, self.terms()
        rows = comparison.quantities(document)
        judged = comparison.compare(document, tolerance_percent)
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
                {
                    "name": row.name,
                    "unit": row.unit,
                    "predicted": row.predicted,
                    "low": row.low,
                    "high": row.high,
                    "source": row.source or None,
                    "measured": row.measured,
                    "error": row.error,
                }
                for row in rows
            ],
            "terms": [
                {
                    "name": term.name,
                    "predicted_s": term.predicted_s,
                    "measured_s": term.measured_s,
                    "difference_s": term.difference_s,
                }
                for term in terms
            ],
            "blame": comparison.blame(terms) if terms else None,
            "collectives": {
                "predicted": comparison.collectives(self.simulated) if self.simulated else {},
                "measured": comparison.collectives(slowest) if slowest else {},
            },
            "effects": document.get("effects") or [],
            "gpus": document.get("gpus") or [],
            "tolerance_percent": tolerance_percent,
            "within": judged["within"] if judged else None,
            "notes": list(self.notes),
        }


def load_run(name: str, *, simulate: bool = True, profile: Profile | None = None) -> RunReport:
    """Return the report of a run: `name` is its directory, its `run.json`, or an id of the store.

    The predicted timeline is simulated with `profile`, which a run does not keep. Raises BadInput when there is no such run.
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
        notes.append("no measured timeline: " + ("the run left none" if directory else "its directory is not there"))
    elif not any(any(trace.of(category="compute")) for trace in traces):
        notes.append("the measured timeline is of a CPU's operators: it has no terms to compare")
    simulated = None
    if simulate:
        simulated, why = _simulated(document, profile)
        notes += [why] if why else []
    return RunReport(
        document=document, directory=directory, simulated=simulated, measured=tuple(traces), notes=tuple(notes)
    )


def _document(name: str) -> tuple[dict[str, Any], Path | None]:
    path = Path(name)
    file = path / "run.json" if path.is_dir() else path
    directory: Path | None = file.parent.resolve()
    if file.is_file():
        document = codec.read_json(file)
    else:
        document = runs_store.read_run(name)
        kept = next(run for run in runs_store.list_runs() if run.id == runs_store.run_id(document))
        found = Path(kept.directory)
        # Another run may have been made in the same place since.
        same = (found / "run.json").is_file() and codec.read_json(found / "run.json") == document
        directory = found if same else None
    if not isinstance(document, dict) or not {"status", "plan", "model", "measured", "taken_at"} <= set(document):
        raise BadInput(f"{name} is not the report of a run", remedy="planner apply makes one; planner runs lists them")
    return document, directory


def _rank_of(path: Path) -> int:
    digits = "".join(c for c in path.name.split(".")[0] if c.isdigit())
    return int(digits or 0)


def _simulated(document: Mapping[str, Any], profile: Profile | None) -> tuple[Trace | None, str]:
    """Return the timeline of the prediction, simulated from what the report holds, or why there is none."""
    from simulator.simulation import simulate_plan  # noqa: PLC0415 - SimPy is for timelines alone

    if not document.get("predicted") or not document.get("cluster"):
        return None, "no predicted timeline: the run was not predicted"
    try:
        simulated = simulate_plan(
            codec.convert(document["model"], Model, where="the run's model"),
            codec.convert(document["cluster"], Cluster, where="the run's cluster"),
            codec.convert(document["workload"], Workload, where="the run's workload"),
            codec.convert(document["plan"], Plan, where="the run's plan"),
            codec.convert(document["runtime"], Runtime, where="the run's runtime"),
            profile=profile,
        )
    except (PlannerError, ValueError) as error:
        return None, f"no predicted timeline: {error}"
    return simulated.run.trace, ""
