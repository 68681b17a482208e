"""`planner suggest`: the best plans for a model on a cluster, and why the others lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from planner.explain.answer_text import print_search
from planner.explain.documents import search_document
from planner.explain.run_text import print_run, run_document
from planner.io import output
from planner.io.inputs import measurements
from planner.question.flags import Flags, flags_of_search
from planner.question.goal import goal_of
from planner.question.learned_runtime import LearnedCalibrations, LearnedRuntime, read_learned
from planner.question.plan_file import plan_file, refuse_overwrite, save_plan
from planner.requests.flag import values_of
from planner.requests.serving import Task, refuse, stated
from planner.requests.training import Suggest
from planner.search.answer import answer
from planner.search.plan_space.candidates import Bounds
from planner.search.plan_space.stated import read_values
from planner.search.result import SearchResult
from planner.search.search import SearchOptions
from planner.search.whole_run import RunAnswer, answer_run
from simulator.config.plan import PLAN_FIELDS
from topology.errors import PlannerError, UserError


def suggest(asked: Suggest) -> None:
    """Print what `planner suggest` answers."""
    refuse(stated(values_of(asked.load, asked.engine) | {"separate": asked.separate}), Task.TRAIN)
    if asked.out is not None:
        refuse_overwrite(asked.out, force=asked.force)
    elif asked.pick is not None:
        raise UserError("--pick says which plan --out saves", remedy="--out plan.json")
    goal = goal_of(asked.tokens, asked.gpu_price, asked.deadline, asked.budget)
    learned = None if asked.runtime is None else read_learned(asked.runtime)
    flags, framework = _flags(asked, learned)
    try:
        measured = measurements(asked.profile, strict=asked.strict)
        if learned is not None:
            measured = LearnedCalibrations(measured, learned)
        search = (flags, framework, _search_options(asked))
        run = answer_run(*search, goal, measured=measured, progress=output.progress) if goal else None
        result = run.result if run else answer(*search, measured=measured, progress=output.progress)
    finally:
        output.end_progress()
    _show(result, run, asked)


def _flags(asked: Suggest, learned: LearnedRuntime | None) -> tuple[Flags, str]:
    """Return the question that is asked, and the framework, which a learned runtime knows."""
    flags = flags_of_search(asked)
    if learned is None:
        return flags, asked.framework
    if asked.compile_model is None:
        flags = replace(flags, runtime={**flags.runtime, "compile": learned.compile})
    return flags, learned.like


def _search_options(asked: Suggest) -> SearchOptions:
    return SearchOptions(
        objective=asked.objective.value,
        top=max(asked.top, asked.pick or 1),
        bounds=_bounds(asked),
        all_variants=asked.all_variants,
        gpu_price_per_hour=asked.gpu_price,
        simulate=asked.simulate,
        time_limit_s=asked.time_limit,
    )


def _show(result: SearchResult, run: RunAnswer | None, asked: Suggest) -> None:
    """Save a plan where `--out` asks for it, and show the answer, whatever came of saving."""
    out = asked.out
    unsaved = None if out is None else _save(result, asked.pick, out, force=asked.force)
    if asked.json:
        output.emit_json(search_document(result) | (run_document(run) if run else {}))
    else:
        print_search(result, out=str(out) if out and unsaved is None else None)
        if run:
            print_run(run)
    if unsaved is not None:
        raise unsaved


def _save(result: SearchResult, pick: int | None, out: Path, *, force: bool) -> PlannerError | None:
    """Write one of the listed plans to `out`; return what went wrong, to be raised after the answer is shown."""
    if pick and pick > len(result.plans):
        raise UserError(f"--pick {pick}: {len(result.plans)} plans are listed", remedy="--all lists variants too")
    chosen = result.plans[(pick or 1) - 1]
    content = plan_file(result.question, chosen.plan, chosen.estimate)
    return output.attempt(lambda: save_plan(content, out, force=force))


def _bounds(asked: Suggest) -> Bounds:
    """Return the parts of a plan that a command's arguments fix. Raises UserError."""
    fixed = {name: read_values(PLAN_FIELDS[name], text) for name, text in asked.fixed.items()}
    return Bounds(max_tp=asked.max_tp).fixing(**fixed)
