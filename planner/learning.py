"""What a run teaches a profile: its operators by shape, as they were in a profiled step.

A profile says what operators take alone. A run shows them in a step, and shapes that nobody has measured alone; added
to the profile they are known from then on (simulator.step_samples), and the report says which of them take longer in
the step than the others do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.run_report import RunReport
from simulator.calibration_fit import alone_of, calibrated
from simulator.plan import Plan
from simulator.step_samples import pace, usable
from topology import codec
from topology.cluster import Cluster
from topology.errors import BadInput, PlannerError
from topology.gpus import gpu_kind, match_driver_name
from topology.profile import Profile, read_profile
from topology.profile_store import head, merge, run_name
from topology.samples import OperatorSample, Provenance

SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """`pace` is the time in the step over the time alone, of the median operator; None where too few are known.

    `rows` are the operators that are furthest from it: name, seconds in the step, seconds expected, calls.
    """

    samples: int
    fresh: int
    pace: float | None
    rows: tuple[dict[str, Any], ...]


def learn(run: RunReport, path: Path) -> Lesson:
    """Add the operators of a run to the profile at `path`. Raises BadInput where the two do not go together."""
    before = read_profile(path)
    name, provenance = _provenance(run, before)
    samples = _samples(run, name)
    cluster = codec.convert(run.document["cluster"], Cluster, where="the run's cluster")
    calibration = calibrated(before, cluster)
    if calibration is None:
        raise BadInput(
            f"{path} holds no operators measured alone",
            why="a time inside a step says little without the same operator outside of it",
            remedy="planner calibrate first",
        )
    alone = alone_of(calibration)
    seen = usable(samples)
    by = pace(seen, alone)
    rows: list[dict[str, Any]] = []
    for sample in seen:
        expected = alone.seconds(sample)
        if expected is not None and by is not None:
            rows.append(
                {
                    "name": operator_words(sample),
                    "seconds": sample.seconds,
                    "expected_s": expected * by,
                    "calls": sample.count,
                }
            )
    rows.sort(key=lambda row: -abs(row["seconds"] - row["expected_s"]) * row["calls"])
    known = {sample.key for sample in before.operators}
    newer = replace(
        before,
        runs={**before.runs, name: provenance},
        collectives=(),
        operators=tuple(samples),
        host=(),
        contention=(),
        layers=(),
        overlap=(),
    )
    whole = merge(before, newer)
    codec.write_text(path, codec.to_json(whole) + "\n")
    fresh = sum(sample.key not in known for sample in samples)
    return Lesson(samples=len(samples), fresh=fresh, pace=by, rows=tuple(rows[:SHOWN]))


def operator_words(sample: OperatorSample) -> str:
    """Return a sample in words: `matmul forward m 8192 x n 14336 x k 4096`."""
    sizes = " x ".join(f"{axis} {size}" for axis, size in sorted(sample.shape.items()))
    return f"{sample.kind} {sample.direction} {sizes}"


def _samples(run: RunReport, name: str) -> list[OperatorSample]:
    """Return the run's samples. Raises BadInput where it left none."""
    found = run.document.get("operator_samples") or []
    if not found:
        raise BadInput(
            "the run left no operators by shape",
            why="its profiled step was left out, or it was made before there were any",
        )
    return [replace(codec.convert(one, OperatorSample, where="the run's operators"), run=name) for one in found]


def _provenance(run: RunReport, profile: Profile) -> tuple[str, Provenance]:
    """Return where the run's samples are from, under the profile's software. Raises PlannerError when it is another."""
    document = run.document
    _require_same(document, profile)
    found = replace(
        head(profile),
        machine=str((document.get("cluster") or {}).get("name", profile.machine)),
        gpus=codec.convert(document["plan"], Plan, where="the run's plan").gpus,
        taken_at=str(document["taken_at"]),
        command="planner apply",
    )
    return run_name(found), found


def _require_same(document: Mapping[str, Any], profile: Profile) -> None:
    versions = document.get("versions") or {}
    device = str(versions.get("device", ""))
    kind = match_driver_name(device)
    if kind is None or kind.name != gpu_kind(profile.gpu).name:
        raise BadInput(f"the run was on {device or 'an unknown device'}, the profile is of {profile.gpu}")
    ran, measured = (
        str(text).partition("+")[0] for text in (versions.get("torch", ""), profile.versions.get("torch", ""))
    )
    if measured and ran != measured:
        raise PlannerError(
            f"the run was under torch {ran}, the profile under {measured}",
            why="kernels differ by version",
            remedy="calibrate again under the version that runs",
        )
