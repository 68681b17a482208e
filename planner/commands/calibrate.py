"""`planner calibrate`: measure costs of predictions on the present GPUs within a time budget."""

from __future__ import annotations

import shlex
import sys
import time
import uuid
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from click.exceptions import Exit

from planner.calibrate.agenda import Agenda, Wanted, agenda_for
from planner.calibrate.calibrate_process import calibrate as run
from planner.calibrate.calibrate_process import read_records, time_host
from planner.calibrate.calibration_report import agenda_document, announced, document, lines, what_is_left
from planner.calibrate.layer_runs import typical_steps
from planner.calibrate.planned_step import PlannedStep
from planner.commands.doctor import budget_s
from planner.io import output
from planner.io.inputs import read_cluster
from planner.io.output import warn
from planner.io.printable import printable
from planner.question.cases import case_of_plan_file, load_case, read_cases
from planner.question.flags import Flags, flags_of_question
from planner.question.plan_file import require_folder
from planner.requests.machines import Calibrate
from planner.search.answer import answer
from planner.search.plan_space.candidates import Bounds
from planner.search.plan_space.stated import exactly
from planner.search.search import SearchOptions
from simulator.config.runtime import DEFAULT_RUNTIME
from simulator.fitting.calibration_fit import calibrated, with_rates
from simulator.fitting.host_fit import host_alone
from topology import codec
from topology.catalog.platform import take_gpus
from topology.cluster import Cluster
from topology.errors import BadCluster, BadInput, PlannerError, ProbeError, UserError
from topology.probe.from_machine import probe_machine
from topology.profile.profile import Profile, read_profile
from topology.profile.store import add_to_store, current_samples, merge, read_stored, store_folder, with_named_runs
from topology.rates.reach import require_plannable
from topology.units import MIB

LEAST_S = 1.0  # least seconds left for measuring
PLANS = 6  # plans taken as possible winners
LEAST_FREE_BYTES = 4 * MIB
SEARCH_S = 20.0  # for finding them
TYPICAL_RUNTIME = "meshwright"  # its typical plans are measured if nothing is named
OF_A_QUESTION = {
    "seq_len": "--seq-len",
    "global_batch": "--global-batch",
    "micro_batch": "--micro-batch",
    "framework": "--framework",
    "compile_model": "--compile",
    "param_dtype": "--param-dtype",
    "compute_dtype": "--compute-dtype",
}
HOST_FIRST_S = 90.0  # with a smaller budget, narrow layers on the GPU show the host instead
STAND_IN = "dgx-h100"  # the machine whose predictions order the jobs of a dry run


def calibrate(asked: Calibrate) -> None:
    """Print what `planner calibrate` answers."""
    seconds = budget_s(asked.budget)
    if asked.out is not None:
        require_folder(asked.out)
    if asked.device not in {"cuda", "cpu"}:
        raise UserError(f"--device is {asked.device!r}", remedy="leave it out")
    _refuse_unused(asked)
    steps = _steps(asked.wanted or [])
    machine = (
        _elsewhere(asked.cluster, asked.gpus, asked.gpu)
        if (asked.dry_run or asked.host_only) and asked.cluster != "local"
        else _machine(asked.cluster, asked.gpus, asked.gpu, asked.device)
    )
    links, kind, count = machine.links, machine.gpu, len(machine.indices)
    records = (asked.out.with_name(asked.out.name + ".partial") if asked.out is not None else _scratch()).absolute()
    if not asked.dry_run:
        output.require_room(records.parent, LEAST_FREE_BYTES, "records and the profile")
    before = _known(asked.out, kind, links, store=asked.store)
    if asked.host_only:
        _host_only(asked, machine, before, records)
        return
    cut_short = _cut_short(records, kind)
    began = time.monotonic()
    first = not asked.dry_run and asked.device != "cpu" and seconds >= HOST_FIRST_S
    host = _host_first(machine, before) if first else None
    seconds = max(seconds - (time.monotonic() - began), LEAST_S)
    on = take_gpus(links or read_cluster(STAND_IN), count)
    require_plannable(on)
    agenda = agenda_for(
        _question(asked, asked.cluster if links is not None else STAND_IN, steps, count),
        on,
        _joined(before, cut_short, host),
        gpus=count,
        budget_s=seconds,
        # Samples of the host alone do not count here: they change predictions without narrowing them, so on a slow host
        # all time would go to layers that wait for it and none to the kernels of wide ones.
        calibration=calibrated(before, on) if links is not None else None,
        operators=asked.operators,
        collectives=asked.collectives,
        stand_in=asked.device == "cpu",
    )
    if asked.dry_run:
        _say(agenda, seconds, before or Profile(machine=machine.name, gpu=kind), links, json=asked.json)
        return
    if not agenda.chosen and before is not None and cut_short is None:
        warn("the profile has all of it already: nothing was measured")
        _answer(before, before, agenda, asked.out, links, json=asked.json)
        return
    for line in announced(agenda, seconds):
        warn(line)
    try:
        found = _measure(asked, agenda, machine, records, seconds)
    except (KeyboardInterrupt, ProbeError):
        part = read_records(records)
        if (
            part is not None
            and part.calibrated
            and _save(_whole(part, before, links), part, asked.out, records, store=asked.store)
        ):
            warn("what had been measured was saved")
        raise
    whole = _whole(found if host is None else merge(host, found), before, links)
    saved = _save(whole, found, asked.out, records, store=asked.store)
    _answer(found, whole, agenda, asked.out if saved else None, links, json=asked.json)
    if not saved:
        raise Exit(1)


def _joined(*profiles: Profile | None) -> Profile | None:
    """Return one profile of all given ones; later ones override."""
    there = [one for one in profiles if one is not None]
    return reduce(merge, there) if there else None


def _host_first(machine: Machine, before: Profile | None) -> Profile | None:
    """Return a profile of layers on the CPU alone, or None if known or not measurable."""
    if before is not None and host_alone(before.host) is not None:
        return None
    warn("first the host alone: layers on its CPU, plain and on DTensors")
    return time_host(machine=machine.name, gpu=machine.gpu, command=_command())


def _host_only(asked: Calibrate, machine: Machine, before: Profile | None, records: Path) -> None:
    """Time the host, and print and save the result. Raises ProbeError where torch cannot run here."""
    found = time_host(machine=machine.name, gpu=machine.gpu, command=_command())
    seen = None if found is None else host_alone(found.host)
    if found is None or seen is None:
        raise ProbeError(
            "the host was not timed",
            why="the measuring process failed; its words are above",
            remedy="install torch, which layers are run with: pip install torch",
        )
    whole = _whole(found, before, machine.links)
    saved = _save(whole, found, asked.out, records, store=asked.store)
    if asked.json:
        output.emit_json(document(found, whole, machine.links) | {"host": codec.to_builtins(seen)})
    else:
        torch = found.versions.get("torch", "")
        print(f"host      takes {seen.speed:.2f} times as long for a layer as the hosts that descriptions tell of")
        print(
            f"DTensor   {seen.dtensors:.2f} times as long for dispatching a layer of tensor parallelism (torch {torch})"
        )
        print("source    measured on the CPU alone; --profile uses it for plans that wait for their host")
        if saved and asked.out is not None:
            print(printable(f"saved {asked.out}"))
    if not saved:
        raise Exit(1)


def _command() -> str:
    return shlex.join(["planner", "calibrate", *map(_without_folder, sys.argv[2:])])


def _say(agenda: Agenda, seconds: float, known: Profile, links: Cluster | None, *, json: bool) -> None:
    """Print the planned measurements."""
    if json:
        output.emit_json(agenda_document(agenda, known, links))
        return
    for line in announced(agenda, seconds):
        print(printable(line))


def _measure(asked: Calibrate, agenda: Agenda, machine: Machine, records: Path, seconds: float) -> Profile:
    """Do the jobs of the agenda. Raises as `calibrate_process.calibrate` does."""
    return run(
        agenda.jobs(),
        machine.indices,
        budget_s=seconds,
        machine=machine.name,
        gpu=machine.gpu,
        records=records,
        command=_command(),
        device=asked.device,
        allow_busy=asked.allow_busy,
        text="" if asked.text is None else str(asked.text.absolute()),
    )


def _refuse_unused(asked: Calibrate) -> None:
    """Raise UserError if an option refers to a question that is not asked, or if two options ask different
    questions.
    """
    if asked.model is None:
        for name, flag in OF_A_QUESTION.items():
            if getattr(asked, name) is not None:
                raise UserError(f"{flag} is about a question, and none is asked", remedy="--model llama3-8b")
    for name, flag in (("wanted", "--for"), ("runtime", "--runtime")):
        if asked.model is not None and getattr(asked, name):
            raise UserError(f"--model and {flag} both say what to measure for", remedy="one after the other")


def _question(asked: Calibrate, cluster: str, steps: list[PlannedStep], gpus: int) -> Wanted:
    """Return the targets: plans that could win, those of files, or typical ones of runtimes."""
    if asked.model is None:
        names = asked.runtime or ([] if steps else [TYPICAL_RUNTIME])
        typical = [step for name in names for step in typical_steps(name, gpus)]
        return Wanted(steps=(*steps, *typical), everything=bool(typical))
    flags = flags_of_question(asked, cluster=cluster, gpu=asked.gpu, gpus=(gpus,))
    return Wanted(steps=_leading(flags, asked.framework or DEFAULT_RUNTIME, asked.micro_batch), choice=True)


def _leading(flags: Flags, framework: str, micro_batch: int | None) -> tuple[PlannedStep, ...]:
    """Return the steps of the plans that could win a question, predicted without measurements."""
    bounds = Bounds(stated={} if micro_batch is None else {"micro_batch_size": exactly(micro_batch)})
    wanted = SearchOptions(top=PLANS, bounds=bounds, simulate=False, time_limit_s=SEARCH_S)
    try:
        result = answer(flags, framework, wanted, progress=output.progress)
    finally:
        output.end_progress()
    question = result.question
    return tuple(
        PlannedStep(model=question.model, plan=one.plan, workload=question.workload, runtime=question.runtime)
        for one in result.plans
    )


def _without_folder(word: str) -> str:
    """Return an argument without its folders: profiles are shared, home directories are private."""
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
    return [PlannedStep.of(case.question, case.plan) for case in cases]


class Machine(NamedTuple):
    """The machine to be measured: the catalogue name of its GPU, the indices used, and its links, except on a CPU."""

    name: str
    gpu: str
    indices: list[int]
    links: Cluster | None


def _machine(name: str, gpus: int | None, gpu: str | None, device: str) -> Machine:
    """Return this machine, with the GPU that `name` states. Raises ProbeError without a GPU."""
    if device == "cpu":
        return Machine("stand-in", "cpu", list(range(gpus or 2)), None)
    here = probe_machine()
    if not here.gpu_count:
        raise ProbeError(
            "there is no GPU to measure",
            why="neither NVML nor nvidia-smi shows one",
            remedy=(
                "run this on the machine whose profile you want; --dry-run --cluster dgx-h100, say, lists what would be"
                " measured there, and --host-only --cluster dgx-h100 times this host alone"
            ),
        )
    found: Cluster = here if name == "local" else read_cluster(name, gpu=gpu)
    if found.slowest_kind.name != here.slowest_kind.name:
        raise BadCluster(
            f"{name} has {found.slowest_kind.title}, this machine has {here.slowest_kind.title}",
            why="times of one GPU model say little about another",
            remedy="--cluster local",
        )
    indices = [gpu.index for gpu in here.groups[0].node.gpus if gpu.healthy]
    return Machine(found.name, found.slowest_kind.name, indices[:gpus], found)


def _elsewhere(name: str, gpus: int | None, gpu: str | None) -> Machine:
    """Return a machine that is not probed: from the catalogue, or from a file."""
    found = read_cluster(name, gpu=gpu)
    return Machine(found.name, found.slowest_kind.name, list(range(found.gpu_count))[:gpus], found)


def _known(out: Path | None, kind: str, links: Cluster | None, *, store: bool) -> Profile | None:
    """Return earlier measurements: from the output file, and from the store. A new file takes from the store only
    kernels of the same GPU and driver, which do not depend on host or links.
    """
    if out is not None and out.exists():
        found = read_profile(out)
        if found.gpu.casefold() != kind.casefold():
            raise BadInput(
                f"{out} is a profile of {found.gpu}, this machine has {kind}", remedy="name another file with --out"
            )
        return found
    stored = read_stored(kind, tell=warn) if store else None
    if stored is None or out is None:
        return stored
    drivers = [one.what.removeprefix("driver ") for one in (links.findings if links else ()) if one.code == "driver"]
    kernels = current_samples(stored).operators if stored.driver in drivers else ()
    return replace(stored.with_samples(lambda _: ()), operators=kernels) if kernels else None


def _cut_short(records: Path, kind: str) -> Profile | None:
    """Return the measurements of a calibration that was killed before it wrote its profile; this calibration continues
    its records.
    """
    try:
        found = read_records(records)
    except PlannerError as error:
        aside = records.with_name(records.name + ".damaged")
        records.replace(aside)
        warn(f"warning: {error}\n  the records were set aside: {aside}")
        return None
    if found is None or found.gpu.casefold() != kind.casefold():
        return None
    warn("going on with what was measured before the last calibration was cut short")
    return found


def _whole(found: Profile, before: Profile | None, links: Cluster | None) -> Profile:
    """Merge new measurements into the known ones, and fit the rates of overlap to both."""
    whole = with_named_runs(found) if before is None else merge(before, found)
    if links is not None and not whole.overlap_rates:
        whole = with_rates(whole, links)
    return whole


def _save(whole: Profile, found: Profile, out: Path | None, records: Path, *, store: bool) -> bool:
    """Write the profile, and add the new measurements to the store. If either fails, the `records` are kept and False
    is returned.
    """
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
    """Return a file for the records of this calibration only: two may run at once."""
    return store_folder() / f"calibration.{uuid.uuid4().hex[:8]}.partial"


def _answer(
    found: Profile, whole: Profile, agenda: Agenda, out: Path | None, links: Cluster | None, *, json: bool
) -> None:
    if json:
        output.emit_json(document(found, whole, links) | agenda_document(agenda, whole, links))
        return
    for line in [*lines(found, whole, links), *what_is_left(agenda, whole, links)]:
        print(printable(line))
    if out is not None:
        print(printable(f"saved {out}"))
