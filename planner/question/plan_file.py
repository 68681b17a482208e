"""Saved plans: the question, the chosen plan, and fingerprints of the question's parts.

A plan file holds its model, cluster, workload and runtime whole, so that it can be explained and re-costed anywhere,
and their fingerprints, so that it can be refused for another machine than the one it was made for. The same question
writes the same bytes.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.io.plan_words import differing
from planner.io.version import version
from planner.question.question import Question, question_of
from simulator.calibration.calibration import Calibration
from simulator.config.estimate import Estimate
from simulator.config.model import Model
from simulator.config.overlap_sites import canonical
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.verify import (
    verify_estimate,
    verify_lists,
    verify_model,
    verify_plan,
    verify_runtime,
    verify_workload,
)
from simulator.config.workload import Workload
from topology import codec
from topology.catalog.verify import require_possible
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import BadInput, BadPlan, Stale

if TYPE_CHECKING:
    from topology.profile.profile import Profile

SCHEMA_VERSION = 1
FINGERPRINTED = ("model", "cluster", "workload", "framework", "runtime", "plan", "estimate")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """The content of a plan file.

    `fingerprints` has a key for every part that the answer depends on (`FINGERPRINTED`), and `profile` if one was used:
    the file does not contain the profile, so a different one is noticed but its differences are not shown.
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

    def question(self, calibration: Calibration | None = None) -> Question:
        """Return the question that the plan answers, on as many GPUs as it uses."""
        return question_of(
            self.model,
            self.cluster,
            self.workload,
            framework=self.framework,
            runtime=self.runtime,
            calibration=calibration,
            gpus=self.plan.gpus,
        )


def plan_file(question: Question, plan: Plan, estimate: Estimate) -> PlanFile:
    """Return the file content for a chosen plan."""
    known = question.calibration
    content = PlanFile(
        schema_version=SCHEMA_VERSION,
        tool_version=version(),
        framework=question.framework.name,
        fingerprints={},
        plan=plan,
        estimate=estimate,
        model=question.model,
        cluster=question.cluster,
        workload=question.workload,
        runtime=question.runtime,
    )
    measured = {"profile": known.profile} if known is not None else {}
    return replace(content, fingerprints=fingerprints(content) | measured)


def fingerprints(content: PlanFile) -> dict[str, str]:
    """Return the fingerprints of all parts that a plan file's answer depends on."""
    return {name: fingerprint(getattr(content, name)) for name in FINGERPRINTED}


def fingerprint(value: Any) -> str:
    """Return the fingerprint of a part of a question, without findings about a machine."""
    return codec.fingerprint(replace(value, findings=()) if isinstance(value, Cluster) else value)


def save_plan(content: PlanFile, path: str | Path, *, force: bool = False) -> None:
    """Write a plan file atomically. Raises BadInput when the file exists and `force` is not given, and for a plan that
    could not be read again because a value is out of range.
    """
    refuse_overwrite(path, force=force)
    _verify(content, "the plan")
    codec.write_text(path, codec.to_json(content) + "\n")


def refuse_overwrite(path: str | Path, *, force: bool) -> None:
    """Raise BadInput when a file cannot be made at `path`, or exists already; called before a long search, not after
    it.

    Devices and pipes (/dev/stdout) are written to, not replaced.
    """
    target = Path(path)
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # a name too long, a folder that cannot be searched, a NUL character
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"cannot write {str(path)[:200]}", why=why, remedy="choose another path") from error
    if target.is_dir():
        raise BadInput(f"{path} is a directory", remedy="name a file: --out plan.json")
    require_folder(target)
    if (target.is_file() or target.is_symlink()) and not force:
        raise BadInput(f"{path} exists", why="a file is not overwritten by accident", remedy="--force, or another name")


def require_folder(path: Path) -> None:
    """Raise BadInput when the folder that `path` lies in does not exist: folders are not created, since the name may be
    misspelt.
    """
    above = path.parent
    while not (above.exists() or above.is_symlink() or above == above.parent):
        above = above.parent
    if not above.is_dir():
        raise BadInput(f"cannot write {path}", why=f"{above} is not a folder", remedy="choose another file")
    if not path.parent.is_dir():
        raise BadInput(
            f"cannot write {path}",
            why=f"there is no folder {path.parent}",
            remedy=f"mkdir -p {shlex.quote(str(path.parent))}, or choose another file",
        )


def load_plan(path: str | Path) -> PlanFile:
    """Return a plan file's content, verified to be one. Raises BadInput or BadPlan (exit 2)."""
    data = codec.read_json(path)
    if not isinstance(data, dict) or "plan" not in data or "fingerprints" not in data:
        raise _no_plan_file(data, path)
    codec.require_schema(data, SCHEMA_VERSION, where=str(path))
    content = codec.convert(data, PlanFile, where=str(path))
    _verify(content, str(path))
    # Computed from the file's own text, so that a release with more fields can read it.
    made_for, now = {**content.fingerprints}, {name: codec.fingerprint(_part(data, name)) for name in FINGERPRINTED}
    profile = made_for.pop("profile", None)
    if made_for != now:
        altered = [name for name in {**now, **made_for} if made_for.get(name) != now.get(name)]
        raise BadPlan(
            f"{path} was edited: its contents do not match their fingerprints",
            why=f"altered, or without a fingerprint: {', '.join(map(_text, altered[:8]))}",
            remedy="make it again with planner suggest --out",
        )
    known = fingerprints(content) | ({} if profile is None else {"profile": profile})
    return replace(content, fingerprints=known, plan=content.plan.with_(tp_overlap=canonical(content.plan.tp_overlap)))


def _no_plan_file(data: Any, path: str | Path) -> BadPlan:
    if isinstance(data, dict) and {"model", "cluster", "plan"} <= data.keys():
        return BadPlan(
            f"{path} is not a plan file",
            why="it is a case: what a plan file says besides, the prediction and the whole machine, is not in it",
            remedy=f"planner estimate --case {shlex.quote(str(path))} --out plan.json",
        )
    return BadPlan(f"{path} is not a plan file", remedy="make one with planner suggest --out plan.json")


def _part(data: JsonObject, name: str) -> Any:
    """Return a part of a file; findings about a machine are left out."""
    part = data.get(name)
    return {**part, "findings": []} if name == "cluster" and isinstance(part, dict) else part


def _verify(content: PlanFile, where: str) -> None:
    """Raise BadPlan, BadModel or BadCluster unless every value of the file is in its range."""
    require_possible(content.cluster, where=where)
    verify_model(content.model, where=where)
    verify_estimate(content.estimate, where=where)
    verify_plan(content.plan, where=where)
    if content.plan.gpus > content.cluster.gpu_count:
        raise BadPlan(
            f"{where}: plan.dp_replicate x dp_shard x cp x tp x pp is {content.plan.gpus} GPUs",
            why=f"its cluster has {content.cluster.gpu_count}",
        )
    verify_lists(content.plan, where=where, layers=content.model.layers, gpus=content.cluster.gpu_count)
    verify_workload(content.workload, where=where)
    verify_runtime(content.runtime, where=where)


def require_fresh(
    content: PlanFile,
    *,
    model: Model | None = None,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    profile: Profile | None = None,
) -> None:
    """Raise Stale (exit 1), with what differs, when the plan was made for another model or cluster than the given
    one.
    """
    then = {"model": content.model, "cluster": content.cluster, "workload": content.workload}
    now = {"model": model, "cluster": cluster, "workload": workload, "profile": profile}
    differ = []
    for name, value in now.items():
        if value is None:
            continue
        fresh, made = fingerprint(value), content.fingerprints.get(name)
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
            remedy="plan again with planner suggest; what this plan would take there: planner estimate --case FILE",
        )


SHOWN = 6  # differences named in an error


def differences(then: Any, now: Any) -> list[str]:
    """Return what differs between two values of one kind, field by field: `layers: 32, now 80`."""
    return [f"{where}: {one}, now {other}" for where, one, other in differing(then, now)]


def _text(value: Any) -> str:
    return value[:32] if isinstance(value, str) else "an unknown version"
