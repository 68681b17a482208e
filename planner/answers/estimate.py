"""What one plan costs, from a case file, a saved plan, or flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from planner.explain.plan_answer import PlanAnswer, answer_plan, plan_document, unreadable_document
from planner.io import output
from planner.io.inputs import measurements
from planner.question.case_fields import case_id
from planner.question.case_words import is_plan_file
from planner.question.cases import case_from_flags, case_of_plan_file, load_case, read_cases
from planner.question.flags import Flags, flags_of_plan
from planner.question.learned_runtime import LearnedCalibrations, in_place, is_learned, read_learned
from planner.question.overrides import with_flags
from planner.question.plan_file import plan_file, refuse_overwrite, save_plan
from planner.requests.flag import values_of
from planner.requests.serving import Task, refuse, stated
from planner.requests.training import Estimate
from simulator.config.estimate import Estimate as Figures
from simulator.config.plan import Plan
from simulator.fitting.calibrations import Calibrations
from topology.codec import JsonObject
from topology.errors import Infeasible, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """The answer of `planner estimate` about one plan. `figures` is None where the plan is not legal; `problems` say
    why.
    """

    found: PlanAnswer

    @property
    def plan(self) -> Plan:
        return self.found.case.plan

    @property
    def legal(self) -> bool:
        return self.found.estimate is not None

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(problem.message for problem in self.found.problems)

    @property
    def assumed(self) -> tuple[str, ...]:
        """Assumptions for what the question leaves open."""
        return self.found.case.assumed

    @property
    def figures(self) -> Figures | None:
        """The step and the memory, with their ranges."""
        return self.found.estimate

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the plan to a file. Raises Infeasible where it is not legal, BadInput where the file cannot be
        written.
        """
        case = self.found.case
        if self.found.estimate is None:
            raise Infeasible("the plan is not legal", why="; ".join(self.problems))
        save_plan(plan_file(case.question, case.plan, self.found.estimate), path, force=force)

    def to_dict(self) -> JsonObject:
        """Return the JSON document of the command."""
        return plan_document(self.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A case of a list that cannot be read, with the error."""

    id: str
    error: str
    legal: bool = False

    def to_dict(self) -> JsonObject:
        """Return its JSON document in the answer to the list."""
        return unreadable_document(self.id, self.error)


def estimate(
    asked: Estimate, progress: Callable[[str], None] = lambda _: None
) -> Estimated | Iterator[Estimated | Unreadable]:
    """Return the answer; for a file with a list of cases, yield one answer per case. Raises UserError and Infeasible.

    `progress` is called with the estimate of a plan as text while changes that make it fit are searched.
    """
    refuse(stated(values_of(asked.load, asked.engine, asked.deployment)), Task.TRAIN)
    flags = flags_of_plan(asked.stated)
    measured = measurements(asked.profile, strict=asked.strict)
    named = flags.runtime.get("name")
    learned = read_learned(named) if named is not None and is_learned(named) else None
    if learned is not None:
        measured = LearnedCalibrations(measured, learned)
        flags = replace(flags, runtime={**flags.runtime, "name": learned.like, "compile": learned.compile})
    if asked.case is not None and asked.plan is not None:
        raise UserError("--case and --plan exclude each other", remedy="give one of them")
    if asked.out is not None:
        refuse_overwrite(asked.out, force=asked.force)
    if asked.case is not None:
        raw, many = read_cases(asked.case)
        if not many and asked.case != "-" and is_plan_file(raw[0]):
            # As a case, a plan may be asked about on other machines and for other models than it was made for.
            plan_as_case = replace(case_of_plan_file(Path(asked.case), measured), saved=None)
            return Estimated(found=answer_plan(with_flags(plan_as_case, flags, measured), progress=progress))
        raw = [in_place(one, learned) for one in raw]
        if many and asked.out is not None:
            raise UserError("--out saves one plan, and the file has several", remedy="a file with one case")
        if many:
            return _answered(raw, flags, measured)
        loaded = with_flags(load_case(raw[0], measured), flags, measured)
    elif asked.plan is not None:
        loaded = with_flags(case_of_plan_file(asked.plan, measured), flags, measured)
    else:
        loaded = case_from_flags(flags, measured)
    return Estimated(found=answer_plan(loaded, progress=progress))


def _answered(raw: list[JsonObject], flags: Flags, measured: Calibrations) -> Iterator[Estimated | Unreadable]:
    for data in raw:
        try:
            found: Estimated | Unreadable = Estimated(
                found=answer_plan(with_flags(load_case(data, measured), flags, measured))
            )
        except (UserError, Infeasible) as error:
            output.warn(f"case {case_id(data)}: {error}")
            found = Unreadable(id=case_id(data), error=str(error))
        yield found
