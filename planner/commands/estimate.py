"""`planner estimate`: what one plan costs, from a case file, a saved plan, or flags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from planner.explain.answer_text import print_estimate
from planner.explain.plan_answer import answer_plan, plan_document, unreadable_document
from planner.io import output
from planner.io.inputs import measurements
from planner.io.printable import printable
from planner.question.cases import case_from_flags, case_id, case_of_plan_file, load_case, read_cases
from planner.question.flags import Flags, flags_of_plan
from planner.question.learned_runtime import LearnedCalibrations, in_place, is_learned, read_learned
from planner.question.overrides import with_flags
from planner.question.plan_file import plan_file, refuse_overwrite, save_plan
from planner.requests.flag import values_of
from planner.requests.serving import Task, refuse, stated
from planner.requests.training import Estimate
from simulator.fitting.calibration_fit import Calibrations
from topology.errors import Infeasible, UserError


def estimate(asked: Estimate) -> None:
    """Print what `planner estimate` answers."""
    refuse(stated(values_of(asked.load, asked.engine, asked.deployment)), Task.TRAIN)
    flags, out = flags_of_plan(asked.stated), asked.out
    measured = measurements(asked.profile, strict=asked.strict)
    named = flags.runtime.get("name")
    learned = read_learned(named) if named is not None and is_learned(named) else None
    if learned is not None:
        measured = LearnedCalibrations(measured, learned)
        flags = replace(flags, runtime={**flags.runtime, "name": learned.like, "compile": learned.compile})
    if asked.case is not None and asked.plan is not None:
        raise UserError("--case and --plan exclude each other", remedy="give one of them")
    if out is not None:
        refuse_overwrite(out, force=asked.force)
    if asked.case is not None:
        raw, many = read_cases(asked.case)
        raw = [in_place(one, learned) for one in raw]
        if many and out is not None:
            raise UserError("--out saves one plan, and the file has several", remedy="a file with one case")
        if many:
            _answer_list(raw, flags, measured, json=asked.json)
            return
        loaded = with_flags(load_case(raw[0], measured), flags, measured)
    elif asked.plan is not None:
        loaded = with_flags(case_of_plan_file(asked.plan, measured), flags, measured)
    else:
        loaded = case_from_flags(flags, measured)
    found = answer_plan(loaded)
    unsaved = None
    if out is not None and found.estimate is not None:
        content = plan_file(loaded.question, loaded.plan, found.estimate)
        unsaved = output.attempt(lambda: save_plan(content, out, force=asked.force))
    if asked.json:
        output.emit_json(plan_document(found))
    else:
        print_estimate(found)
    if unsaved is not None:
        raise unsaved
    if found.estimate is None:
        if out is not None:
            output.warn(f"{out} is not written: the plan is not legal")
        raise typer.Exit(3)
    if out is not None and not asked.json:
        print(printable(f"saved {out}"))


def _answer_list(raw: list[dict[str, Any]], flags: Flags, measured: Calibrations, *, json: bool) -> None:
    """Answer every case of a list; one that cannot be read is answered with what is wrong. Exit 3 if none is legal."""
    documents = []
    for index, data in enumerate(raw):
        try:
            found = answer_plan(with_flags(load_case(data, measured), flags, measured))
        except (UserError, Infeasible) as error:
            documents.append(unreadable_document(case_id(data), str(error)))
            output.warn(f"case {case_id(data)}: {error}")
            continue
        documents.append(plan_document(found))
        if not json:
            if index:
                print()
            print_estimate(found)
    if json:
        output.emit_json(documents)
    if documents and not any(one["legal"] for one in documents):
        raise typer.Exit(3)
