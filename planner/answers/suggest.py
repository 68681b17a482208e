"""The plans of a training question, best first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from planner.explain.documents import search_document
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
from planner.search.result import RankedPlan, SearchResult
from planner.search.search import SearchOptions
from planner.search.whole_run import RunAnswer, answer_run
from simulator.config.plan import PLAN_FIELDS
from topology import codec
from topology.codec import JsonObject
from topology.errors import UserError
from topology.time_limit import limited


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggested:
    """The answer of `planner suggest`: the search with its question, and the whole run if one was asked about."""

    result: SearchResult
    run: RunAnswer | None = None

    @property
    def plans(self) -> tuple[RankedPlan, ...]:
        """The listed plans with their estimates, best first."""
        return self.result.plans

    @property
    def best(self) -> RankedPlan:
        return self.result.plans[0]

    def save(self, path: str | Path, *, pick: int = 1, force: bool = False) -> None:
        """Write a listed plan to a file that `load_plan` and the other commands read. Raises UserError and BadInput."""
        if not 1 <= pick <= len(self.plans):
            raise UserError(f"--pick {pick}: {len(self.plans)} plans are listed", remedy="--all lists variants too")
        chosen = self.plans[pick - 1]
        save_plan(plan_file(self.result.question, chosen.plan, chosen.estimate), path, force=force)

    def to_dict(self) -> JsonObject:
        """Return the JSON document of the command."""
        run = ("goal", "run", "curve") if self.run else ()
        return search_document(self.result) | {name: codec.to_builtins(getattr(self.run, name)) for name in run}


def suggest(
    asked: Suggest, progress: Callable[[str], None] | None = None, early: Callable[[SearchResult], None] | None = None
) -> Suggested:
    """Return the answer; `early` is called with preliminary results of a single search.

    Raises UserError for what cannot be asked, Infeasible where no plan is legal or fits.
    """
    refuse(stated(values_of(asked.load, asked.engine, asked.drawn) | {"separate": asked.separate}), Task.TRAIN)
    if asked.out is not None:
        refuse_overwrite(asked.out, force=asked.force)
    elif asked.pick is not None:
        raise UserError("--pick says which plan --out saves", remedy="--out plan.json")
    goal = goal_of(asked)
    learned = None if asked.runtime is None else read_learned(asked.runtime)
    flags, framework = _flags(asked, learned)
    measured = measurements(asked.profile, strict=asked.strict)
    if learned is not None:
        measured = LearnedCalibrations(measured, learned)
    search = (flags, framework, _search_options(asked))
    with limited(asked.time_limit):
        if goal:
            run = answer_run(*search, goal, measured=measured, progress=progress)
            return Suggested(result=run.result, run=run)
        return Suggested(result=answer(*search, measured=measured, progress=progress, early=early))


def _flags(asked: Suggest, learned: LearnedRuntime | None) -> tuple[Flags, str | None]:
    """Return the question, and the framework, if a learned runtime has one."""
    flags = flags_of_search(asked)
    if learned is None:
        return flags, asked.framework
    if asked.compile_model is None:
        flags = replace(flags, runtime={**flags.runtime, "compile": learned.compile})
    return flags, learned.like


def _search_options(asked: Suggest) -> SearchOptions:
    fixed = {name: read_values(PLAN_FIELDS[name], text) for name, text in asked.fixed.items()}
    return SearchOptions(
        objective=asked.objective.value,
        top=max(asked.top, asked.pick or 1),
        bounds=Bounds(max_tp=asked.max_tp).fixing(**fixed),
        all_variants=asked.all_variants,
        gpu_price_per_hour=asked.gpu_price,
        simulate=asked.simulate,
        time_limit_s=asked.time_limit,
    )
