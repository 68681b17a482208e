"""`planner estimate`: what one plan costs, from a case file, a saved plan, or flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands import serve
from planner.commands.flags import options
from planner.commands.flags.plan_flags import takes_plan_flags
from planner.commands.flags.serving_flags import (
    DEPLOYMENT_FLAGS,
    QUESTION_FLAGS,
    Task,
    TaskOption,
    refuse,
    stated,
    takes_serving_flags,
)
from planner.explain.answer_text import print_estimate
from planner.explain.plan_answer import answer_plan, plan_document, unreadable_document
from planner.io import output
from planner.io.inputs import measurements
from planner.io.printable import printable
from planner.question.cases import case_from_flags, case_id, case_of_plan_file, load_case, read_cases
from planner.question.flags import Flags
from planner.question.learned_runtime import LearnedCalibrations, in_place, is_learned, read_learned
from planner.question.overrides import with_flags
from planner.question.plan_file import plan_file, refuse_overwrite, save_plan
from simulator.fitting.calibration_fit import Calibrations
from topology.errors import Infeasible, UserError


@takes_serving_flags(QUESTION_FLAGS, DEPLOYMENT_FLAGS)
@takes_plan_flags
def estimate(
    flags: Flags,
    task: TaskOption = Task.TRAIN,
    case: Annotated[str | None, typer.Option("--case", help="Case file: one case or a list; - reads stdin.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Plan file saved by planner suggest --out.")] = None,
    profile: options.Profile = None,
    strict: options.Strict = False,
    out: Annotated[Path | None, typer.Option("--out", help="Save the plan to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
    json: options.Json = False,
    *,
    serving: dict[str, Any],
) -> None:
    """Predict step time and memory of one plan, or what clients of a deployment see; and say whether it is legal.

    The data-parallel degree left unsaid fills the GPUs. Flags beside --plan or --case change what the file says, and the
    answer lists what they changed. Exit code 3 when no plan given is legal; a plan that is legal
    but does not fit is an answer, and ends with 0.
    """
    if task is Task.SERVE or serve.is_serving_plan(plan):
        asked = serve.serving_flags(flags, serving, {"case": case}, profile=profile, strict=strict)
        serve.estimate_serving_plan(asked, plan=plan, out=out, force=force, json=json)
        return
    refuse(stated(serving), Task.TRAIN)
    measured = measurements(profile, strict=strict)
    named = flags.runtime.get("name")
    learned = read_learned(named) if named is not None and is_learned(named) else None
    if learned is not None:
        measured = LearnedCalibrations(measured, learned)
        flags = replace(flags, runtime={**flags.runtime, "name": learned.like, "compile": learned.compile})
    if case is not None and plan is not None:
        raise UserError("--case and --plan exclude each other", remedy="give one of them")
    if out is not None:
        refuse_overwrite(out, force=force)
    if case is not None:
        raw, many = read_cases(case)
        raw = [in_place(one, learned) for one in raw]
        if many and out is not None:
            raise UserError("--out saves one plan, and the file has several", remedy="a file with one case")
        if many:
            _answer_list(raw, flags, measured, json=json)
            return
        loaded = with_flags(load_case(raw[0], measured), flags, measured)
    elif plan is not None:
        loaded = with_flags(case_of_plan_file(plan, measured), flags, measured)
    else:
        loaded = case_from_flags(flags, measured)
    found = answer_plan(loaded)
    unsaved = None
    if out is not None and found.estimate is not None:
        content = plan_file(loaded.question, loaded.plan, found.estimate)
        unsaved = output.attempt(lambda: save_plan(content, out, force=force))
    if json:
        output.emit_json(plan_document(found))
    else:
        print_estimate(found)
    if unsaved is not None:
        raise unsaved
    if found.estimate is None:
        if out is not None:
            output.warn(f"{out} is not written: the plan is not legal")
        raise typer.Exit(3)
    if out is not None and not json:
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
