"""`planner tune`: try the plans that could be best for real, until nothing better is likely."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from planner.commands.flags import options
from planner.io import output
from planner.io.inputs import measurements
from planner.question.flags import Flags
from planner.question.plan_file import PlanFile, plan_file, refuse_overwrite, save_plan
from planner.runs.apply_process import require_torch
from planner.runs.launchers import submit as submit_job
from planner.tune import text
from planner.tune.document import tune_document
from planner.tune.history import history
from planner.tune.learned import add_trials
from planner.tune.loop import View
from planner.tune.report import to_html
from planner.tune.sessions.job import TuneJob
from planner.tune.sessions.session import require_device, run_session, shown
from planner.tune.sessions.start import (
    BUDGET,
    asked_of,
    how_of,
    jobs_of,
    recorded_of,
    recorded_twin,
    require_agreed,
    seconds_of,
)
from planner.tune.state import State, read_state, write_new
from planner.tune.trials import Runner
from topology import codec
from topology.errors import PlannerError, UserError
from topology.profile.profile import read_profile

DEVICES = ("cuda", "cpu")
OBJECTIVES = ("time", "throughput", "cost")
WITHIN_PERCENT = 1.0


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
    launcher: Annotated[
        str, typer.Option("--launcher", help="local, or a job of slurm or trainjob for all trials.")
    ] = "local",
    each: Annotated[
        bool, typer.Option("--each", help="With --launcher: a job for each trial, submitted from here.")
    ] = False,
    job_name: Annotated[str, typer.Option("--job-name", help="Name of a job.")] = "meshwright-tune",
    image: Annotated[str | None, typer.Option("--image", help="Container image of a trainjob.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand the job to sbatch or kubectl.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="With --resume: answer from the state file, and try nothing.")
    ] = False,
    learn: Annotated[
        Path | None, typer.Option("--learn", help="Add what the trials' operators took to this profile of such GPUs.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with pictures to this file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Save the best measured plan to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out and --state replace a file.")] = False,
    json: options.Json = False,
) -> None:
    """Try plans for real, the most promising per second first, and let each trial correct what is predicted of all others.

    Ends when no untried plan is likely (5 %) to be better by more than --within, or with the budget. A trial that fails,
    hangs or runs out of memory is recorded with its cause. --resume continues a state file, on any such machine.
    """
    _refuse(locals())
    runner: Runner | None = None
    by = WITHIN_PERCENT if within is None else within
    if resume is not None:
        if model is not None or recorded is not None or state is not None:
            raise UserError("--resume continues what its file says", remedy="leave --model, --recorded and --state out")
        path, known = resume, read_state(resume)
        if not show:
            require_agreed(known, command)
        if known.asked.how == "recorded":
            runner = recorded_twin(known)
    else:
        path = state or Path(f"meshwright-tune-{datetime.now().astimezone():%Y%m%d-%H%M%S}") / "state.jsonl"
        if state is not None:
            refuse_overwrite(state, force=force)
        if recorded is not None:
            asked, plans, runner = recorded_of(recorded, case_id, budget, trials, by)
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
                "budget_s": seconds_of(budget or BUDGET, "--budget"),
                "within": by / 100,
                "most_trials": trials,
                "device": device,
                "steps": steps,
                **(jobs_of(launcher, job_name, image) if each else how_of(framework, command, metric)),
            }
            if learn is not None:
                read_profile(learn)  # before trials are made for it
                wishes["settings"] = {**wishes.get("settings", {}), "learn": str(learn)}
            asked, plans = asked_of(flags, framework, measurements(profile, strict=strict), wishes)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, asked, plans, force=force)
        known = State(asked=asked, candidates=plans, trials=(), cut_short=())
    if launcher != "local" and not each:
        _write_job(
            TuneJob(asked=known.asked, state=path, launcher=launcher, name=job_name, image=image),
            submit=submit,
            json=json,
        )
        return
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
    learn = learn or (Path(known.asked.settings["learn"]) if "learn" in known.asked.settings else None)
    _answer(known, view, path, learn=None if show else learn, html=html, out=out, force=force, json=json)


def _answer(
    known: State,
    view: View,
    path: Path,
    *,
    learn: Path | None,
    html: Path | None,
    out: Path | None,
    force: bool,
    json: bool,
) -> None:
    """Write what was asked for beside the answer, and show it. Exit code 1 where no plan was measured."""
    if learn is not None:
        for line in add_trials(view.trials, learn):
            output.warn(line)
    if html is not None:
        within_ = known.asked.within
        found = history(view, within=within_, unknown_machine=known.asked.unknown_machine)
        codec.write_text(html, to_html(view, found, within=within_))
    unsaved = (
        output.attempt(lambda: save_plan(_best_file(known, view), out, force=force)) if out and view.best else None
    )
    if json:
        output.emit_json(
            tune_document(
                view, within=known.asked.within, state=str(path), learned=None if learn is None else str(learn)
            )
        )
    else:
        for line in text.lines(view, within=known.asked.within):
            print(output.printable(line))
        print(output.printable(f"state     {path}: planner tune --resume {path} goes on"))
    if unsaved is not None:
        raise unsaved
    if view.best is None:
        raise typer.Exit(1)


def _refuse(given: dict[str, Any]) -> None:
    """Raise UserError for flags that are not known together, and BadInput where an output cannot be written."""
    for wanted in ("out", "html"):
        if given[wanted] is not None:
            refuse_overwrite(given[wanted], force=given["force"])
    launcher, device, objective = given["launcher"], given["device"], given["objective"]
    if launcher == "local" and (given["each"] or given["submit"] or given["image"] is not None):
        raise UserError("--each, --submit and --image are for jobs", remedy="--launcher slurm, say")
    if launcher != "local" and (given["recorded"] is not None or (given["command"] is not None and given["each"])):
        raise UserError(
            "--launcher runs our executor's trials, or one job for a --command", remedy="leave --recorded out"
        )
    if given["show"] and given["resume"] is None:
        raise UserError("--show answers from a state file", remedy="--resume state.jsonl --show")
    if device not in DEVICES:
        raise UserError(f"--device is {device!r}", remedy=f"one of {', '.join(DEVICES)}")
    if objective not in OBJECTIVES:
        raise UserError(
            f"--objective {objective} cannot be tuned for",
            why="trials measure steps; memory and Pareto fronts are for planner suggest",
            remedy=f"one of {', '.join(OBJECTIVES)}",
        )


def _write_job(job: TuneJob, *, submit: bool, json: bool) -> None:
    """Write the job of a whole tuning, and hand it to the scheduler if asked."""
    written = job.written()
    codec.write_text(written.path, written.text)
    said = submit_job(written.submit) if submit else None
    if json:
        output.emit_json(
            {
                "schema_version": output.SCHEMA_VERSION,
                "launcher": job.launcher,
                "state": str(job.state),
                "file": str(written.path),
                "text": written.text,
                "submit": list(written.submit),
                "submitted": said,
                "advice": list(written.advice),
            }
        )
        return
    for line in (f"wrote {written.path}", *((said,) if said else ()), *written.advice):
        print(output.printable(line))


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
