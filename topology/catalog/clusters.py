"""Clusters by name from the catalogue, and clusters described by the five fields of a case.

The catalogue is data: `catalog/clusters.json` holds platforms, each with where its figures come from; `h200x4.json`
is a real machine as it was probed. `cloud.json` adds machine types of clouds. A case has `{gpu, gpus_per_node, nodes,
interconnect, nic_gbit_per_gpu}`; a field that it leaves out is filled in from the usual platform of that GPU and listed
as an assumption.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from topology.catalog.gpus import bridges, gpu_kind
from topology.catalog.platform import INTERCONNECTS, Platform, build, joined_text, take_gpus
from topology.cluster import Cluster, GpuKind
from topology.codec import convert, parse_json
from topology.errors import BadCluster

CASE_KEYS = ("gpu", "gpus_per_node", "nodes", "interconnect", "nic_gbit_per_gpu")
PROBED = ("h200x4",)  # whole clusters, as probed

MAX_NUMBER = 10**15  # beyond any count or rate of a cluster, and exact as a float


def catalog_names() -> tuple[str, ...]:
    """Return the names of all shipped clusters, sorted, without aliases."""
    return tuple(sorted({platform.name for platform in _platforms()} | set(PROBED)))


def platform_named(name: str) -> Platform | None:
    """Return a machine of the catalogue by its name or an alias; None where there is none, or only a probed cluster."""
    return _index().get(name.lower())


def is_catalog_name(name: str) -> bool:
    return name.lower() in _index() or name.lower() in PROBED


def cluster(name: str, gpus: int | None = None) -> Cluster:
    """Return a catalogue cluster: one node, or as many as `gpus` needs.

    Fewer GPUs than a node has give a part of a node, marked by a finding. Raises BadCluster for an unknown name and
    for less than one GPU.
    """
    wanted = name.lower()
    if wanted in PROBED:
        probed = _probed_cluster(wanted)
        return probed if gpus is None else take_gpus(probed, gpus)
    platform = _index().get(wanted)
    if platform is None:
        near = difflib.get_close_matches(wanted, [*_index(), *PROBED], n=4, cutoff=0.4)
        raise BadCluster(
            f"unknown cluster {name!r}",
            why="it is neither in the catalogue nor a file" + (f"; nearest: {', '.join(near)}" if near else ""),
            remedy="say GPUs (8xH100, 2x8xA100-40GB), a machine type (p5.48xlarge), or one of:"
            f" {', '.join(catalog_names())}",
        )
    if gpus is None:
        return build(platform)
    if gpus < 1:
        raise BadCluster(f"{gpus} GPUs asked of {name}", remedy="ask for at least one")
    nodes = -(-gpus // platform.gpus_per_node)
    return take_gpus(build(platform, nodes=nodes), gpus)


def cluster_from_case(
    spec: Mapping[str, Any], *, already_stated: Collection[str] = ()
) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster of a case and what had to be assumed about it.

    `spec` has the keys of `CASE_KEYS`; a key that is absent, null or "unknown" was not stated. `already_stated` names
    fields that the caller sets itself (`fabric`, `oversubscription`), so that they are not listed. Raises BadCluster
    for a GPU that is not in the catalogue, unknown keys and impossible values.
    """
    stated = {key: value for key, value in spec.items() if value is not None and value != "unknown"}
    gpu = stated.get("gpu")
    if not isinstance(gpu, str):
        raise BadCluster("the cluster names no GPU", remedy='give "gpu", for example "h100-sxm"')
    kind = gpu_kind(gpu)
    usual = default_platform(kind)
    assumed: list[str] = []
    if unknown := [str(key) for key in spec if key not in CASE_KEYS]:
        near = difflib.get_close_matches(unknown[0], CASE_KEYS, n=1)
        raise BadCluster(
            f"cluster has an unknown key: {unknown[0][:40]!r}",
            why="nothing reads it, and it would be ignored",
            remedy=f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(CASE_KEYS)}",
        )

    def number(key: str, *, whole: bool) -> Any:
        value = stated.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise BadCluster(f"{key} is {value!r}", remedy=f"give a {'whole ' if whole else ''}number")
        if abs(value) > MAX_NUMBER:
            raise BadCluster(f"{key} is larger than {MAX_NUMBER:g}", remedy="give a smaller number")
        if whole and value < 1:
            raise BadCluster(f"{key} is {value}", remedy="give 1 or more")
        return value

    per_node, nodes = number("gpus_per_node", whole=True), number("nodes", whole=True)
    if per_node is None:
        per_node = usual.gpus_per_node
        assumed.append(f"{per_node} GPUs per node, as in {usual.name}")
    if nodes is None:
        nodes = 1
        assumed.append("one node")
    interconnect = stated.get("interconnect")
    if interconnect is None:
        interconnect = usual.interconnect
        if per_node > 1:
            assumed.append(joined_text(usual, interconnect))
    if interconnect not in INTERCONNECTS:
        raise BadCluster(
            f"interconnect is {interconnect!r}", remedy=f"use one of {', '.join(INTERCONNECTS)}, or null if not known"
        )
    if interconnect == usual.interconnect and usual.trays > 1 and per_node * usual.trays == usual.gpus_per_node:
        trays = max(n for n in range(1, usual.trays + 1) if nodes % n == 0)
        per_node, nodes = per_node * trays, nodes // trays
        assumed.append(f"hosts are trays of NVLink domains of {per_node} GPUs, as in {usual.name}")
    platform = adapt_platform(usual, kind, gpus_per_node=per_node, interconnect=interconnect)
    nic = number("nic_gbit_per_gpu", whole=False)
    if nic is not None:
        platform = one_port_per_gpu(platform, float(nic))
    elif nodes > 1:
        total = platform.nics * platform.trays * platform.nic_gbit
        assumed.append(f"{total / per_node:g} Gb/s of network per GPU, as in {usual.name}")
    if nodes > 1 and platform.fabric is not None:
        if "fabric" not in already_stated:
            assumed.append(f"{platform.fabric} network, as in {usual.name}")
        if "oversubscription" not in already_stated:
            assumed.append(f"oversubscription {platform.oversubscription:g}, as in {usual.name}")
    name = f"{nodes} x {per_node} {kind.name}"
    return build(replace(platform, name=name), nodes=nodes), tuple(assumed)


def default_platform(kind: GpuKind) -> Platform:
    """Return the platform that GPUs of this kind usually come in; a plain two-socket server where none is known."""
    for platform in _platforms():
        if kind.name in platform.usual_for:
            return platform
    direct = kind.nvlink_links > 0 and bridges().get(kind.name) != "optional"
    return Platform(
        name="a plain two-socket server",
        gpu=kind.name,
        gpus_per_node=8,
        interconnect="nvlink" if direct else "pcie",
        nics=1,
        nic_gbit=100.0,
        nics_on="cpu",
        fabric="fat-tree",
        sources={"all": "assumed: nothing published about the usual server of this GPU"},
    )


def adapt_platform(usual: Platform, kind: GpuKind, *, gpus_per_node: int, interconnect: str) -> Platform:
    """Return `usual` with another GPU, GPU count or interconnect; ports per GPU stay as they were."""
    same = gpus_per_node == usual.gpus_per_node and interconnect == usual.interconnect
    trays = usual.trays
    if gpus_per_node != usual.gpus_per_node and trays > 1:
        per_tray = usual.gpus_per_node // usual.trays
        trays = max(1, -(-gpus_per_node // per_tray))
    per_tray_usual = usual.gpus_per_node / usual.trays
    nics = usual.nics if trays > 1 else max(1, round(usual.nics * gpus_per_node / per_tray_usual)) if usual.nics else 0
    return replace(
        usual,
        gpu=kind.name,
        gpus_per_node=gpus_per_node,
        interconnect=interconnect,
        bridges=usual.bridges if same else (),
        multicast=usual.multicast and interconnect == "nvswitch",
        trays=trays,
        nics=nics,
    )


def one_port_per_gpu(platform: Platform, gbit: float) -> Platform:
    """Return `platform` with one network port of `gbit` Gb/s per GPU, or none at all for zero."""
    per_tray = -(-platform.gpus_per_node // platform.trays)
    return replace(
        platform, nics=per_tray if gbit > 0 else 0, nic_gbit=gbit, fabric=platform.fabric or "rail-optimised"
    )


@lru_cache(maxsize=1)
def _platforms() -> tuple[Platform, ...]:
    where = "catalog/clusters.json"
    document = parse_json((files("topology") / "catalog" / "clusters.json").read_text("utf-8"), where=where)
    platforms = convert(document["platforms"], tuple[Platform, ...], where=where)
    return (*platforms, *_cloud_types({platform.name: platform for platform in platforms}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _CloudType:
    """A cloud's machine type: a machine of the catalogue (`like`) with `changes`, as `source` states them."""

    name: str
    aliases: tuple[str, ...]
    title: str
    like: str
    changes: dict[str, Any]
    source: str


def _cloud_types(platforms: Mapping[str, Platform]) -> Iterator[Platform]:
    where = "catalog/cloud.json"
    document = parse_json((files("topology") / "catalog" / "cloud.json").read_text("utf-8"), where=where)
    for one in convert(document["machines"], tuple[_CloudType, ...], where=where):
        base = platforms[one.like]
        sources = {**base.sources, "nics": one.source}
        yield replace(
            base, name=one.name, title=one.title, aliases=one.aliases, usual_for=(), sources=sources, **one.changes
        )


@lru_cache(maxsize=1)
def _index() -> dict[str, Platform]:
    return {name: platform for platform in _platforms() for name in (platform.name, *platform.aliases)}


@lru_cache(maxsize=4)
def _probed_cluster(name: str) -> Cluster:
    where = f"catalog/{name}.json"
    document = parse_json((files("topology") / "catalog" / f"{name}.json").read_text("utf-8"), where=where)
    return convert(document, Cluster, where=where)
