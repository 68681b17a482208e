"""Profiles put together, and the folder where a machine keeps its own.

Merging takes nothing away: samples are told apart by what they measured *and* on what (GPU, driver, library versions),
so a newer driver's samples lie beside the older ones, and which apply is asked when they are used. The same thing
measured again on the same software replaces the older sample. Files in the store are never deleted; each is written
whole or not at all, so two calibrations at once lose at most the samples that one of them has just added.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import platformdirs

from topology import codec
from topology.errors import BadInput
from topology.profile import Profile, read_profile
from topology.samples import Provenance

STORE_VARIABLE = "MESHWRIGHT_DATA"


class _Sample(Protocol):
    @property
    def key(self) -> tuple[Any, ...]: ...

    @property
    def run(self) -> str: ...


S = TypeVar("S", bound=_Sample)

# Libraries whose version changes what a kernel is. Others in `Provenance.versions` are for the record.
KERNEL_LIBRARIES = ("torch", "cuda", "nccl", "triton", "cudnn", "torchtitan")


def run_name(provenance: Provenance) -> str:
    """Return the name under which samples refer to `provenance`: equal provenance, equal name, on any machine."""
    return codec.fingerprint(provenance)


def software(provenance: Provenance) -> tuple[Hashable, ...]:
    """Return what a kernel's time depends on besides its shape: GPU, driver and the libraries that launch it."""
    # What follows a plus sign says which build it is, and not every source tells.
    versions = tuple(provenance.versions.get(name, "").partition("+")[0] for name in KERNEL_LIBRARIES)
    return provenance.gpu.casefold(), provenance.driver, *versions


def head(profile: Profile) -> Provenance:
    """Return the provenance that the profile's own fields state, for samples that name no run (schema 1)."""
    return Provenance(
        machine=profile.machine,
        gpu=profile.gpu,
        driver=profile.driver,
        versions=profile.versions,
        taken_at=profile.taken_at,
    )


def with_runs(profile: Profile) -> Profile:
    """Return `profile` with every sample naming its run."""
    own = head(profile)
    name = run_name(own)
    bare = any(not sample.run for part in _parts(profile) for sample in part)

    def named(samples: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(sample if sample.run else replace(sample, run=name) for sample in samples)

    return replace(
        profile,
        schema_version=2,
        runs={**profile.runs, **({name: own} if bare else {})},
        collectives=named(profile.collectives),
        operators=named(profile.operators),
        host=named(profile.host),
        contention=named(profile.contention),
        layers=named(profile.layers),
        overlap=named(profile.overlap),
    )


def merge(older: Profile, newer: Profile) -> Profile:
    """Return the samples of both. Where both measured the same on the same software, `newer`'s stay.

    Raises BadInput for profiles of different GPUs: their samples would be taken for each other's.
    """
    if older.gpu.casefold() != newer.gpu.casefold():
        raise BadInput(
            f"a profile of {newer.gpu} does not go with one of {older.gpu}",
            why="times of one GPU model say little about another",
            remedy="keep them in files of their own",
        )
    a, b = with_runs(older), with_runs(newer)
    runs = {**a.runs, **b.runs}
    measured = {sample.key for part in _parts(b) for sample in part}
    return replace(
        b,
        machine=a.machine if not b.machine else b.machine,
        versions={**a.versions, **b.versions},
        runs=runs,
        collectives=_joined(a.collectives, b.collectives, runs),
        operators=_joined(a.operators, b.operators, runs),
        host=_joined(a.host, b.host, runs),
        contention=_joined(a.contention, b.contention, runs),
        layers=_joined(a.layers, b.layers, runs),
        overlap=(overlap := _joined(a.overlap, b.overlap, runs)),
        # Rates are of the samples that they were fitted to.
        overlap_rates=next((one.overlap_rates for one in (b, a) if one.overlap == overlap), {}),
        missing=tuple(dict.fromkeys((*(a.missing if not measured else ()), *b.missing))),
    )


def current(profile: Profile) -> Profile:
    """Return only the samples of the software that the profile's head names, and those that name no run.

    A profile may hold samples of several drivers; an estimate is for one of them. The libraries that its head leaves
    out do not tell samples apart.
    """
    wanted = software(head(profile))

    def fits(sample: Any) -> bool:
        run = profile.runs.get(sample.run)
        if run is None:
            return not sample.run or not profile.runs
        found = software(run)
        return all(ours == theirs or not ours or not theirs for ours, theirs in zip(wanted, found, strict=True))

    return replace(
        profile,
        collectives=tuple(filter(fits, profile.collectives)),
        operators=tuple(filter(fits, profile.operators)),
        host=tuple(filter(fits, profile.host)),
        contention=tuple(filter(fits, profile.contention)),
        layers=tuple(filter(fits, profile.layers)),
        overlap=tuple(filter(fits, profile.overlap)),
    )


def store_folder() -> Path:
    """Return where this user's profiles lie: MESHWRIGHT_DATA, or the platform's folder for application data."""
    chosen = os.environ.get(STORE_VARIABLE)
    return (Path(chosen) if chosen else platformdirs.user_data_path("meshwright", appauthor=False)) / "profiles"


def store_path(gpu: str, folder: Path | None = None) -> Path:
    """Return the store's file for a GPU model. Its name is made of letters and digits, whatever the GPU's is."""
    name = re.sub(r"[^a-z0-9.-]+", "-", gpu.casefold()).strip("-.") or "unknown"
    return (store_folder() if folder is None else folder) / f"{name}.json"


def stored(gpu: str, folder: Path | None = None) -> Profile | None:
    """Return what the store holds of a GPU model, or None. Raises BadInput where the file is damaged."""
    path = store_path(gpu, folder)
    return read_profile(path) if path.is_file() else None


def keep(profile: Profile, folder: Path | None = None) -> Path:
    """Add `profile` to the store and return the file. What was there stays, as `merge` says."""
    path = store_path(profile.gpu, folder)
    before = stored(profile.gpu, folder)
    whole = profile if before is None else merge(before, profile)
    codec.write_text(path, codec.to_json(with_runs(whole)) + "\n")
    return path


def _parts(profile: Profile) -> tuple[tuple[Any, ...], ...]:
    return (
        profile.collectives,
        profile.operators,
        profile.host,
        profile.contention,
        profile.layers,
        profile.overlap,
    )


def _joined(older: tuple[S, ...], newer: tuple[S, ...], runs: dict[str, Provenance]) -> tuple[S, ...]:
    def identity(sample: S) -> tuple[Any, ...]:
        run = runs.get(sample.run)
        return sample.key, software(run) if run is not None else ()

    def valid(sample: S) -> bool:
        return not getattr(sample, "invalid", "")

    found: dict[tuple[Any, ...], S] = {}
    for sample in (*older, *newer):
        what = identity(sample)
        if what in found and valid(found[what]) and not valid(sample):
            continue  # a throttled repetition does not drive out a good sample
        found[what] = sample
    return tuple(found.values())
