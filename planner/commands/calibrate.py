"""`planner calibrate`: measure what predictions rest on, on the GPUs at hand, within a budget."""

from __future__ import annotations

import shlex
import sys
import uuid
from pathlib import Path
from typing import Annotated

import typer

from planner.calibrate import calibration_request as requests
from planner.calibrate.calibrate_process import calibrate as run
from planner.calibrate.calibrate_process import read_records
from planner.calibrate.calibration_report import document, lines
from planner.calibrate.calibration_request import Request
from planner.calibrate.planned_step import PlannedStep
from planner.commands import options
from planner.commands.doctor import budget_s
from planner.io import output
from planner.io.inputs import read_cluster
from planner.io.output import warn
from planner.question.cases import case_of_plan_file, load_case, read_cases
from planner.question.plan_file import require_folder
from simulator.fitting.calibration_fit import with_rates
from topology import codec
from topology.cluster import Cluster
from topology.errors import BadCluster, BadInput, ProbeError, UserError
from topology.probe.from_machine import probe_machine
from topology.profile.profile import Profile, read_profile
from topology.profile.store import add_to_store, merge, read_stored, store_folder, with_named_runs


def calibrate(
    cluster: Annotated[
        str, typer.Option("--cluster", help="What this machine is: local, a catalogue name or a cluster file.")
    ] = "local",
    out: Annotated[Path | None, typer.Option("--out", help="Profile to write; one that exists is added to.")] = None,
    budget: Annotated[str, typer.Option("--budget", help="Time for measuring, such as 60s or 10m.")] = "60s",
    wanted: Annotated[
        list[Path] | None,
        typer.Option(
            "--for", help="Plan or case file: measure exactly what it runs and the profile lacks; again for more."
        ),
    ] = None,
    runtime: Annotated[
        list[str] | None,
        typer.Option("--runtime", help="Measure this runtime's own costs on one and two layers; again for more."),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="How many GPUs to use; default all.")] = None,
    operators: Annotated[
        bool, typer.Option("--operators/--no-operators", help="Measure the spread of operators.")
    ] = True,
    collectives: Annotated[bool, typer.Option("--collectives/--no-collectives", help="Measure collectives.")] = True,
    text: Annotated[
        Path | None, typer.Option("--text", help="torchtitan's tokenizer/ and c4_test/, to load data as it does.")
    ] = None,
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="Also keep the samples among this user's data.")
    ] = True,
    allow_busy: Annotated[bool, typer.Option("--allow-busy", help="Measure though others use the GPUs.")] = False,
    device: Annotated[str, typer.Option("--device", hidden=True)] = "cuda",
    json: options.Json = False,
) -> None:
    """Measure operators, launch overheads, collectives, contention, overlap and layers; fit; say how well that predicts.

    What the profile has already is not measured again, so a run that was cut short is continued by the same command.
    Exit code 1 when there is no GPU to measure.
    """
    seconds = budget_s(budget)
    if out is not None:
        require_folder(out)
    if device not in {"cuda", "cpu"}:
        raise UserError(f"--device is {device!r}", remedy="leave it out")
    steps = _steps(wanted or [])
    machine, kind, indices, links = _machine(cluster, gpus, device)
    before = _known(out, kind, store=store)
    request = _request(steps, runtime or [], len(indices), operators=operators, collectives=collectives)
    needed = requests.missing_from(requests.shrink(request) if device == "cpu" else request, before)
    if needed.empty and before is not None:
        warn("the profile has all of it already: nothing was measured")
        _answer(before, before, out, links, json=json)
        return
    records = (out.with_name(out.name + ".partial") if out is not None else _scratch()).absolute()
    records.parent.mkdir(parents=True, exist_ok=True)
    try:
        found = run(
            needed,
            indices,
            budget_s=seconds,
            machine=machine,
            gpu=kind,
            records=records,
            command=shlex.join(["planner", "calibrate", *map(_without_folder, sys.argv[2:])]),
            device=device,
            allow_busy=allow_busy,
            text=str(text.absolute()) if text is not None else "",
        )
    except (KeyboardInterrupt, ProbeError):
        part = read_records(records)
        if part is not None and part.calibrated and _save(_whole(part, before, links), part, out, records, store=store):
            warn("what had been measured was saved")
        raise
    whole = _whole(found, before, links)
    saved = _save(whole, found, out, records, store=store)
    _answer(found, whole, out if saved else None, links, json=json)
    if not saved:
        raise typer.Exit(1)


def _request(
    steps: list[PlannedStep], runtimes: list[str], gpus: int, *, operators: bool, collectives: bool
) -> Request:
    """Return what to measure: the operators and layers of plans, or without plans what any plan needs; and runtimes."""
    parts = [requests.exact_request(steps, gpus=gpus)] if steps else []
    parts += [requests.runtime_request(name, gpus=gpus) for name in runtimes]
    if operators and not steps:
        parts.append(requests.typical_request())
    if not steps:
        parts.append(requests.machine_request(gpus=gpus, collectives=collectives))
    return requests.merge_requests(*parts)


def _without_folder(word: str) -> str:
    """Return a word of the command line without the folders in it: profiles are shared, home directories are not."""
    option, equals, value = word.partition("=")
    return f"{option}={Path(value).name}" if equals and "/" in value else Path(word).name if "/" in word else word


def _steps(files: list[Path]) -> list[PlannedStep]:
    """Return the plans of plan files and case files."""
    cases = []
    for path in files:
        data = codec.read_json(path)
        if isinstance(data, dict) and "fingerprints" in data:
            cases.append(case_of_plan_file(path))
        else:
            cases += [load_case(raw) for raw in read_cases(path)[0]]
    return [
        PlannedStep(
            model=case.question.model, plan=case.plan, workload=case.question.workload, runtime=case.question.runtime
        )
        for case in cases
    ]


def _machine(name: str, gpus: int | None, device: str) -> tuple[str, str, list[int], Cluster | None]:
    """Return the machine's name, the catalogue name of its GPU, which of its GPUs to use, and its links.

    What is measured is always this machine; `name` says what it is. Raises ProbeError without a GPU.
    """
    if device == "cpu":
        return "stand-in", "cpu", list(range(gpus or 2)), None
    here = probe_machine()
    if not here.gpu_count:
        raise ProbeError(
            "there is no GPU to measure",
            why="neither NVML nor nvidia-smi shows one",
            remedy="run this on the machine whose profile you want",
        )
    found: Cluster = here if name == "local" else read_cluster(name)
    if found.slowest_kind.name != here.slowest_kind.name:
        raise BadCluster(
            f"{name} has {found.slowest_kind.title}, this machine has {here.slowest_kind.title}",
            why="times of one GPU model say little about another",
            remedy="--cluster local",
        )
    indices = [gpu.index for gpu in here.groups[0].node.gpus if gpu.healthy]
    return found.name, found.slowest_kind.name, indices[:gpus], found


def _known(out: Path | None, kind: str, *, store: bool) -> Profile | None:
    """Return what has been measured before: in the file that is to be written, and in the store."""
    if out is not None and out.exists():
        found = read_profile(out)
        if found.gpu.casefold() != kind.casefold():
            raise BadInput(
                f"{out} is a profile of {found.gpu}, this machine has {kind}",
                remedy="name another file with --out",
            )
        return found
    return read_stored(kind, tell=warn) if store and out is None else None


def _whole(found: Profile, before: Profile | None, links: Cluster | None) -> Profile:
    """Put what was found to what was known, and fit the rates of overlap to both."""
    whole = with_named_runs(found) if before is None else merge(before, found)
    if links is not None and not whole.overlap_rates:
        whole = with_rates(whole, links)
    return whole


def _save(whole: Profile, found: Profile, out: Path | None, records: Path, *, store: bool) -> bool:
    """Write the profile, and add what was found to the store. Where either fails the `records` stay, and False is returned."""
    errors = []
    if out is not None:
        errors.append(output.attempt(lambda: codec.write_text(out, codec.to_json(whole) + "\n")))
    if store and found.gpu != "cpu":
        errors.append(output.attempt(lambda: add_to_store(found, tell=warn)))
    for error in filter(None, errors):
        warn(f"warning: {error}\n  the records are in {records}")
    if not any(errors):
        records.unlink(missing_ok=True)
    return not any(errors)


def _scratch() -> Path:
    """Return a file for the records of this calibration alone: two may run at once."""
    return store_folder() / f"calibration.{uuid.uuid4().hex[:8]}.partial"


def _answer(found: Profile, whole: Profile, out: Path | None, links: Cluster | None, *, json: bool) -> None:
    if json:
        output.emit_json(document(found, whole, links))
        return
    for line in lines(found, whole, links):
        print(output.printable(line))
    if out is not None:
        print(output.printable(f"saved {out}"))
