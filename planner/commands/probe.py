"""`planner probe`: what the machine is, read from itself or from captured files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.commands import options

if TYPE_CHECKING:
    from topology.cluster import Cluster


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
    json: options.Json = False,
) -> None:
    """Read the GPUs, links and NICs of this machine, or of files captured on another.

    Tokens that are not understood are reported, never guessed.
    """
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.plan_file import refuse_overwrite  # noqa: PLC0415 - as above
    from topology import report  # noqa: PLC0415 - as above

    for path in (out, svg):
        if path is not None:
            refuse_overwrite(path, force=force)
    cluster = read_cluster(sources, gpu)
    if svg is not None:
        _draw(cluster, svg)
    if to is not None:
        _export(cluster, to, out)
        return
    if out is not None:
        from topology.cluster_file import save_cluster  # noqa: PLC0415 - as above

        save_cluster(cluster, out)
    if json:
        output.emit_json({"schema_version": output.SCHEMA_VERSION, **report.probe_json(cluster)})
        return
    _print(cluster, explain=explain)
    if out is not None:
        from planner.costs import plannable  # noqa: PLC0415 - as above

        print(f"saved {out}")
        if plannable(cluster):
            print(f"next: planner suggest --cluster {out}")


def _draw(cluster: Cluster, path: Path) -> None:
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.pictures.topology import topology  # noqa: PLC0415 - as above
    from topology import codec  # noqa: PLC0415 - as above
    from topology.errors import BadCluster  # noqa: PLC0415 - as above

    if not cluster.gpu_count:
        raise BadCluster("there is nothing to draw: no GPU was found", remedy="planner probe --explain says why")
    codec.write_text(path, topology(cluster))
    output.warn(f"saved {path}")


def _export(cluster: Cluster, to: Export, out: Path | None) -> None:
    from topology import codec, export_nccl, export_topology  # noqa: PLC0415 - keeps `--help` light

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


def read_cluster(sources: list[str] | None, gpu: str | None) -> Cluster:
    """Return what captured files say, or this machine where there are none."""
    from topology.codec import read_given  # noqa: PLC0415 - keeps `--help` light
    from topology.errors import UserError  # noqa: PLC0415 - as above
    from topology.probe import probe_text  # noqa: PLC0415 - as above

    if sources and len(sources) == 1 and _named(sources[0]):
        if gpu is not None:
            raise UserError("--gpu names what a catalogue cluster already says", remedy="leave --gpu out")
        from planner.inputs import cluster_of  # noqa: PLC0415 - as above

        return cluster_of(sources[0])
    if not sources:
        from topology.probe_machine import probe_machine  # noqa: PLC0415 - as above

        return probe_machine(gpu=gpu)
    return probe_text([(name, read_given(name)[0]) for name in sources], gpu=gpu)


def _named(source: str) -> bool:
    from topology.catalog import is_catalog_name  # noqa: PLC0415 - keeps `--help` light

    return is_catalog_name(source) and not Path(source).exists()


def _print(cluster: Cluster, *, explain: bool) -> None:
    from planner.output import printable  # noqa: PLC0415 - keeps `--help` light
    from planner.tables import cluster_line  # noqa: PLC0415 - as above
    from topology import report  # noqa: PLC0415 - as above

    if explain or not cluster.gpu_count:
        print(printable(report.explain(cluster)))
        return
    print(printable(cluster_line(cluster)))
    for finding in cluster.findings:
        print(printable(f"{finding.severity}: {finding.what}"))
        for label, text in (("why", finding.why), ("so", finding.consequence), ("do", finding.remedy)):
            if text:
                print(printable(f"  {label}: {text}"))
