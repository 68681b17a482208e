"""`planner explain`: where a plan's step and memory go, why other plans lost, and when the answer would change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.calibrate.difference import difference_from, difference_lines
from planner.calibrate.planned_step import PlannedStep
from planner.configs.stated_rate import seconds_in
from planner.explain import explain as reasons
from planner.explain.documents import question_document
from planner.explain.explain_text import print_explanation, print_memory
from planner.explain.tables import changed_lines, print_lines
from planner.io import output
from planner.io.grids import console
from planner.io.inputs import measurements, parse_bytes, read_cluster, warn_of_doubts
from planner.io.plan_words import degrees_text
from planner.pictures.memory import memory as memory_picture
from planner.pictures.waterfall import estimate_picture
from planner.question.cases import Case, case_of_file
from planner.question.flags import Flags, flags_of_question, gpu_counts
from planner.question.overrides import with_flags
from planner.question.plan_file import refuse_overwrite
from planner.question.prediction import predict
from planner.question.question import Question
from planner.requests.flag import values_of
from planner.requests.serving import Task, refuse, stated
from planner.requests.training import Explain
from planner.search.answer import answer
from planner.search.deadline import NOT_EXPLAINED, NOT_SIMULATED, deadline_of, left_s
from planner.search.fixes import find_fixes, memory_text
from planner.search.plan_space.candidates import Bounds
from planner.search.result import SearchResult
from planner.search.search import SearchOptions, suggest
from simulator.config.estimate import Estimate
from simulator.fitting.calibrations import Calibrations
from topology import codec
from topology.errors import Infeasible, UserError
from topology.time_limit import limited


def explain(asked: Explain) -> None:
    """Print what `planner explain` answers."""
    deadline = deadline_of(asked.time_limit)
    name: dict[str, Any] = {"name": asked.framework} if asked.file else {}
    counts = gpu_counts(asked.gpus)
    flags = flags_of_question(asked, cluster=asked.cluster, gpu=asked.gpu, gpus=counts, **name)
    refuse(stated(values_of(asked.load, asked.engine)), Task.TRAIN)
    if asked.time_limit is not None and (asked.flips or (asked.file is not None and asked.memory)):
        raise UserError("--time-limit is for one search", remedy="leave it out, or --flips and --memory")
    if asked.svg is not None:
        refuse_overwrite(asked.svg, force=asked.force)
    observed = None if asked.observed_peak is None else parse_bytes(asked.observed_peak)
    measured = measurements(asked.profile, strict=asked.strict)
    changed: tuple[str, ...] = ()
    if asked.measured is not None:
        _difference(asked, flags, measured)
        return
    try:
        if asked.file is not None:
            case = with_flags(case_of_file(asked.file, asked.case_id, measured), flags, measured)
            changed = case.changed
            if asked.memory:
                _memory_only(case, observed, asked.svg, json=asked.json)
                return
            try:
                with limited(asked.time_limit):
                    result, chosen = _search(case, asked.top, left_s(deadline)), case.plan
            except Infeasible as error:
                _alone(case, error, observed, asked)
                return
        else:
            wanted = SearchOptions(top=asked.top + 1, time_limit_s=left_s(deadline))
            with limited(asked.time_limit):
                result = answer(flags, asked.framework, wanted, measured=measured, progress=output.progress)
            chosen = result.plans[0].plan
        with limited(asked.time_limit):
            found = reasons.explain(
                chosen,
                result,
                observed_bytes=observed,
                with_flips=asked.flips and not asked.memory,
                grow=None
                if asked.file is not None
                else lambda n: read_cluster(asked.cluster or "dgx-h100", n, gpu=asked.gpu),
                progress=output.progress,
            )
        legal = result.question.legal(chosen)
        left_out = next((said for said in result.assumed if said in {NOT_SIMULATED, NOT_EXPLAINED}), None)
        if found.traffic is None and legal:
            left_out = left_out or NOT_EXPLAINED
    finally:
        output.end_progress()
    warn_of_doubts(measured)
    _show(found, result.question, asked, changed, left_out)


def _alone(case: Case, error: Infeasible, observed: float | None, asked: Explain) -> None:
    """Explain a plan for whose question no plan fits, as `error` says."""
    question = replace(case.question, gpus=case.plan.gpus)
    why = f"{error.what}; {error.remedy}" if error.remedy else error.what
    found = reasons.explain_alone(question, case.plan, why, observed)
    output.end_progress()
    _show(found, question, asked, case.changed)


def _show(
    found: reasons.Explanation,
    question: Question,
    asked: Explain,
    changed: tuple[str, ...],
    left_out: str | None = None,
) -> None:
    """Print an explanation, and draw it if that is asked for."""
    if asked.json:
        document = {"question": question_document(question, found.plan.gpus), "changed": list(changed)}
        output.emit_json({"schema_version": output.SCHEMA_VERSION, **document, **codec.to_builtins(found)})
    elif asked.memory:
        print_memory(found.memory, memory_text(found.estimate, found.fixes, found.plan.gpus))
    else:
        print_explanation(found, question, changed, left_out)
    if asked.svg is not None:
        _draw(f"{question.model.name}, {degrees_text(found.plan)}", found.estimate, asked.svg, memory=asked.memory)


def _search(case: Case, top: int, time_limit_s: float | None) -> SearchResult:
    """Answer the question that a plan or a case belongs to, on as many GPUs as its plan uses. Raises Infeasible."""
    question, offload = replace(case.question, gpus=case.plan.gpus), case.plan.offload
    bounds = Bounds() if offload == "none" else Bounds(stated={"offload": ("none", offload)})
    wanted = SearchOptions(top=top, bounds=bounds, time_limit_s=time_limit_s)
    return suggest(question, wanted, progress=output.progress)


def _difference(asked: Explain, flags: Flags, measured: Calibrations) -> None:
    """Print what could account for the difference between a plan's measured step and its prediction."""
    if asked.file is None or asked.memory or asked.flips or asked.svg is not None:
        raise UserError(
            "--measured is of one plan, and is asked alone", remedy="planner explain --measured 9.2s plan.json"
        )
    case = with_flags(case_of_file(asked.file, asked.case_id, measured), flags, measured)
    estimate = predict(case.question, case.plan).estimate
    asks = case.question
    found = difference_from(
        PlannedStep.of(asks, case.plan),
        asks.cluster,
        estimate,
        seconds_in(str(asked.measured), "--measured"),
        calibration=asks.calibration,
        profile=measured.profile,
    )
    if asked.json:
        document = {"changed": list(case.changed), "difference": {**codec.to_builtins(found), "inside": found.inside}}
        output.emit_json({"schema_version": output.SCHEMA_VERSION, **document})
        return
    warn_of_doubts(measured)
    print_lines(console(), [*changed_lines(case.changed), *difference_lines(found, asked.file)])


def _draw(title: str, estimate: Estimate, path: Path, *, memory: bool) -> None:

    codec.write_text(
        path, memory_picture(estimate.memory, title=title) if memory else estimate_picture(estimate, title=title)
    )
    output.warn(f"saved {path}")


def _memory_only(case: Case, observed: float | None, svg: Path | None, *, json: bool) -> None:
    """Print the memory of one plan by part, legal or not."""
    estimate = predict(case.question, case.plan).estimate
    account = reasons.memory_account(estimate, observed)
    fixes = find_fixes(case.question, case.plan, estimate)
    if json:
        found = {"memory": codec.to_builtins(account), "fit": estimate.memory.fit, "fixes": codec.to_builtins(fixes)}
        output.emit_json({"schema_version": output.SCHEMA_VERSION, "changed": list(case.changed), **found})
    else:
        for line in case.changed:
            print(f"changed: {line}")
        print_memory(account, memory_text(estimate, fixes, case.plan.gpus))
    if svg is not None:
        _draw(f"{case.question.model.name}, {degrees_text(case.plan)}", estimate, svg, memory=True)
