"""`planner doctor`: check this machine, with the time that each fault costs and its remedy."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

from click.exceptions import Exit

from planner.calibrate.calibrate_process import measure as run
from planner.commands.probe import probe_cluster
from planner.io import output
from planner.io.inputs import parse_seconds, read_cluster
from planner.io.printable import printable
from planner.io.version import version
from planner.question.plan_file import refuse_overwrite
from planner.requests.machines import Doctor
from planner.runs.schedulers.ray import check_ray
from planner.runs.schedulers.slurm import check_slurm
from topology import codec
from topology.catalog.cluster_file import save_cluster
from topology.cluster import Cluster, Finding
from topology.errors import ProbeError, Stale, UserError
from topology.finding import ERROR, describe_processes
from topology.finding import finding as make_finding
from topology.health import report as health_report
from topology.health.diagnose import Health, diagnose
from topology.processes import process_owner
from topology.profile.measurement import Measurement, profile_from_measurement, read_measurement, with_measured_rates
from topology.redact import redact as redact_text
from topology.redact import redact_cluster
from topology.versions import driver_version
from topology.versions import versions as versions_of_packages


def doctor(asked: Doctor) -> None:
    """Print what `planner doctor` answers."""
    if asked.launcher is not None:
        doctor_jobs(asked)
        return
    if asked.nodes is not None or asked.gpus_per_node is not None:
        raise UserError("--nodes and --gpus-per-node are for jobs", remedy="--launcher slurm")
    seconds = budget_s(asked.budget)
    if (asked.sources or asked.cluster) and asked.measure:
        raise UserError("--measure needs this machine", why="--from and --cluster describe another", remedy="drop one")
    if asked.measure and asked.measured is not None:
        raise UserError("--measure and --measured both say what was measured", remedy="give one of them")
    if asked.sources and asked.cluster:
        raise UserError("--from and --cluster both say what to judge", remedy="give one of them, and --expect")
    _refuse(asked.out, asked.save_measured, asked.save_profile, force=asked.force)
    found = _owners(_machine(asked.sources, asked.cluster, asked.gpu))
    should = _load(asked.expect) if asked.expect is not None else None
    found, samples = _samples(
        found, measure=asked.measure, saved=asked.measured, seconds=seconds, allow_busy=asked.allow_busy
    )
    health = diagnose(found, samples, expected=should)
    if samples is not None:
        found = with_measured_rates(found, samples)
    if asked.redact:
        found = redact_cluster(found)
        samples = samples if samples is None else replace(samples, machine=found.name, uuids=(), command="")
    unsaved = output.attempt(lambda: _save(found, samples, asked.out, asked.save_measured, asked.save_profile))
    _answer(found, health, samples, here=not asked.sources and not asked.cluster, as_json=asked.json, hide=asked.redact)
    if unsaved is not None:
        raise unsaved
    if not health.healthy:
        raise Exit(1)


def budget_s(text: str) -> float:
    """Return the seconds of `60`, `60s`, `1.5m`. Raises UserError for anything else, or more than an hour."""
    return parse_seconds(text, "--budget", range_s=(5.0, 3600.0), units="sm?", why="it is 5s to 60m", example="60s")


def _refuse(*paths: Path | None, force: bool) -> None:
    for path in paths:
        if path is not None:
            refuse_overwrite(path, force=force)


def _machine(sources: list[str] | None, cluster: str | None, gpu: str | None) -> Cluster:
    if cluster is None:
        return probe_cluster(sources, gpu)
    if gpu is not None:
        raise UserError("--gpu names what --cluster already says", remedy="leave --gpu out")
    return _load(cluster)


def _load(name: str) -> Cluster:
    return read_cluster(name)


def _owners(cluster: Cluster) -> Cluster:
    """Add the owner to each process that the probe's findings name; the probe itself reads no process table."""

    def named(finding: Finding) -> Finding:
        if finding.code != "busy" or not finding.numbers:
            return finding
        bytes_by_pid = {int(pid): held_bytes for pid, held_bytes in finding.numbers.items()}
        return replace(
            finding, why=describe_processes(bytes_by_pid, lambda pid: process_owner(pid) or "an unknown user")
        )

    return replace(cluster, findings=tuple(named(finding) for finding in cluster.findings))


def _installed() -> dict[str, str]:
    driver = driver_version()
    return {"kernel": platform.release(), **({"driver": driver} if driver else {}), **versions_of_packages()}


def _samples(
    cluster: Cluster, *, measure: bool, saved: Path | None, seconds: float, allow_busy: bool
) -> tuple[Cluster, Measurement | None]:
    """Return the measurement, and the cluster with one finding more if it failed: the probe's answer is still
    useful.
    """
    node = cluster.groups[0].node
    if saved is not None:
        samples = read_measurement(saved)
        here = tuple(gpu.uuid for gpu in node.gpus)
        if all(here) and samples.uuids and set(samples.uuids).isdisjoint(here):
            raise Stale(
                f"{saved} was measured on other GPUs", why="no UUID is the same", remedy="measure here with --measure"
            )
        return cluster, samples
    if not measure or not node.gpus:
        return cluster, None

    indices = [gpu.index for gpu in node.gpus]
    try:
        return cluster, run(indices, budget_s=seconds, machine=cluster.name, allow_busy=allow_busy)
    except ProbeError as error:
        failed = make_finding(
            "not_measured", ERROR, error.what, error.why, "the machine is judged by what can be read", error.remedy
        )
        return replace(cluster, findings=(*cluster.findings, failed)), None


def _save(
    cluster: Cluster, measured: Measurement | None, out: Path | None, raw: Path | None, profile: Path | None
) -> None:
    if out is not None and cluster.gpu_count:
        save_cluster(cluster, out)
    if measured is not None and raw is not None:
        codec.write_text(raw, codec.to_json(measured) + "\n")
    if measured is not None and profile is not None:
        kind = cluster.groups[0].node.gpus[0].kind if cluster.gpu_count else "unknown"
        codec.write_text(profile, codec.to_json(profile_from_measurement(measured, gpu=kind)) + "\n")


def _answer(
    cluster: Cluster, health: Health, measured: Measurement | None, *, here: bool, as_json: bool, hide: bool
) -> None:
    versions = {"meshwright": version(), **(_installed() if here else {})}
    if measured is not None:
        versions |= {"driver": measured.driver or versions.get("driver", ""), **(measured.versions or {})}
    if as_json:
        text = codec.to_json(health_report.health_json(cluster, health, measured, versions))
    else:
        text = printable(health_report.health_text(cluster, health, measured, versions)).rstrip("\n")
    print(redact_text(text) if hide else text)


# With `--launcher`: whether the scheduler has what a job needs.

CHECKS = {"slurm": check_slurm, "ray": check_ray}
NODES = 2  # two at least, so that they have to find each other
OF_JOBS = frozenset({"launcher", "nodes", "gpus_per_node", "json"})


def doctor_jobs(asked: Doctor) -> None:
    """Print the findings, faults first. Exit code 1 if a job would fail."""
    check = CHECKS.get(str(asked.launcher))
    if check is None:
        remedy = f"{' or '.join(CHECKS)}; without it this machine is checked"
        raise UserError(f"--launcher is {asked.launcher!r}", remedy=remedy)
    if others := sorted(asked.said - OF_JOBS):
        named = ", ".join(f"--{name.replace('_', '-')}".replace("--sources", "--from") for name in others)
        raise UserError(f"{named} not with --launcher", why="it checks a scheduler, no machine", remedy="leave it out")
    output.progress(f"asking {str(asked.launcher).title()} ...")
    found = check(asked.nodes or NODES, asked.gpus_per_node, folder=Path.cwd())
    output.end_progress()
    healthy = not any(one.severity == ERROR for one in found)
    if asked.json:
        document = {"schema_version": output.SCHEMA_VERSION, "launcher": asked.launcher, "healthy": healthy}
        output.emit_json({**document, "items": codec.to_builtins(found)})
    else:
        for one in found:
            print(printable(f"{one.severity:<8}  {one.what}"))
            for name, text in (("why", one.why), ("do", one.remedy)):
                if text:
                    print(printable(f"          {name}: {text}"))
        print("a job can run" if healthy else "a job would fail")
    if not healthy:
        raise Exit(1)
