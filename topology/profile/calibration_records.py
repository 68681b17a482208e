"""Join the records of a calibration, complete or interrupted, into a profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from topology.codec import JsonObject, convert
from topology.errors import BadInput
from topology.profile.measurement import GroupSample
from topology.profile.profile import SAMPLE_LISTS, CollectiveSample, Profile, check_profile
from topology.profile.samples import Provenance
from topology.profile.store import run_name

_HEAD = ("machine", "gpu", "device", "gpus", "driver", "versions", "taken_at", "command")


# Sample types by the `kind` of their records, such as `operator` for OperatorSample. Collectives have `group` records.
RECORDS: dict[Any, type] = {
    sample.__name__.removesuffix("Sample").lower(): sample for sample in SAMPLE_LISTS if sample is not CollectiveSample
}


def profile_from_records(records: Iterable[JsonObject]) -> Profile:
    """Return the profile of one calibration. Each record has a `kind`: `header`, `group`, `missing` or one of
    `RECORDS`.

    Raises BadInput for a record that is none of these, a sample that cannot be true, or when no header was written.
    """
    head: JsonObject = {}
    found: dict[type, list[Any]] = {kind: [] for kind in SAMPLE_LISTS}
    missing: list[str] = []
    for number, record in enumerate(records):
        where, kind = f"record {number}", record.get("kind")
        if kind == "header":
            # A later header adds what its part of the calibration knows, such as the version of NCCL.
            versions = {**head.get("versions", {}), **record.get("versions", {})}
            head = {**head, **{k: v for k, v in record.items() if k in _HEAD}, "versions": versions}
        elif kind in RECORDS:
            found[RECORDS[kind]].append(convert(record.get("sample"), RECORDS[kind], where=where))
        elif kind == "group":
            group = convert({k: v for k, v in record.items() if k != "kind"}, GroupSample, where=where)
            if not group.alongside:
                found[CollectiveSample].append(group.sample)
        elif kind == "missing":
            missing.append(str(record.get("what", "something")))
        else:
            raise BadInput(f"{where} is of kind {kind!r}", why="this version does not know it")
    if "gpu" not in head:
        raise BadInput("the calibration wrote no header", why="it stopped before it had found a device")
    run = convert(head, Provenance, where="header")
    name = run_name(run)
    named: JsonObject = {
        SAMPLE_LISTS[kind]: tuple(replace(sample, run=name) for sample in samples) for kind, samples in found.items()
    }
    profile = Profile(
        machine=run.machine,
        gpu=run.gpu,
        driver=run.driver,
        versions=run.versions,
        taken_at=run.taken_at,
        runs={name: run},
        **named,
        missing=tuple(dict.fromkeys(missing)),
    )
    check_profile(profile, where="the calibration")
    return profile
