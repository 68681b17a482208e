"""`planner probe`: what the machine is, read from itself or from captured files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from planner.commands.flags import options
from planner.explain.tables import cluster_line
from planner.io import output
from planner.io.inputs import read_cluster
from planner.io.printable import printable
from planner.pictures.topology import topology
from planner.question.plan_file import refuse_overwrite
from planner.question.question import plannable
from topology import codec
from topology.catalog.cluster_file import save_cluster
from topology.catalog.clusters import is_catalog_name
from topology.cluster import Cluster
from topology.codec import read_path_or_stdin
from topology.errors import BadCluster, UserError
from topology.export import nccl as export_nccl
from topology.export import simulators as export_topology
from topology.probe import report
from topology.probe.from_machine import probe_machine
from topology.probe.from_text import probe_text
from topology.redact import redact_cluster


class Export(StrEnum):
    """Formats of other tools: an NCCL topology file, an ASTRA-sim network file, a SimAI edge list."""

    NCCL_XML = "nccl-xml"
    ASTRA_SIM = "astra-sim"
    SIMAI = "simai"


def probe(
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            help="Captured nvidia-smi topo -m, nvlink, p2p or NCCL XML, or a catalogue name; again for more; - for stdin.",
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="GPU model, where the text does not say it (such as h100-sxm).")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Save the cluster to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out and --svg replace a file.")] = False,
    to: Annotated[
        Export | None, typer.Option("--to", help="Print the cluster for another tool instead, or save it with --out.")
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the node and its links to this file.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say in English what is connected how.")] = False,
    redact: options.Redact = False,
    json: options.Json = False,
) -> None:
    """Read the GPUs, links and NICs of this machine, or of files captured on another.

    Tokens that are not understood are reported, never guessed.
    """
    for path in (out, svg):
        if path is not None:
            refuse_overwrite(path, force=force)
    found = probe_cluster(sources, gpu)
    cluster = redact_cluster(found) if redact else found
    if to is not None:
        _export(cluster, to, out)
    elif json:
        output.emit_json({"schema_version": output.SCHEMA_VERSION, **report.probe_json(cluster)})
    else:
        _print(cluster, explain=explain)
    if svg is not None:
        _draw(cluster, svg)
    if out is not None and to is None:
        save_cluster(cluster, out)
        if not json:
            print(f"saved {out}")
            if plannable(cluster):
                print(f"next: planner suggest --cluster {out}")


def _draw(cluster: Cluster, path: Path) -> None:
    if not cluster.gpu_count:
        raise BadCluster("there is nothing to draw: no GPU was found", remedy="planner probe --explain says why")
    codec.write_text(path, topology(cluster))
    output.warn(f"saved {path}")


def _export(cluster: Cluster, to: Export, out: Path | None) -> None:
    match to:
        case Export.NCCL_XML:
            text = export_nccl.to_nccl_xml(cluster)
        case Export.ASTRA_SIM:
            text = export_topology.to_astra_sim(cluster)
        case Export.SIMAI:
            text = export_topology.to_simai(cluster)
    if out is None:
        print(text, end="" if text.endswith("\n") else "\n")
    else:
        codec.write_text(out, text)
        print(f"saved {out}")


def probe_cluster(sources: list[str] | None, gpu: str | None) -> Cluster:
    """Return what captured files say, or this machine where there are none."""
    if sources and len(sources) == 1 and _named(sources[0]):
        if gpu is not None:
            raise UserError("--gpu names what a catalogue cluster already says", remedy="leave --gpu out")

        return read_cluster(sources[0])
    if not sources:
        return probe_machine(gpu=gpu)
    return probe_text([(name, read_path_or_stdin(name)[0]) for name in sources], gpu=gpu)


def _named(source: str) -> bool:
    return is_catalog_name(source) and not Path(source).exists()


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
