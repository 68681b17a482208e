"""GPU datasheets: one `GpuKind` per model, read from `catalog/gpus.json`.

Every field of that file has an entry in `sources`. Where a figure could not be checked against anything published, the
entry contains the word "unconfirmed", and `cluster_caveats` lists it, so that an estimate can say what it rests on.

`memory_bytes` is what a CUDA program sees (torch's `total_memory`), a little less than nvidia-smi's total, which
includes what the driver keeps. Where a kind has no published driver figure its source says so. `achieved_flops` is the
larger of two published figures: the best matmul of the MAMF search, and the median over frameworks of the best GEMM
of each; single outliers, which can come from input values that draw little power, do not count. Of cards that neither
has, it is the middle of what their owners measured.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from topology.cluster import GpuKind
from topology.codec import convert, parse_json
from topology.errors import BadCluster

_VENDORS = re.compile(r"^(nvidia|amd|intel|tesla|geforce|instinct|graphics device)\s+", re.IGNORECASE)


@lru_cache(maxsize=1)
def gpu_kinds() -> tuple[GpuKind, ...]:
    """Return every GPU model of the catalogue, oldest architecture first, vendors in turn."""
    return convert(_document()["gpus"], tuple[GpuKind, ...], where="catalog/gpus.json")


@lru_cache(maxsize=1)
def bridges() -> dict[str, Literal["usual", "optional"]]:
    """Return the PCIe cards whose NVLinks a bridge joins in pairs, and whether servers usually come with the bridge."""
    where = "catalog/gpus.json: bridges"
    return convert(_document()["bridges"], dict[str, Literal["usual", "optional"]], where=where)


def _document() -> Any:
    return parse_json((files("topology") / "catalog" / "gpus.json").read_text("utf-8"), where="catalog/gpus.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNames:
    """Names of GPUs elsewhere. `skypilot`: by the name of a kind. `words`: patterns in descriptions of machines, the
    most specific first, each with the name or alias of a kind. `variants`: the kinds that one short name may mean, the
    commonest first. `sources`: where these are from.
    """

    schema_version: int
    skypilot: dict[str, str]
    words: tuple[tuple[str, str], ...]
    variants: dict[str, tuple[str, ...]]
    sources: dict[str, str]


@lru_cache(maxsize=1)
def gpu_names() -> GpuNames:
    """Return what other programs and tables call the GPUs of the catalogue."""
    text = (files("topology") / "catalog" / "gpu_names.json").read_text("utf-8")
    return convert(parse_json(text, where="catalog/gpu_names.json"), GpuNames, where="catalog/gpu_names.json")


def gpu_described(text: str) -> str | None:
    """Return the GPU that the description of a machine names, by an alias of the catalogue; None where it names
    none.
    """
    return next((name for pattern, name in gpu_names().words if re.search(pattern, text.lower())), None)


def gpu_kind(name: str) -> GpuKind:
    """Return the GPU model called `name` (its name or an alias, whatever the case). Raises BadCluster."""
    index = _index()
    kind = index.get(_key(name))
    if kind is None:
        near = difflib.get_close_matches(_key(name), list(index), n=5, cutoff=0.4)
        names = list(dict.fromkeys(index[key].name for key in near)) or [kind.name for kind in gpu_kinds()]
        raise BadCluster(
            f"unknown GPU {name!r}",
            why="its rates are not in the catalogue and would have to be guessed",
            remedy=f"use one of: {', '.join(names)}",
        )
    return kind


def gpu_variants(name: str) -> tuple[str, ...]:
    """Return the other kinds that an ambiguous `name` may mean, besides the one that `gpu_kind` returns."""
    return gpu_names().variants.get(_key(name), ())[1:]


def of_power(name: str, watts: float) -> GpuKind | None:
    """Return the card of `watts` that is called after the GPU `name` (`h100-sxm-...-500w`), or None."""
    base = _index().get(_key(name))
    if base is None or base.power_w == watts:
        return None
    return next((k for k in gpu_kinds() if k.power_w == watts and k.name.startswith(f"{base.name}-")), None)


def of_memory(name: str, memory_bytes: float) -> GpuKind | None:
    """Return the only card of the GPU's compute capability with `memory_bytes`, if the GPU `name` has another size."""
    base = _index().get(_key(name))
    if base is None or _near(base.memory_bytes, memory_bytes):
        return None
    alike = [k for k in gpu_kinds() if k.compute_capability == base.compute_capability]
    found = [k for k in alike if _near(k.memory_bytes, memory_bytes) and k.architecture == base.architecture]
    return found[0] if len(found) == 1 else None


def _near(memory_bytes: float, said_bytes: float) -> bool:
    """Return whether a size said in whole GiB may be that of a card."""
    return abs(memory_bytes - said_bytes) < 2**30


def match_driver_name(text: str) -> GpuKind | None:
    """Return the model for a name as nvidia-smi, NVML or rocm-smi print it, or None if the catalogue does not have it.

    Matching is exact up to vendor prefix, case and punctuation: "A100-SXM-64GB" does not match the A100 80 GB, and a
    MIG slice matches no GPU.
    """
    return _index().get(_key(text))


@lru_cache(maxsize=1)
def _index() -> dict[str, GpuKind]:
    return {_key(alias): kind for kind in gpu_kinds() for alias in (kind.name, *kind.aliases)}


def _key(name: str) -> str:
    name = name.strip()
    while (stripped := _VENDORS.sub("", name)) != name:
        name = stripped
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
