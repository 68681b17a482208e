"""Begin a tuning: the question from flags or recorded runs, its candidates, and what runs the trials."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from planner.explain.answer_text import assumed_parts
from planner.io import output
from planner.io.inputs import parse_seconds
from planner.question.cases import read_cases
from planner.question.flags import Flags
from planner.runs.schedulers.launchers import require_settings
from planner.search.answer import search_question
from planner.tune.candidates import Candidates, candidates_of
from planner.tune.runners.command_trials import command_metric, command_words
from planner.tune.runners.recorded_trials import RecordedTrials, recorded_questions
from planner.tune.sessions.job import LAUNCHERS
from planner.tune.state import State, TuningRequest
from simulator.fitting.calibrations import Calibrations
from simulator.legality.frameworks import FRAMEWORKS, framework_named
from topology.errors import BadInput, UserError

BUDGET = "10m"


def trial_settings(framework: str, command: str | None, metric: str | None) -> dict[str, Any]:
    """Return what runs the trials, and its settings. Raises UserError if nothing here can."""
    if command is not None:
        command_words(command)
        return {"how": "command", "settings": {"command": command} | ({} if metric is None else {"metric": metric})}
    if metric is not None:
        raise UserError("--metric reads what --command prints", remedy="--command 'torchrun ... {config}'")
    if not framework_named(framework).tools.trainer:
        run_here = sorted(known.name for known in FRAMEWORKS.values() if known.tools.trainer)
        raise UserError(
            f"trials of {framework} need a command",
            why=f"plans of {', '.join(run_here)} are run without one",
            remedy="--command 'sh {config}' --metric ..., with a word that says how it prints a step",
        )
    return {"how": "executor"}


def job_settings(launcher: str, name: str, **places: str | None) -> dict[str, Any]:
    """Return the settings of a tuning with one job per trial; `places` are its image and volume. Raises UserError."""
    if launcher not in LAUNCHERS:
        raise UserError(f"--launcher is {launcher!r}", remedy=f"one of {', '.join(LAUNCHERS)}")
    require_settings(launcher, **places)
    stated = {key: value for key, value in places.items() if value is not None}
    return {"how": "jobs", "settings": {"launcher": launcher, "name": name, **stated}}


def tuning_request(
    flags: Flags, framework: str, measured: Calibrations, fields: dict[str, Any]
) -> tuple[TuningRequest, Candidates]:
    """Return the request of a tuning and the plans that could be the best; `fields` are its other fields.

    Raises Infeasible (exit 3) if there is none, and errors of the named inputs.
    """
    if flags.model is None:
        raise UserError("--model is missing", remedy="--model llama3-8b, or --resume a state file")
    question, assumed = search_question(flags, framework, measured)
    for line in assumed_parts(assumed):
        output.warn(f"assumed: {line}")
    if fields["how"] == "command":
        command_metric(fields["settings"].get("metric"), question)
    try:
        plans = candidates_of(question, progress=output.progress)
    finally:
        output.end_progress()
    known = question.calibration
    request = TuningRequest(
        model=question.model,
        cluster=question.cluster,
        workload=question.workload,
        runtime=question.runtime,
        framework=question.framework.name,
        gpus=question.count,
        legal=plans.legal,
        profile=None if known is None else known.profile,
        **fields,
    )
    return request, plans


def recorded_request(
    path: Path, case_id: str | None, budget: str | None, most: int | None, within: float
) -> tuple[TuningRequest, Candidates, RecordedTrials]:
    """Return the question of recorded runs, its candidates, and what looks up their trials."""
    cases = read_cases(path)[0]
    found = [one for one in recorded_questions(cases) if case_id is None or case_id in one.ids]
    if not found:
        raise BadInput(
            f"{path} has no question of which two plans were measured"
            + (f", with {case_id} among them" if case_id else ""),
            remedy="runs of one question share model, cluster, workload and GPUs",
        )
    one = found[0]
    request = TuningRequest(
        model=one.question.model,
        cluster=one.question.cluster,
        workload=one.question.workload,
        runtime=one.question.runtime,
        framework=one.question.framework.name,
        gpus=one.candidates.plans[0].plan.gpus,
        budget_s=seconds_of(budget or BUDGET, "--budget"),
        within=within / 100,
        most_trials=most,
        how="recorded",
        settings={"file": str(path), "id": one.name},
        legal=one.candidates.legal,
    )
    return request, one.candidates, RecordedTrials(recorded=one.recorded)


def trials_recorded_for(known: State) -> RecordedTrials:
    """Return the recorded runs in which a state looks up its trials. Raises BadInput if they are missing."""
    file, name = known.request.settings.get("file", ""), known.request.settings.get("id", "")
    for one in recorded_questions(read_cases(file)[0]):
        if name == one.name:
            return RecordedTrials(recorded=one.recorded)
    raise BadInput(f"{file} has no run {name}", why="the state looks its trials up there")


def require_agreed(known: State, command: str | None) -> None:
    """Raise UserError if a state would run a command that the person who resumes it has not stated: files are data."""
    wanted = known.request.settings.get("command") if known.request.how == "command" else None
    if wanted == command:
        return
    if wanted is None:
        raise UserError("--command is not what makes this tuning's trials", remedy="leave it out, or begin another")
    raise UserError(
        "the state runs a command, which has to be stated again",
        why="who wrote the file does not decide what runs here",
        remedy=f"--command {shlex.quote(wanted)}, if that is what shall run",
    )


def seconds_of(given: str, flag: str) -> float:
    """Return the seconds of `90`, `90s`, `10m`, `2h`. Raises UserError for anything else, or more than a week."""
    why = "it is 1s to a week, in s, m or h"
    return parse_seconds(given, flag, range_s=(1.0, 7 * 86400.0), units="smh?", why=why, example="10m")
