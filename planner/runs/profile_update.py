"""Add the operators of a run, as timed in a profiled step, to a profile.

A profile has the times of operators measured alone. A run adds times within a step, and shapes that were never measured
(`simulator.fitting.step_samples`); the report names operators that the step slows down more than others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.runs.run_report import RunReport
from simulator.config.plan import Plan
from simulator.fitting.calibration_fit import standalone_times
from simulator.fitting.step_samples import in_step_ratio, usable
from topology import codec
from topology.catalog.gpus import gpu_kind, match_driver_name
from topology.cluster import Cluster
from topology.errors import BadInput, PlannerError
from topology.profile.profile import Profile, read_profile
from topology.profile.samples import OperatorSample, Provenance
from topology.profile.store import merge, own_provenance, run_name

MAX_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorInStep:
    """An operator of a run: its seconds per call in the step, the seconds expected from its time alone, and calls per
    step.
    """

    name: str
    seconds: float
    expected_s: float
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileUpdate:
    """`in_step_ratio` is the median ratio of operator times in the step to times alone; None if too few are known.

    `rows` are the operators that deviate most from it. `fresh` samples are of shapes that the profile did not have.
    """

    samples: int
    fresh: int
    in_step_ratio: float | None
    rows: tuple[OperatorInStep, ...]


def add_run_to_profile(run: RunReport, path: Path) -> ProfileUpdate:
    """Add the operators of a run to the profile at `path`. Raises BadInput if the GPUs differ."""
    with codec.locked(path):
        return _add(run, path)


def _add(run: RunReport, path: Path) -> ProfileUpdate:
    before = read_profile(path)
    name, provenance = _provenance(run, before)
    samples = _samples(run, name)
    cluster = codec.convert(run.document["cluster"], Cluster, where="the run's cluster")
    alone_times = standalone_times(before, cluster.slowest_kind)
    if alone_times is None:
        raise BadInput(
            f"{path} has no samples of single operators",
            why="times within a step can only be compared with times of the same operators alone",
            remedy="planner calibrate first",
        )
    usable_samples = usable(samples)
    run_ratio = in_step_ratio(usable_samples, alone_times)
    rows: list[OperatorInStep] = []
    for sample in usable_samples:
        expected = alone_times.seconds(sample)
        if expected is not None and run_ratio is not None:
            rows.append(
                OperatorInStep(
                    name=operator_words(sample),
                    seconds=sample.seconds,
                    expected_s=expected * run_ratio,
                    calls=sample.count,
                )
            )
    rows.sort(key=lambda row: -abs(row.seconds - row.expected_s) * row.calls)
    known = {sample.key for sample in before.operators}
    empty = before.with_samples(lambda _: ())
    newer = replace(empty, runs={**before.runs, name: provenance}, operators=tuple(samples))
    merged = merge(before, newer)
    codec.write_text(path, codec.to_json(merged) + "\n")
    fresh = sum(sample.key not in known for sample in samples)
    return ProfileUpdate(samples=len(samples), fresh=fresh, in_step_ratio=run_ratio, rows=tuple(rows[:MAX_ROWS]))


def operator_words(sample: OperatorSample) -> str:
    """Return an operator as text: `matmul forward m 8192 x n 14336 x k 4096`."""
    sizes = " x ".join(f"{axis} {size}" for axis, size in sorted(sample.shape.items()))
    return f"{sample.kind} {sample.direction} {sizes}"


def _samples(run: RunReport, name: str) -> list[OperatorSample]:
    """Return the operator samples of the run. Raises BadInput where it has none."""
    found = run.document.get("operator_samples") or []
    if not found:
        raise BadInput(
            "the run has no operator times by shape", why="it was made without a profiled step, or by an older version"
        )
    return [replace(codec.convert(one, OperatorSample, where="the run's operators"), run=name) for one in found]


def _provenance(run: RunReport, profile: Profile) -> tuple[str, Provenance]:
    """Return the run name and provenance of the samples.

    Raises PlannerError when the software differs from the profile's.
    """
    document = run.document
    _require_same(document, profile)
    found = replace(
        own_provenance(profile),
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
