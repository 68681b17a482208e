"""Samples of a profile from a serving run: steps, all-reduces, and the host's time between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.serving.measured.asked_run import ENGINE
from simulator.config.model import Model
from topology import codec
from topology.catalog.gpus import gpu_kind, match_driver_name
from topology.codec import JsonObject
from topology.errors import BadInput
from topology.profile.profile import CollectiveSample, Profile, check_profile, read_profile
from topology.profile.samples import Provenance, ServingSample
from topology.profile.store import merge, run_name

LEAST_STEPS = 20  # steps of a load; fewer say little of the host
BYTES = 2  # bytes of a number in an all-reduce


def samples_of(document: Mapping[str, Any]) -> tuple[list[ServingSample], list[CollectiveSample]]:
    """Return the samples of an executor's report. Raises BadInput for a report that is not one."""
    request = document["request"]
    model = codec.to_builtins(codec.convert(request["model"], Model, where="the run's model"))
    common = {"engine": ENGINE, "model": model, "tp": request["tp"]}
    found = [
        ServingSample(
            **common,
            phase=step["phase"],
            batch=step["batch"],
            context=step["context"],
            all_reduce=step["all_reduce"],
            seconds=step["seconds"],
            queued_s=step["queued_s"],
            issued_s=step.get("issued_s", 0.0),
        )
        for step in document["steps"]
    ]
    sums = document.get("sums", ())
    found += [
        ServingSample(
            **common, phase="all_reduce", batch=one["tokens"], all_reduce=one["all_reduce"], seconds=one["seconds"]
        )
        for one in sums
    ]
    collectives = [
        CollectiveSample(
            op="all_reduce",
            ranks=one["tp"],
            nodes=1,
            nbytes=BYTES * one["tokens"] * model["hidden"],
            time_s=one["seconds"],
            launch="graph",
        )
        for one in sums
        if one["all_reduce"] == "nccl"
    ]
    return found + [ServingSample(**common, **host) for host in _between(document)], collectives


def _between(document: Mapping[str, Any]) -> Iterator[JsonObject]:
    for load in document["loads"]:
        host = load.get("host") or {}
        if host.get("steps", 0) >= LEAST_STEPS and host["seconds"] > 0:
            yield {
                "phase": "host",
                "batch": host["answers"] / host["steps"],
                "seconds": host["seconds"] / host["steps"],
                "count": host["steps"],
            }


def add_to_profile(document: Mapping[str, Any], path: Path) -> int:
    """Add a run's samples to the profile at `path`, which is created if it does not exist; return how many.

    Raises BadInput if the GPUs differ, or if the run was not on a GPU.
    """
    versions: Mapping[str, Any] = next((note for note in document.get("notes", ()) if note["kind"] == "versions"), {})
    device = str(versions.get("device", ""))
    kind = match_driver_name(device)
    if kind is None:
        raise BadInput(
            f"the run was on {device or 'an unknown device'}, which is no GPU of the catalogue",
            why="a profile is of one kind of GPU",
        )
    steps, collectives = samples_of(document)
    provenance = Provenance(
        machine=kind.name,
        gpu=kind.name,
        gpus=int(document["request"]["tp"]),
        versions={"torch": str(versions.get("torch", ""))},
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command="planner apply",
    )
    name = run_name(provenance)
    with codec.locked(path):
        before = read_profile(path) if path.is_file() else None
        if before is not None and gpu_kind(before.gpu).name == kind.name:  # as the profile spells it
            provenance = replace(provenance, gpu=before.gpu, machine=before.machine, driver=before.driver)
            name = run_name(provenance)
        newer = Profile(
            machine=provenance.machine,
            gpu=provenance.gpu,
            driver=provenance.driver,
            versions=provenance.versions if before is None else before.versions,
            taken_at=provenance.taken_at,
            runs={name: provenance},
            serving=tuple(replace(sample, run=name) for sample in steps),
            collectives=tuple(replace(sample, run=name) for sample in collectives),
        )
        merged = newer if before is None else merge(before, newer)
        check_profile(merged, where=str(path))
        codec.write_text(path, codec.to_json(merged) + "\n")
    return len(steps) + len(collectives)
