"""Merging profiles, and the store: one profile file per GPU model in the user's data folder.

Samples are identified by what they measured *and* by the software (GPU, driver, library versions), so samples of a
newer driver are kept in addition to the older ones, and `current_samples` selects those that apply. The same
measurement on the same software replaces the older sample. Files in the store are never deleted: one that cannot be
read is set aside, one of a newer release is left alone. A lock makes writers take turns, so none loses a sample.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import platformdirs

from topology import codec
from topology.codec import JsonObject, convert
from topology.errors import BadInput, NewerSchema
from topology.profile.measurement import GroupSample
from topology.profile.profile import (
    PROFILE_SCHEMA_VERSION,
    SAMPLE_LISTS,
    CollectiveSample,
    Profile,
    check_profile,
    read_profile,
)
from topology.profile.samples import Provenance

STORE_VARIABLE = "MESHWRIGHT_DATA"
_HEAD = ("machine", "gpu", "device", "gpus", "driver", "versions", "taken_at", "command")


# Sample types by the `kind` of their records, such as `operator` for OperatorSample. Collectives have `group` records.
RECORDS: dict[Any, type] = {
    sample.__name__.removesuffix("Sample").lower(): sample for sample in SAMPLE_LISTS if sample is not CollectiveSample
}


class _Sample(Protocol):
    @property
    def key(self) -> tuple[Any, ...]: ...

    @property
    def run(self) -> str: ...


S = TypeVar("S", bound=_Sample)

# Libraries whose version changes which kernels run. Others in `Provenance.versions` are informative only.
KERNEL_LIBRARIES = ("torch", "cuda", "nccl", "triton", "cudnn", "torchtitan")


def run_name(provenance: Provenance) -> str:
    """Return the name by which samples refer to `provenance`: a hash of its content, the same on any machine."""
    return codec.fingerprint(provenance)


def software_key(provenance: Provenance) -> tuple[Hashable, ...]:
    """Return what a kernel's time depends on besides its shape: GPU, driver and library versions."""
    # The build suffix after a plus sign (2.9.0+cu128) is dropped: not every source states it.
    versions = tuple(provenance.versions.get(name, "").partition("+")[0] for name in KERNEL_LIBRARIES)
    return provenance.gpu.casefold(), provenance.driver, *versions


def own_provenance(profile: Profile) -> Provenance:
    """Return the provenance that the profile's own fields state, for samples that name no run (schema 1)."""
    return Provenance(
        machine=profile.machine,
        gpu=profile.gpu,
        driver=profile.driver,
        versions=profile.versions,
        taken_at=profile.taken_at,
    )


def with_named_runs(profile: Profile) -> Profile:
    """Return `profile` with every sample naming its run."""
    own = own_provenance(profile)
    name = run_name(own)
    unnamed = any(not sample.run for samples in profile.sample_lists().values() for sample in samples)
    named = profile.with_samples(
        lambda samples: (sample if sample.run else replace(sample, run=name) for sample in samples)
    )
    return replace(
        named, schema_version=PROFILE_SCHEMA_VERSION, runs={**profile.runs, **({name: own} if unnamed else {})}
    )


def merge(older: Profile, newer: Profile) -> Profile:
    """Return a profile with the samples of both. Where both measured the same on the same software, `newer`'s win.

    Raises BadInput for profiles of different GPU models.
    """
    if older.gpu.casefold() != newer.gpu.casefold():
        raise BadInput(
            f"a profile of {newer.gpu} does not go with one of {older.gpu}",
            why="times of one GPU model say little about another",
            remedy="keep them in files of their own",
        )
    a, b = with_named_runs(older), with_named_runs(newer)
    runs = {**a.runs, **b.runs}
    newly_measured = any(b.sample_lists().values())
    samples: dict[str, Any] = {
        name: _merged_samples(a.sample_lists()[name], new, runs) for name, new in b.sample_lists().items()
    }
    return replace(
        b,
        machine=a.machine if not b.machine else b.machine,
        versions={**a.versions, **b.versions},
        runs=runs,
        **samples,
        # These rates were fitted to the samples of `overlap`, so they go with them.
        overlap_rates=next((one.overlap_rates for one in (b, a) if one.overlap == samples["overlap"]), {}),
        missing=tuple(dict.fromkeys((*(a.missing if not newly_measured else ()), *b.missing))),
    )


def current_samples(profile: Profile) -> Profile:
    """Return `profile` with only the samples of its own software versions, and those that name no run.

    A profile may hold samples of several drivers; an estimate is for one of them. A library whose version the profile
    does not state excludes no sample.
    """
    wanted = software_key(own_provenance(profile))

    def fits(sample: Any) -> bool:
        run = profile.runs.get(sample.run)
        if run is None:
            return not sample.run or not profile.runs
        found = software_key(run)
        return all(ours == theirs or not ours or not theirs for ours, theirs in zip(wanted, found, strict=True))

    return profile.with_samples(lambda samples: filter(fits, samples))


def store_folder() -> Path:
    """Return the folder of this user's profiles: below MESHWRIGHT_DATA, else in the platform's user data folder."""
    chosen = os.environ.get(STORE_VARIABLE)
    return (Path(chosen) if chosen else platformdirs.user_data_path("meshwright", appauthor=False)) / "profiles"


def store_path(gpu: str, folder: Path | None = None) -> Path:
    """Return the store's file for a GPU model; other characters than letters, digits, `.` and `-` are replaced."""
    name = re.sub(r"[^a-z0-9.-]+", "-", gpu.casefold()).strip("-.") or "unknown"
    return (store_folder() if folder is None else folder) / f"{name}.json"


def read_stored(
    gpu: str, folder: Path | None = None, *, tell: Callable[[str], None] = lambda _: None
) -> Profile | None:
    """Return the stored profile of a GPU model, or None. A damaged file is set aside, and `tell` is called with a
    warning.

    Raises NewerSchema where a newer release wrote the file, BadInput where it cannot be opened.
    """
    path = store_path(gpu, folder)
    if not path.is_file():
        return None
    try:
        return read_profile(path)
    except BadInput as error:
        if isinstance(error, NewerSchema) or isinstance(error.__cause__, OSError):  # the file may well be sound
            raise
        tell(f"warning: {error}\n  kept as {codec.set_aside(path)}; the store begins anew")
        return None


def add_to_store(profile: Profile, folder: Path | None = None, *, tell: Callable[[str], None] = lambda _: None) -> Path:
    """Merge `profile` into the store and return the file's path. For `tell` and errors see `read_stored`."""
    path = store_path(profile.gpu, folder)
    with codec.locked(path):
        before = read_stored(profile.gpu, folder, tell=tell)
        whole = profile if before is None else merge(before, profile)
        codec.write_text(path, codec.to_json(with_named_runs(whole)) + "\n")
    return path


def _merged_samples(older: tuple[S, ...], newer: tuple[S, ...], runs: dict[str, Provenance]) -> tuple[S, ...]:
    def identity(sample: S) -> tuple[Any, ...]:
        run = runs.get(sample.run)
        return sample.key, software_key(run) if run is not None else ()

    def valid(sample: S) -> bool:
        return not getattr(sample, "invalid", "")

    found: dict[tuple[Any, ...], S] = {}
    for sample in (*older, *newer):
        what = identity(sample)
        if what in found and valid(found[what]) and not valid(sample):
            continue  # an invalid repetition does not replace a valid sample
        found[what] = sample
    return tuple(found.values())


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
