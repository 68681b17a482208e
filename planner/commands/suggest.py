"""`planner suggest`: the best plans for a model on a cluster, and why the others lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from planner.commands import serve
from planner.commands.flags import options, suggest_flags
from planner.commands.flags.serving_flags import (
    QUESTION_FLAGS,
    SEPARATE,
    Task,
    TaskOption,
    refuse,
    stated,
    takes_serving_flags,
)
from planner.explain.answer_text import print_search
from planner.explain.documents import search_document
from planner.explain.run_text import print_run, run_document
from planner.io import output
from planner.io.inputs import measurements
from planner.question.cases import schedule_named
from planner.question.flags import Flags
from planner.question.goal import goal_of
from planner.question.learned_runtime import LearnedCalibrations, LearnedRuntime, read_learned
from planner.question.plan_file import plan_file, refuse_overwrite, save_plan
from planner.search.answer import answer
from planner.search.plan_space.candidates import Bounds
from planner.search.plan_space.stated import known_ep_overlaps, known_offloads, read_spans, read_words
from planner.search.result import SearchResult
from planner.search.search import SearchOptions
from planner.search.whole_run import RunAnswer, answer_run
from simulator.runtimes.library import RECOMPUTE_SYNONYMS
from topology.errors import PlannerError, UserError


@takes_serving_flags(QUESTION_FLAGS, {"separate": SEPARATE})
def suggest(
    context: typer.Context,
    model: options.Model = "llama3-8b",
    cluster: options.Cluster = "dgx-h100",
    gpu: options.Gpu = None,
    gpus: suggest_flags.Gpus = None,
    task: TaskOption = Task.TRAIN,
    seq_len: options.SeqLen = 8192,
    global_batch: options.GlobalBatch = None,
    framework: suggest_flags.FrameworkOption = "torchtitan",
    objective: suggest_flags.ObjectiveOption = suggest_flags.Objective.TIME,
    gpu_price: suggest_flags.GpuPrice = None,
    tokens: suggest_flags.Tokens = None,
    deadline: suggest_flags.Deadline = None,
    budget: suggest_flags.Budget = None,
    top: suggest_flags.Top = 5,
    all_variants: suggest_flags.AllVariants = False,
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    compute_dtype: options.ComputeDtype = None,
    max_tp: suggest_flags.MaxTp = None,
    tp: suggest_flags.Tp = None,
    pp: suggest_flags.Pp = None,
    cp: suggest_flags.Cp = None,
    ep: suggest_flags.Ep = None,
    dp_shard: suggest_flags.DpShard = None,
    dp_replicate: suggest_flags.DpReplicate = None,
    schedule: suggest_flags.Schedule = None,
    virtual_stages: suggest_flags.VirtualStages = None,
    micro_batch: suggest_flags.MicroBatch = None,
    recompute: suggest_flags.Recompute = None,
    offload: suggest_flags.Offload = None,
    ep_overlap: suggest_flags.EpOverlap = None,
    time_limit: options.TimeLimit = None,
    simulate: suggest_flags.Simulate = True,
    profile: options.Profile = None,
    runtime: options.LearnedRuntime = None,
    strict: options.Strict = False,
    out: suggest_flags.Out = None,
    pick: suggest_flags.Pick = None,
    force: suggest_flags.Force = False,
    json: options.Json = False,
    *,
    serving: dict[str, Any],
) -> None:
    """Rank the legal plans for one training step by predicted time, memory or cost.

    Every legal plan of the framework is bounded, and those that could be best are costed, so the answer is optimal
    within the model, unless --time-limit cut the search short: then its gap is printed. Defaults that were used are
    printed as assumed.
    """
    given = locals()  # first of all, so that it holds the arguments and nothing else
    if task is Task.SERVE:
        serve.suggest_serving(given)
        return
    refuse(stated(serving), Task.TRAIN)
    if out is not None:
        refuse_overwrite(out, force=force)
    elif pick is not None:
        raise UserError("--pick says which plan --out saves", remedy="--out plan.json")
    goal = goal_of(tokens, gpu_price, deadline, budget)
    learned = None if runtime is None else read_learned(runtime)
    flags, framework = _flags(given, learned)
    try:
        measured = measurements(profile, strict=strict)
        if learned is not None:
            measured = LearnedCalibrations(measured, learned)
        search = (flags, framework, _search_options(given))
        run = answer_run(*search, goal, measured=measured, progress=output.progress) if goal else None
        result = run.result if run else answer(*search, measured=measured, progress=output.progress)
    finally:
        output.end_progress()
    _show(result, run, pick, out, force=force, json=json)


def _flags(given: dict[str, Any], learned: LearnedRuntime | None) -> tuple[Flags, str]:
    """Return the question that the flags ask, and the framework, which a learned runtime knows."""
    compiled = given["compile_model"]
    if learned is not None and compiled is None:
        compiled = learned.compile
    flags = Flags(
        model=given["model"],
        cluster=given["cluster"],
        gpu=given["gpu"],
        gpus=gpu_counts(given["gpus"]),
        seq_len=given["seq_len"],
        global_batch=given["global_batch"],
        runtime={"compile": compiled, "param_dtype": given["param_dtype"], "compute_dtype": given["compute_dtype"]},
    )
    return flags, given["framework"] if learned is None else learned.like


def _search_options(given: dict[str, Any]) -> SearchOptions:
    return SearchOptions(
        objective=given["objective"].value,
        top=max(given["top"], given["pick"] or 1),
        bounds=_bounds(given),
        all_variants=given["all_variants"],
        gpu_price_per_hour=given["gpu_price"],
        simulate=given["simulate"],
        time_limit_s=given["time_limit"],
    )


def _show(
    result: SearchResult, run: RunAnswer | None, pick: int | None, out: Path | None, *, force: bool, json: bool
) -> None:
    """Save a plan where `--out` asks for it, and show the answer, whatever came of saving."""
    unsaved = None if out is None else _save(result, pick, out, force=force)
    if json:
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


def _bounds(given: dict[str, Any]) -> Bounds:
    """Return the parts of a plan that a command's arguments fix. Raises UserError."""
    numbers = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "virtual_stages", "micro_batch")
    spans: dict[str, Any] = {name: read_spans(given[name], "--" + name.replace("_", "-")) for name in numbers}
    schedules, recomputes, offloads = (read_words(given[n], f"--{n}") for n in ("schedule", "recompute", "offload"))
    overlaps = read_words(given["ep_overlap"], "--ep-overlap")
    return Bounds(
        **spans,
        schedules=schedules and tuple(map(schedule_named, schedules)),
        recomputes=recomputes and tuple(RECOMPUTE_SYNONYMS.get(word.lower(), word) for word in recomputes),
        offloads=offloads and known_offloads(offloads),
        ep_overlaps=overlaps and known_ep_overlaps(overlaps),
        max_tp=given["max_tp"],
    )


def gpu_counts(text: str | None) -> tuple[int, ...] | None:
    """Return the numbers of GPUs asked for: None for the whole cluster, none at all for the fewest that fit."""
    if text is None:
        return None
    if text.strip().lower() == "min":
        return ()
    words = [word.strip() for word in text[:1000].split(",")]
    if all(word.isascii() and word.isdigit() and 0 < int(word[:12]) <= 1 << 20 for word in words):
        return tuple(sorted({int(word) for word in words}))
    raise UserError(
        f"--gpus {text!r} is neither a number from 1 to {1 << 20}, nor several, nor min", remedy="--gpus 16"
    )
