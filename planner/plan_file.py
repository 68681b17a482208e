"""Saved plans: what was asked, what was chosen, and fingerprints of what it was chosen for.

A plan file holds its model, cluster, workload and runtime whole, so that it can be explained and re-costed anywhere,
and their fingerprints, so that it can be refused where the machine is no longer the one it was made for. The same
question writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.version import version
from simulator.estimate import Estimate
from simulator.model import Model
from simulator.overlap_sites import canonical
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology import codec
from topology.cluster import Cluster
from topology.errors import BadInput, BadPlan, Stale
from topology.profile import Profile

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """The content of a plan file.

    `fingerprints` has the keys model, cluster and workload, and profile where one was used: a profile is not kept in the
    file, so another one is noticed but not shown.
    """

    schema_version: int
    tool_version: str
    framework: str
    fingerprints: dict[str, str]
    plan: Plan
    estimate: Estimate
    model: Model
    cluster: Cluster
    workload: Workload
    runtime: Runtime


def plan_file(
    *,
    plan: Plan,
    estimate: Estimate,
    model: Model,
    cluster: Cluster,
    workload: Workload,
    runtime: Runtime,
    framework: str,
    profile: Profile | None = None,
) -> PlanFile:
    """Return the file content for a chosen plan."""
    return PlanFile(
        schema_version=SCHEMA_VERSION,
        tool_version=version(),
        framework=framework,
        fingerprints=fingerprints(model, cluster, workload)
        | ({"profile": codec.fingerprint(profile)} if profile is not None else {}),
        plan=plan,
        estimate=estimate,
        model=model,
        cluster=cluster,
        workload=workload,
        runtime=runtime,
    )


def fingerprints(model: Model, cluster: Cluster, workload: Workload) -> dict[str, str]:
    """Return the fingerprints a plan is tied to."""
    return {
        "model": codec.fingerprint(model),
        "cluster": codec.fingerprint(cluster),
        "workload": codec.fingerprint(workload),
    }


def save_plan(content: PlanFile, path: str | Path, *, force: bool = False) -> None:
    """Write a plan file atomically. Raises BadInput when the file exists and `force` is not given."""
    refuse_overwrite(path, force=force)
    codec.write_text(path, codec.to_json(content) + "\n")


def refuse_overwrite(path: str | Path, *, force: bool) -> None:
    """Raise BadInput when something is at `path` already, so that a long search is not started in vain."""
    target = Path(path)
    if target.is_dir():
        raise BadInput(f"{path} is a directory", remedy="name a file: --out plan.json")
    if (target.exists() or target.is_symlink()) and not force:
        raise BadInput(
            f"{path} exists", why="a saved plan is not overwritten by accident", remedy="--force or another --out"
        )


def load_plan(path: str | Path) -> PlanFile:
    """Return a plan file's content, verified to be one. Raises BadInput or BadPlan (exit 2)."""
    data = codec.read_json(path)
    if not isinstance(data, dict) or "plan" not in data or "fingerprints" not in data:
        raise BadPlan(f"{path} is not a plan file", remedy="make one with planner suggest --out plan.json")
    found = data.get("schema_version")
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise BadPlan(f"{path} has no readable schema_version", why=f"found {found!r}")
    if found > SCHEMA_VERSION:
        raise BadPlan(
            f"{path} was made by meshwright {_text(data.get('tool_version'))}, in schema {found}",
            why=f"this is {version()}, which reads schema {SCHEMA_VERSION}",
            remedy="update meshwright",
        )
    content = codec.convert(data, PlanFile, where=str(path))
    made_for = {name: value for name, value in content.fingerprints.items() if name != "profile"}
    if made_for != fingerprints(content.model, content.cluster, content.workload):
        raise BadPlan(
            f"{path} was edited: its contents do not match their fingerprints",
            remedy="make it again with planner suggest --out",
        )
    return replace(content, plan=content.plan.with_(tp_overlap=canonical(content.plan.tp_overlap)))


def require_fresh(
    content: PlanFile,
    *,
    model: Model | None = None,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    profile: Profile | None = None,
) -> None:
    """Raise Stale (exit 1), with what differs, when the plan was made for something else than what is given."""
    then = {"model": content.model, "cluster": content.cluster, "workload": content.workload}
    now = {"model": model, "cluster": cluster, "workload": workload, "profile": profile}
    differ = []
    for name, value in now.items():
        if value is None:
            continue
        fresh, made = codec.fingerprint(value), content.fingerprints.get(name)
        if fresh != made:
            what = differences(then[name], value) if name in then else []
            if name == "cluster" and cluster is not None and cluster.gpu_count != content.cluster.gpu_count:
                what.insert(0, f"{content.cluster.gpu_count} GPUs then, {cluster.gpu_count} now")
            shown = "; ".join(what[:SHOWN]) + (f"; and {len(what) - SHOWN} more" if len(what) > SHOWN else "")
            differ.append(f"{name} {made or 'none'} -> {fresh}" + (f" ({shown})" if shown else ""))
    if differ:
        raise Stale(
            "the plan was made for something else than what is here",
            why="; ".join(differ),
            remedy="plan again with planner suggest",
        )


SHOWN = 6  # differences named in an error


def differences(then: Any, now: Any) -> list[str]:
    """Return what differs between two values of one kind, field by field: `layers: 32, now 80`."""
    return list(_differences(codec.to_builtins(then), codec.to_builtins(now), ""))


def _differences(then: Any, now: Any, where: str) -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*then, *now]):
            yield from _differences(then.get(key), now.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(then, (list, tuple)) and isinstance(now, (list, tuple)) and len(then) == len(now):
        for index, (a, b) in enumerate(zip(then, now, strict=True)):
            yield from _differences(a, b, f"{where}[{index}]")
    elif then != now:
        yield f"{where}: {_shown(then)}, now {_shown(now)}"


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple, dict)):
        return f"{len(value)} entries"
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _text(value: Any) -> str:
    return value[:32] if isinstance(value, str) else "an unknown version"
