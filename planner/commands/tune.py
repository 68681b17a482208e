"""`planner tune`: try the plans that could be best for real, until nothing better is likely."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.live import Live

from planner.commands.flags import options, tune_flags
from planner.io import output
from planner.io.inputs import measurements
from planner.io.printable import printable
from planner.question.flags import Flags
from planner.question.plan_file import PlanFile, plan_file, refuse_overwrite, save_plan
from planner.runs.apply_process import require_torch
from planner.runs.launchers import submit as submit_job
from planner.tune import text
from planner.tune.candidates import Candidates
from planner.tune.document import tune_document
from planner.tune.history import history
from planner.tune.learned import add_trials
from planner.tune.loop import View
from planner.tune.report import to_html
from planner.tune.sessions.job import TuneJob
from planner.tune.sessions.session import require_device, run_session, shown
from planner.tune.sessions.start import (
    BUDGET,
    job_settings,
    recorded_request,
    require_agreed,
    seconds_of,
    trial_settings,
    trials_recorded_for,
    tuning_request,
)
from planner.tune.state import State, TuningRequest, read_state, write_new
from planner.tune.trials import Runner
from topology import codec
from topology.errors import PlannerError, UserError
from topology.profile.profile import read_profile

DEVICES = ("cuda", "cpu")
OBJECTIVES = ("time", "throughput", "cost")
WITHIN_PERCENT = 1.0


def tune(
    model: tune_flags.Model = None,
    cluster: tune_flags.Cluster = "local",
    gpus: tune_flags.Gpus = None,
    seq_len: options.SeqLen = 8192,
    global_batch: options.GlobalBatch = None,
    framework: tune_flags.Framework = "meshwright",
    objective: tune_flags.Objective = "time",
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    compute_dtype: options.ComputeDtype = None,
    budget: tune_flags.Budget = None,
    trials: tune_flags.Trials = None,
    within: tune_flags.Within = None,
    profile: options.Profile = None,
    strict: options.Strict = False,
    device: tune_flags.Device = "cuda",
    steps: tune_flags.Steps = 10,
    trial_limit: tune_flags.TrialLimit = "2m",
    allow_busy: tune_flags.AllowBusy = False,
    command: tune_flags.Command = None,
    metric: tune_flags.Metric = None,
    recorded: tune_flags.Recorded = None,
    case_id: tune_flags.CaseId = None,
    state: tune_flags.State = None,
    resume: tune_flags.Resume = None,
    launcher: tune_flags.Launcher = "local",
    each: tune_flags.Each = False,
    job_name: tune_flags.JobName = "meshwright-tune",
    image: tune_flags.Image = None,
    submit: tune_flags.Submit = False,
    show: tune_flags.Show = False,
    learn: tune_flags.Learn = None,
    html: tune_flags.Html = None,
    out: tune_flags.Out = None,
    force: tune_flags.Force = False,
    json: options.Json = False,
) -> None:
    """Try plans for real, the most promising per second first, and let each trial correct what is predicted of all others.

    Ends when no untried plan is likely (5 %) to be better by more than --within, or with the budget. A trial that fails,
    hangs or runs out of memory is recorded with its cause. --resume continues a state file, on any such machine.
    """
    given = locals()  # first of all, so that it holds the arguments and nothing else
    _refuse(given)
    path, known, runner = _new_session(given) if resume is None else _continued(given)
    if launcher != "local" and not each:
        _write_job(
            TuneJob(request=known.request, state=path, launcher=launcher, name=job_name, image=image),
            submit=submit,
            json=json,
        )
        return
    if runner is None and not show and known.request.how == "executor":
        require_torch()
        require_device(known.request)
    view = shown(known) if show else _run(path, known, runner, budget, trial_limit, allow_busy=allow_busy)
    learn = learn or (Path(known.request.settings["learn"]) if "learn" in known.request.settings else None)
    _answer(known, view, path, learn=None if show else learn, html=html, out=out, force=force, json=json)


def _continued(given: dict[str, Any]) -> tuple[Path, State, Runner | None]:
    """Return the tuning that `--resume` continues, with the limits that are given anew."""
    if any(given[name] is not None for name in ("model", "recorded", "state")):
        raise UserError("--resume continues what its file says", remedy="leave --model, --recorded and --state out")
    known, trials, within = read_state(given["resume"]), given["trials"], given["within"]
    if not given["show"]:
        require_agreed(known, given["command"])
    runner = trials_recorded_for(known) if known.request.how == "recorded" else None
    request = replace(
        known.request,
        most_trials=trials or known.request.most_trials,
        within=known.request.within if within is None else within / 100,
    )
    return given["resume"], replace(known, request=request), runner


def _new_session(given: dict[str, Any]) -> tuple[Path, State, Runner | None]:
    """Write the state file of a new tuning and return it."""
    path = given["state"] or Path(f"meshwright-tune-{datetime.now().astimezone():%Y%m%d-%H%M%S}") / "state.jsonl"
    if given["state"] is not None:
        refuse_overwrite(path, force=given["force"])
    runner: Runner | None = None
    by = WITHIN_PERCENT if given["within"] is None else given["within"]
    if given["recorded"] is not None:
        request, plans, runner = recorded_request(
            given["recorded"], given["case_id"], given["budget"], given["trials"], by
        )
    else:
        request, plans = _request(given, by)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_new(path, request, plans, force=given["force"])
    return path, State(request=request, candidates=plans, trials=(), cut_short=()), runner


def _request(given: dict[str, Any], within_percent: float) -> tuple[TuningRequest, Candidates]:
    """Return the question that the flags ask, and its candidates."""
    flags = Flags(
        model=given["model"],
        cluster=given["cluster"],
        gpus=None if given["gpus"] is None else (given["gpus"],),
        seq_len=given["seq_len"],
        global_batch=given["global_batch"],
        runtime={
            "compile": given["compile_model"],
            "param_dtype": given["param_dtype"],
            "compute_dtype": given["compute_dtype"],
        },
    )
    framework, learn = given["framework"], given["learn"]
    fields = {
        "budget_s": seconds_of(given["budget"] or BUDGET, "--budget"),
        "within": within_percent / 100,
        "most_trials": given["trials"],
        "device": given["device"],
        "steps": given["steps"],
        **(
            job_settings(given["launcher"], given["job_name"], given["image"])
            if given["each"]
            else trial_settings(framework, given["command"], given["metric"])
        ),
    }
    if learn is not None:
        read_profile(learn)  # before trials are made for it
        fields["settings"] = {**fields.get("settings", {}), "learn": str(learn)}
    return tuning_request(flags, framework, measurements(given["profile"], strict=given["strict"]), fields)


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
        within_ = known.request.within
        found = history(view, within=within_, unknown_machine=known.request.unknown_machine)
        codec.write_text(html, to_html(view, found, within=within_))
    unsaved = (
        output.attempt(lambda: save_plan(_best_file(known, view), out, force=force)) if out and view.best else None
    )
    if json:
        output.emit_json(
            tune_document(
                view, within=known.request.within, state=str(path), learned=None if learn is None else str(learn)
            )
        )
    else:
        for line in text.lines(view, within=known.request.within):
            print(printable(line))
        print(printable(f"state     {path}: planner tune --resume {path} goes on"))
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
    submitted = submit_job(written.submit) if submit else None
    if json:
        output.emit_json(
            {
                "schema_version": output.SCHEMA_VERSION,
                "launcher": job.launcher,
                "state": str(job.state),
                "file": str(written.path),
                "text": written.text,
                "submit": list(written.submit),
                "submitted": submitted,
                "advice": list(written.advice),
            }
        )
        return
    for line in (f"wrote {written.path}", *((submitted,) if submitted else ()), *written.advice):
        print(printable(line))


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
                most_trials=known.request.most_trials,
                within=known.request.within,
                trial_limit_s=limit_s,
                allow_busy=allow_busy,
                tell=tell,
                show=show,
                runner=runner,
            )
        except KeyboardInterrupt:
            print(printable(f"planner tune --resume {path} goes on"), file=sys.stderr)
            raise


def _best_file(known: State, view: View) -> PlanFile:
    """Return the best measured plan as a plan file, with what was predicted of it before the trials."""
    if view.best is None:
        raise PlannerError("no plan was measured")
    one = view.candidates.plans[view.best.row]
    return plan_file(known.request.question(), one.plan, one.estimate)
