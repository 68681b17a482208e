"""`planner tune`: try the plans that could be best for real, until nothing better is likely."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from planner.commands import options
from planner.io import output
from planner.io.inputs import measurements
from planner.question.cases import read_cases
from planner.question.flags import Flags
from planner.question.plan_file import PlanFile, plan_file, refuse_overwrite, save_plan
from planner.runs.apply_process import require_torch
from planner.search.answer import search_question
from planner.tune import text
from planner.tune.candidates import Candidates, candidates_of
from planner.tune.document import tune_document
from planner.tune.history import history
from planner.tune.loop import View
from planner.tune.report import to_html
from planner.tune.runners.command_trials import command_metric, command_words
from planner.tune.runners.twin import Twin, recorded_questions
from planner.tune.session import require_device, run_session, shown
from planner.tune.state import Asked, State, read_state, write_new
from planner.tune.trials import Runner
from simulator.fitting.calibration_fit import Calibrations
from simulator.legality.frameworks import framework_named
from topology import codec
from topology.errors import BadInput, PlannerError, UserError

DEVICES = ("cuda", "cpu")
OBJECTIVES = ("time", "throughput", "cost")
MOST_BUDGET_S = 7 * 86400.0
WITHIN_PERCENT = 1.0
RUN_HERE = ("meshwright", "pytorch", "torchtitan")  # frameworks whose plans our executor runs
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def tune(
    model: Annotated[
        str | None, typer.Option("--model", "--config", help="Shipped model, config.json or its directory.")
    ] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", help="local, or what this machine is: a name or file.")
    ] = "local",
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=1 << 20, help="How many GPUs of it.")] = None,
    seq_len: options.SeqLen = 8192,
    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", min=1, max=1 << 31, help="Sequences in a step; default: a published recipe's."),
    ] = None,
    framework: Annotated[
        str, typer.Option("--framework", help="Whose plans: meshwright (our executor), torchtitan, megatron-lm.")
    ] = "meshwright",
    objective: Annotated[str, typer.Option("--objective", help="time, throughput or cost: one order here.")] = "time",
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="Time for all trials: 90s, 10m, 2h; default 10m.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, max=1000, help="No more than so many trials.")
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            "--within", parser=options.percent, metavar="PERCENT", help="By how much to be better; default 1%."
        ),
    ] = None,
    profile: options.Profile = None,
    strict: options.Strict = False,
    device: Annotated[
        str, typer.Option("--device", help="cuda, or cpu to try plans where times mean little.")
    ] = "cuda",
    steps: Annotated[int, typer.Option("--steps", min=2, max=1000, help="Steps to measure in a trial.")] = 10,
    trial_limit: Annotated[str, typer.Option("--trial-limit", help="Time for one trial, its start included.")] = "2m",
    allow_busy: Annotated[bool, typer.Option("--allow-busy", help="Run though others use the GPUs.")] = False,
    command: Annotated[
        str | None,
        typer.Option("--command", help="What runs a trial: 'torchrun ... {config}'; also {folder} and {gpus}."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric", help="How its output tells steps: jsonl, or a regular expression with (?P<step_s>...)."
        ),
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--recorded", help="Look trials up in these recorded runs (cases), run nothing.")
    ] = None,
    case_id: Annotated[
        str | None, typer.Option("--id", help="A recorded run of the question, where there are several.")
    ] = None,
    state: Annotated[Path | None, typer.Option("--state", help="State file; default: in a new folder here.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Continue the tuning of this state file.")] = None,
    show: Annotated[
        bool, typer.Option("--show", help="With --resume: answer from the state file, and try nothing.")
    ] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with pictures to this file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Save the best measured plan to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out and --state replace a file.")] = False,
    json: options.Json = False,
) -> None:
    """Try plans for real, the most promising per second first, and let each trial correct what is predicted of all others.

    Ends when no untried plan is likely (5 %) to be better by more than --within, or with the budget. A trial that fails,
    hangs or runs out of memory is recorded with its cause. --resume continues a state file, on any such machine.
    """
    for wanted in (out, html):
        if wanted is not None:
            refuse_overwrite(wanted, force=force)
    if show and resume is None:
        raise UserError("--show answers from a state file", remedy="--resume state.jsonl --show")
    if device not in DEVICES:
        raise UserError(f"--device is {device!r}", remedy=f"one of {', '.join(DEVICES)}")
    if objective not in OBJECTIVES:
        raise UserError(
            f"--objective {objective} cannot be tuned for",
            why="trials measure steps; memory and Pareto fronts are for planner suggest",
            remedy=f"one of {', '.join(OBJECTIVES)}",
        )
    runner: Runner | None = None
    by = WITHIN_PERCENT if within is None else within
    if resume is not None:
        if model is not None or recorded is not None or state is not None:
            raise UserError("--resume continues what its file says", remedy="leave --model, --recorded and --state out")
        path, known = resume, read_state(resume)
        if known.asked.how == "recorded":
            runner = _recorded_twin(known)
    else:
        path = state or Path(f"meshwright-tune-{datetime.now().astimezone():%Y%m%d-%H%M%S}") / "state.jsonl"
        if state is not None:
            refuse_overwrite(state, force=force)
        if recorded is not None:
            asked, plans, runner = _recorded(recorded, case_id, budget, trials, by)
        else:
            flags = Flags(
                model=model,
                cluster=cluster,
                gpus=None if gpus is None else (gpus,),
                seq_len=seq_len,
                global_batch=global_batch,
                runtime={"compile": compile_model, "param_dtype": param_dtype},
            )
            wishes = {
                "budget_s": seconds_of(budget or "10m", "--budget"),
                "within": by / 100,
                "most_trials": trials,
                "device": device,
                "steps": steps,
                **_how(framework, command, metric),
            }
            asked, plans = _asked(flags, framework, measurements(profile, strict=strict), wishes)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, asked, plans, force=force)
        known = State(asked=asked, candidates=plans, trials=(), cut_short=())
    if runner is None and not show and known.asked.how == "executor":
        require_torch()
        require_device(known.asked)
    if resume is not None and (trials is not None or within is not None):
        asked = replace(
            known.asked,
            most_trials=trials or known.asked.most_trials,
            within=known.asked.within if within is None else by / 100,
        )
        known = replace(known, asked=asked)
    view = shown(known) if show else _run(path, known, runner, budget, trial_limit, allow_busy=allow_busy)
    if html is not None:
        within_ = known.asked.within
        found = history(view, within=within_, unknown_machine=known.asked.unknown_machine)
        codec.write_text(html, to_html(view, found, within=within_))
    unsaved = (
        output.attempt(lambda: save_plan(_best_file(known, view), out, force=force)) if out and view.best else None
    )
    if json:
        output.emit_json(tune_document(view, within=known.asked.within, state=str(path), learned=None))
    else:
        for line in text.lines(view, within=known.asked.within):
            print(output.printable(line))
        print(output.printable(f"state     {path}: planner tune --resume {path} goes on"))
    if unsaved is not None:
        raise unsaved
    if view.best is None:
        raise typer.Exit(1)


def _how(framework: str, command: str | None, metric: str | None) -> dict[str, Any]:
    """Return what makes the trials, and its settings. Raises UserError where nothing here can."""
    if command is not None:
        command_words(command)
        return {"how": "command", "settings": {"command": command} | ({} if metric is None else {"metric": metric})}
    if metric is not None:
        raise UserError("--metric reads what --command prints", remedy="--command 'torchrun ... {config}'")
    if framework_named(framework).name not in RUN_HERE:
        raise UserError(
            f"trials of {framework} need a command",
            why=f"plans of {', '.join(RUN_HERE)} are run without one",
            remedy="--command 'sh {config}' --metric ..., with a word that says how it prints a step",
        )
    return {"how": "executor"}


def _asked(flags: Flags, framework: str, measured: Calibrations, wishes: dict[str, Any]) -> tuple[Asked, Candidates]:
    """Return what is asked, and the plans that could be the best."""
    if flags.model is None:
        raise UserError("--model is missing", remedy="--model llama3-8b, or --resume a state file")
    question, assumed = search_question(flags, framework, measured)
    for line in assumed:
        output.warn(f"assumed: {line}")
    if wishes["how"] == "command":
        command_metric(wishes["settings"].get("metric"), question.framework.name, question)
    try:
        plans = candidates_of(question, progress=output.progress)
    finally:
        output.end_progress()
    known = question.calibration
    asked = Asked(
        model=question.model,
        cluster=question.cluster,
        workload=question.workload,
        runtime=question.runtime,
        framework=question.framework.name,
        gpus=question.count,
        legal=plans.legal,
        profile=None if known is None else known.profile,
        **wishes,
    )
    return asked, plans


def _recorded(
    path: Path, case_id: str | None, budget: str | None, most: int | None, within: float
) -> tuple[Asked, Candidates, Twin]:
    """Return the question of recorded runs, and the twin that looks its trials up."""
    cases = read_cases(path)[0]
    found = [one for one in recorded_questions(cases) if case_id is None or case_id in one.ids]
    if not found:
        raise BadInput(
            f"{path} has no question of which two plans were measured"
            + (f", with {case_id} among them" if case_id else ""),
            remedy="runs of one question share model, cluster, workload and GPUs",
        )
    one = found[0]
    asked = Asked(
        model=one.question.model,
        cluster=one.question.cluster,
        workload=one.question.workload,
        runtime=one.question.runtime,
        framework=one.question.framework.name,
        gpus=one.candidates.plans[0].plan.gpus,
        budget_s=seconds_of(budget or "10m", "--budget"),
        within=within / 100,
        most_trials=most,
        how="recorded",
        settings={"file": str(path), "id": one.name},
        legal=one.candidates.legal,
    )
    return asked, one.candidates, Twin(recorded=one.recorded)


def _recorded_twin(known: State) -> Twin:
    file, name = known.asked.settings.get("file", ""), known.asked.settings.get("id", "")
    for one in recorded_questions(read_cases(file)[0]):
        if name == one.name:
            return Twin(recorded=one.recorded)
    raise BadInput(f"{file} has no run {name}", why="the state looks its trials up there")


def _run(
    path: Path, known: State, runner: Runner | None, budget: str | None, trial_limit: str, *, allow_busy: bool
) -> View:
    """Run the loop with progress on standard error: a table on a terminal, lines elsewhere."""
    limit_s = seconds_of(trial_limit, "--trial-limit")
    budget_s = seconds_of(budget, "--budget") if budget is not None else None
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    shown = len(known.trials)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        last: list[View] = []

        def show(view: View) -> None:
            nonlocal shown
            last[:] = [view]
            if console.is_terminal:
                live.update(text.progress_table(view), refresh=True)
                return
            for number in range(shown, len(view.trials)):
                output.warn(text.trial_line(view, view.trials[number], number + 1))
            shown = len(view.trials)

        def tell(phase: str) -> None:
            if phase.startswith("warning"):
                output.warn(phase)
            elif console.is_terminal and last:
                live.update(text.progress_table(last[0], phase), refresh=True)

        try:
            return run_session(
                path,
                budget_s=budget_s,
                most_trials=known.asked.most_trials,
                within=known.asked.within,
                trial_limit_s=limit_s,
                allow_busy=allow_busy,
                tell=tell,
                show=show,
                runner=runner,
            )
        except KeyboardInterrupt:
            print(output.printable(f"planner tune --resume {path} goes on"), file=sys.stderr)
            raise


def _best_file(known: State, view: View) -> PlanFile:
    """Return the best measured plan as a plan file, with what was predicted of it before the trials."""
    if view.best is None:
        raise PlannerError("no plan was measured")
    one = view.candidates.plans[view.best.row]
    return plan_file(known.asked.question(), one.plan, one.estimate)


def seconds_of(given: str, flag: str) -> float:
    """Return the seconds of `90`, `90s`, `10m`, `2h`. Raises UserError for anything else, or more than a week."""
    match = re.fullmatch(r"\s*([0-9]{1,7}(?:\.[0-9]{1,3})?)\s*([smh]?)\s*", given[:40])
    seconds = float(match[1]) * UNITS_S[match[2] or "s"] if match else 0.0
    if not 1 <= seconds <= MOST_BUDGET_S:
        raise UserError(f"{flag} is {given[:40]!r}", why="it is 1s to a week, in s, m or h", remedy=f"{flag} 10m")
    return seconds
