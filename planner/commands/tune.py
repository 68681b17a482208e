"""`planner tune`: run the plans that could be best, until nothing better is likely."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from click.exceptions import Exit
from rich.console import Console
from rich.live import Live

from planner.io import output
from planner.io.inputs import measurements
from planner.io.printable import printable
from planner.question.flags import flags_of_question
from planner.question.plan_file import PlanFile, plan_file, refuse_overwrite, save_plan
from planner.requests.runs import Tune
from planner.runs import scheduled
from planner.runs.apply_process import require_torch
from planner.runs.profile_update import add_run_to_profile
from planner.runs.run_report import load_run
from planner.tune import text
from planner.tune.candidates import Candidates
from planner.tune.history import history
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
from planner.tune.text import tune_document
from planner.tune.trials import Runner, Trial
from topology import codec
from topology.errors import PlannerError, UserError
from topology.profile.profile import read_profile

DEVICES = ("cuda", "cpu")
OBJECTIVES = ("time", "throughput", "cost")
WITHIN_PERCENT = 1.0


def tune(asked: Tune) -> None:
    """Print what `planner tune` answers."""
    _refuse(asked)
    path, known, runner = _new_session(asked) if asked.resume is None else _continued(asked, asked.resume)
    if asked.launcher != "local" and not asked.each:
        _write_job(asked, known, path)
        return
    if runner is None and not asked.show and known.request.how == "executor":
        require_torch()
        require_device(known.request)
    _answer(asked, known, shown(known) if asked.show else _run(asked, path, known, runner), path)


def _continued(asked: Tune, resume: Path) -> tuple[Path, State, Runner | None]:
    """Return the tuning that `--resume` continues, with newly given limits."""
    if any(getattr(asked, name) is not None for name in ("model", "recorded", "state")):
        raise UserError("--resume continues what its file says", remedy="leave --model, --recorded and --state out")
    known, trials, within = read_state(resume), asked.trials, asked.within
    if not asked.show:
        require_agreed(known, asked.command)
    runner = trials_recorded_for(known) if known.request.how == "recorded" else None
    request = replace(
        known.request,
        most_trials=trials or known.request.most_trials,
        within=known.request.within if within is None else within / 100,
    )
    return resume, replace(known, request=request), runner


def _new_session(asked: Tune) -> tuple[Path, State, Runner | None]:
    """Write the state file of a new tuning and return it."""
    path = asked.state or Path(f"meshwright-tune-{datetime.now().astimezone():%Y%m%d-%H%M%S}") / "state.jsonl"
    if asked.state is not None:
        refuse_overwrite(path, force=asked.force)
    runner: Runner | None = None
    by = WITHIN_PERCENT if asked.within is None else asked.within
    if asked.recorded is not None:
        request, plans, runner = recorded_request(asked.recorded, asked.case_id, asked.budget, asked.trials, by)
    else:
        request, plans = _request(asked, by)
    codec.make_folder(path.parent)
    write_new(path, request, plans, force=asked.force)
    return path, State(request=request, candidates=plans, trials=(), cut_short=()), runner


def _request(asked: Tune, within_percent: float) -> tuple[TuningRequest, Candidates]:
    """Return the question that the flags ask, and its candidates."""
    gpus = None if asked.gpus is None else (asked.gpus,)
    flags = flags_of_question(asked, cluster=asked.cluster, gpus=gpus)
    framework, learn = asked.framework, asked.learn
    fields = {
        "budget_s": seconds_of(asked.budget or BUDGET, "--budget"),
        "within": within_percent / 100,
        "most_trials": asked.trials,
        "device": asked.device,
        "steps": asked.steps,
        **(
            job_settings(asked.launcher, asked.job_name, image=asked.image, volume=asked.volume)
            if asked.each
            else trial_settings(framework, asked.command, asked.metric)
        ),
    }
    if learn is not None:
        read_profile(learn)  # before files are written for trials
        fields["settings"] = {**fields.get("settings", {}), "learn": str(learn)}
    return tuning_request(flags, framework, measurements(asked.profile, strict=asked.strict), fields)


def _answer(asked: Tune, known: State, view: View, path: Path) -> None:
    """Write the outputs that were asked for besides the answer, and print it. Exit code 1 if no plan was measured."""
    out, within = asked.out, known.request.within
    learn = None if asked.show else asked.learn or known.request.settings.get("learn")
    for line in add_trials(view.trials, Path(learn)) if learn else ():
        output.warn(line)
    if asked.html is not None:
        found = history(view, within=within, unknown_machine=known.request.unknown_machine)
        codec.write_text(asked.html, to_html(view, found, within=within))
    unsaved = None
    if out and view.best:
        unsaved = output.attempt(lambda: save_plan(_best_file(known, view), out, force=asked.force))
    if asked.json:
        learned = str(learn) if learn else None
        output.emit_json(tune_document(view, within=within, state=str(path), learned=learned))
    else:
        for line in text.lines(view, within=within):
            print(printable(line))
        print(printable(f"state     {path}: planner tune --resume {path} goes on"))
    if unsaved is not None:
        raise unsaved
    if view.best is None:
        raise Exit(1)


def _refuse(asked: Tune) -> None:
    """Raise UserError for flags that exclude each other or have unknown values, and BadInput where an output cannot be
    written.
    """
    for wanted in ("out", "html"):
        if getattr(asked, wanted) is not None:
            refuse_overwrite(getattr(asked, wanted), force=asked.force)
    launcher, device, objective = asked.launcher, asked.device, asked.objective
    if launcher == "local" and (asked.each or asked.submit or asked.image or asked.volume):
        raise UserError("--each, --submit, --image and --volume are for jobs", remedy="--launcher slurm, say")
    if launcher != "local" and (asked.recorded is not None or (asked.command is not None and asked.each)):
        raise UserError(
            "--launcher runs our executor's trials, or one job for a --command", remedy="leave --recorded out"
        )
    if asked.show and asked.resume is None:
        raise UserError("--show answers from a state file", remedy="--resume state.jsonl --show")
    if device not in DEVICES:
        raise UserError(f"--device is {device!r}", remedy=f"one of {', '.join(DEVICES)}")
    if objective not in OBJECTIVES:
        raise UserError(
            f"--objective {objective} cannot be tuned for",
            why="trials measure steps; memory and Pareto fronts are for planner suggest",
            remedy=f"one of {', '.join(OBJECTIVES)}",
        )


def _write_job(asked: Tune, known: State, path: Path) -> None:
    """Write the job of a whole tuning, and hand it to the scheduler if asked."""
    launcher, name = asked.launcher, asked.job_name
    job = TuneJob(
        request=known.request, state=path, launcher=launcher, name=name, image=asked.image, volume=asked.volume
    )
    written = job.written()
    codec.write_text(written.path, written.text)
    submitted = scheduled.submit(written, launcher, name=name).said if asked.submit else None
    if asked.json:
        output.emit_json(
            {
                "schema_version": output.SCHEMA_VERSION,
                "launcher": launcher,
                "state": str(path),
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


def _run(asked: Tune, path: Path, known: State, runner: Runner | None) -> View:
    """Run the loop with progress on standard error: a table on a terminal, lines elsewhere."""
    limit_s, allow_busy = seconds_of(asked.trial_limit, "--trial-limit"), asked.allow_busy
    budget_s = None if asked.budget is None else seconds_of(asked.budget, "--budget")
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
    """Return the best measured plan as a plan file, with its prediction before the trials."""
    if view.best is None:
        raise PlannerError("no plan was measured")
    one = view.candidates.plans[view.best.row]
    return plan_file(known.request.question(), one.plan, one.estimate)


# --- what trials teach ------------------------------------------------------------------------------------------------


def add_trials(trials: Iterable[Trial], profile: Path) -> list[str]:
    """Add the operators of measured trials to a profile; return a line for each, including those that could not be
    added.
    """
    lines = []
    for trial in trials:
        if not trial.step_s or not trial.directory:
            continue
        try:
            update = add_run_to_profile(load_run(trial.directory, simulate=False), profile)
        except PlannerError as error:
            lines.append(f"{trial.directory} is left out: {error.what}")
            continue
        lines.append(
            f"{Path(trial.directory).name}: {update.samples} operators, {update.fresh} of them new to the profile"
        )
    return lines
