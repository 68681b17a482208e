"""`planner explain`: where a plan's step and memory go, why the others lost, and when the answer would be another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.commands import serve
from planner.commands.flags import explain_flags, options, plan_flags
from planner.commands.flags.serving_flags import (
    QUESTION_FLAGS,
    Task,
    TaskOption,
    refuse,
    stated,
    takes_serving_flags,
)
from planner.commands.suggest import gpu_counts
from planner.explain import explain as reasons
from planner.explain.documents import explanation_document
from planner.explain.explain_text import print_explanation, print_memory
from planner.explain.tables import degrees_text
from planner.io import output
from planner.io.inputs import measurements, parse_bytes, read_cluster, warn_of_doubts
from planner.pictures.memory import memory as memory_picture
from planner.pictures.waterfall import estimate_picture
from planner.question.cases import Case, case_of_file
from planner.question.flags import Flags
from planner.question.overrides import with_flags
from planner.question.plan_file import refuse_overwrite
from planner.question.prediction import predict
from planner.search.answer import answer
from planner.search.deadline import deadline_of, left_s
from planner.search.fixes import find_fixes, memory_text
from planner.search.plan_space.candidates import Bounds
from planner.search.result import SearchResult
from planner.search.search import SearchOptions, suggest
from simulator.config.estimate import Estimate
from topology import codec
from topology.errors import UserError


@takes_serving_flags(QUESTION_FLAGS)
def explain(
    file: explain_flags.File = None,
    task: TaskOption = Task.TRAIN,
    case_id: explain_flags.CaseId = None,
    model: plan_flags.Model = None,
    cluster: plan_flags.Cluster = None,
    gpu: options.Gpu = None,
    gpus: explain_flags.Gpus = None,
    seq_len: plan_flags.SeqLen = None,
    global_batch: options.GlobalBatch = None,
    framework: explain_flags.Framework = None,
    top: explain_flags.Top = 4,
    memory: explain_flags.Memory = False,
    observed_peak: explain_flags.ObservedPeak = None,
    flips: explain_flags.Flips = False,
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    compute_dtype: options.ComputeDtype = None,
    time_limit: options.TimeLimit = None,
    profile: options.Profile = None,
    strict: options.Strict = False,
    svg: explain_flags.Svg = None,
    force: explain_flags.Force = False,
    json: options.Json = False,
    *,
    serving: dict[str, Any],
) -> None:
    """Explain a plan: from the peak of the GPU to the achieved step, memory by stage, runners-up, flip points.

    Without a file, the best plan of the question that the flags ask, as planner suggest would answer it. Beside a file,
    flags change what it says, and the answer lists what they changed.
    """
    deadline = deadline_of(time_limit)
    flags = Flags(
        model=model,
        cluster=cluster,
        gpu=gpu,
        gpus=gpu_counts(gpus),
        seq_len=seq_len,
        global_batch=global_batch,
        runtime={"compile": compile_model, "param_dtype": param_dtype, "compute_dtype": compute_dtype}
        | ({"name": framework} if file else {}),
    )
    if task is Task.SERVE or serve.is_serving_plan(file):
        others = {
            "framework": framework,
            "id": case_id,
            "memory": memory,
            "observed_peak": observed_peak,
            "svg": svg,
            "time_limit": time_limit,
        }
        serving_question = serve.serving_flags(flags, serving, others, profile=profile, strict=strict)
        serve.explain_serving_plan(serving_question, plan=file, top=top, sweep=flips, json=json)
        return
    refuse(stated(serving), Task.TRAIN)
    if time_limit is not None and (flips or (file is not None and memory)):
        raise UserError("--time-limit is for one search", remedy="leave it out, or --flips and --memory")
    if svg is not None:
        refuse_overwrite(svg, force=force)
    observed = None if observed_peak is None else parse_bytes(observed_peak)
    measured = measurements(profile, strict=strict)
    changed: tuple[str, ...] = ()
    try:
        if file is not None:
            case = with_flags(case_of_file(file, case_id, measured), flags, measured)
            changed = case.changed
            if memory:
                _memory_only(case, observed, svg, json=json)
                return
            result, chosen = _search(case, top, left_s(deadline)), case.plan
        else:
            wanted = SearchOptions(top=top + 1, time_limit_s=left_s(deadline))
            result = answer(flags, framework or "torchtitan", wanted, measured=measured, progress=output.progress)
            chosen = result.plans[0].plan
        found = reasons.explain(
            chosen,
            result,
            observed_bytes=observed,
            with_flips=flips and not memory,
            grow=None if file is not None else lambda n: read_cluster(cluster or "dgx-h100", n, gpu=gpu),
            progress=output.progress,
        )
    finally:
        output.end_progress()
    warn_of_doubts(measured)
    _print(found, result, changed, memory=memory, json=json)
    if svg is not None:
        _draw(f"{result.question.model.name}, {degrees_text(found.plan)}", found.estimate, svg, memory=memory)


def _print(
    found: reasons.Explanation, result: SearchResult, changed: tuple[str, ...], *, memory: bool, json: bool
) -> None:
    if json:
        output.emit_json(explanation_document(found, result.question, changed))
    elif memory:
        print_memory(found.memory, memory_text(found.estimate, found.fixes))
    else:
        print_explanation(found, result, changed)


def _search(case: Case, top: int, time_limit_s: float | None) -> SearchResult:
    """Answer the question that a plan or a case is about, on as many GPUs as its plan uses. Raises Infeasible."""
    question, offload = replace(case.question, gpus=case.plan.gpus), case.plan.offload
    bounds = Bounds() if offload == "none" else Bounds(offloads=("none", offload))
    wanted = SearchOptions(top=top, bounds=bounds, time_limit_s=time_limit_s)
    return suggest(question, wanted, progress=output.progress)


def _draw(title: str, estimate: Estimate, path: Path, *, memory: bool) -> None:
    codec.write_text(
        path, memory_picture(estimate.memory, title=title) if memory else estimate_picture(estimate, title=title)
    )
    output.warn(f"saved {path}")


def _memory_only(case: Case, observed: float | None, svg: Path | None, *, json: bool) -> None:
    """Account for the memory of one plan, legal or not."""
    estimate = predict(case.question, case.plan).estimate
    account = reasons.memory_account(estimate, observed)
    fixes = find_fixes(case.question, case.plan, estimate)
    if json:
        found = {"memory": codec.to_builtins(account), "fit": estimate.memory.fit, "fixes": codec.to_builtins(fixes)}
        output.emit_json({"schema_version": output.SCHEMA_VERSION, "changed": list(case.changed), **found})
    else:
        for line in case.changed:
            print(f"changed: {line}")
        print_memory(account, memory_text(estimate, fixes))
    if svg is not None:
        _draw(f"{case.question.model.name}, {degrees_text(case.plan)}", estimate, svg, memory=True)
