"""`planner probe`: describe the machine, from itself or from captured files."""

from __future__ import annotations

from pathlib import Path

from planner.explain.tables import cluster_line
from planner.io import output
from planner.io.inputs import read_cluster
from planner.io.printable import printable
from planner.pictures.topology import topology
from planner.question.plan_file import refuse_overwrite
from planner.requests.machines import ClusterFormat, Probe
from topology import codec
from topology.catalog.cluster_file import is_said, save_cluster
from topology.cluster import Cluster
from topology.codec import read_path_or_stdin
from topology.errors import BadCluster, UserError
from topology.export import nccl as export_nccl
from topology.export import simulators as export_topology
from topology.probe import report
from topology.probe.from_machine import probe_machine
from topology.probe.from_text import probe_text
from topology.rates.reach import plannable
from topology.redact import redact_cluster


def probe(asked: Probe) -> None:
    """Print what `planner probe` answers."""
    for path in (asked.out, asked.svg):
        if path is not None:
            refuse_overwrite(path, force=asked.force)
    found = probe_cluster(asked.sources, asked.gpu)
    cluster = redact_cluster(found) if asked.redact else found
    if asked.to is not None:
        _export(cluster, asked.to, asked.out)
    elif asked.json:
        output.emit_json({"schema_version": output.SCHEMA_VERSION, **report.probe_json(cluster)})
    else:
        _print(cluster, explain=asked.explain)
    if asked.svg is not None:
        _draw(cluster, asked.svg)
    if asked.out is not None and asked.to is None:
        if not cluster.gpu_count:
            raise BadCluster("nothing was saved: no GPU was found", remedy="planner probe --explain says why")
        save_cluster(cluster, asked.out)
        if not asked.json:
            print(f"saved {asked.out}")
            if plannable(cluster):
                print(f"next: planner suggest --cluster {asked.out}")


def _draw(cluster: Cluster, path: Path) -> None:
    if not cluster.gpu_count:
        raise BadCluster("there is nothing to draw: no GPU was found", remedy="planner probe --explain says why")
    codec.write_text(path, topology(cluster))
    output.warn(f"saved {path}")


def _export(cluster: Cluster, to: ClusterFormat, out: Path | None) -> None:
    match to:
        case ClusterFormat.NCCL_XML:
            text = export_nccl.to_nccl_xml(cluster)
        case ClusterFormat.ASTRA_SIM:
            text = export_topology.to_astra_sim(cluster)
        case ClusterFormat.SIMAI:
            text = export_topology.to_simai(cluster)
    if out is None:
        print(text, end="" if text.endswith("\n") else "\n")
    else:
        codec.write_text(out, text)
        print(f"saved {out}")


def probe_cluster(sources: list[str] | None, gpu: str | None) -> Cluster:
    """Return the machine of captured files, or this machine if there are none."""
    if sources and len(sources) == 1 and _named(sources[0]):
        if gpu is not None:
            raise UserError("--gpu names what a catalogue cluster already says", remedy="leave --gpu out")

        return read_cluster(sources[0])
    if not sources:
        return probe_machine(gpu=gpu)
    return probe_text([(name, read_path_or_stdin(name)[0]) for name in sources], gpu=gpu)


def _named(source: str) -> bool:
    return is_said(source) and not Path(source).exists()


def _print(cluster: Cluster, *, explain: bool) -> None:
    if explain or not cluster.gpu_count:
        print(printable(report.explain(cluster)))
        return
    print(printable(cluster_line(cluster)))
    for finding in cluster.findings:
        print(printable(f"{finding.severity}: {finding.what}"))
        for label, text in (("why", finding.why), ("so", finding.consequence), ("do", finding.remedy)):
            if text:
                print(printable(f"  {label}: {text}"))
