"""`planner suggest`: the best plans for a model on a cluster, and why the others lost."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands.flags import options
from planner.commands.flags.serving_flags import (
    QUESTION_FLAGS,
    SEPARATE,
    Task,
    TaskOption,
    refuse,
    stated,
    takes_serving_flags,
)
from planner.commands.serve.suggest import suggest_serving
from planner.explain.answer_text import print_search
from planner.explain.documents import search_document
from planner.explain.run_text import print_run, run_document
from planner.io import output
from planner.io.inputs import measurements
from planner.question.cases import schedule_named
from planner.question.flags import Flags
from planner.question.goal import goal_of
from planner.question.learned_runtime import LearnedCalibrations, read_learned
from planner.question.plan_file import plan_file, refuse_overwrite, save_plan
from planner.search.answer import answer
from planner.search.plan_space.candidates import Bounds
from planner.search.plan_space.stated import known_offloads, read_spans, read_words
from planner.search.search import SearchOptions
from planner.search.whole_run import answer_run
from simulator.runtimes.library import RECOMPUTE_SYNONYMS
from topology.errors import UserError


class Objective(StrEnum):
    TIME = "time"
    THROUGHPUT = "throughput"
    LATENCY = "latency"
    MEMORY = "memory"
    COST = "cost"
    PARETO = "pareto"


Gpus = Annotated[
    str | None, typer.Option("--gpus", help="Number of GPUs, several (8,16,32) to compare, or min for the fewest.")
]
FrameworkOption = Annotated[
    str,
    typer.Option(
        "--framework", help="torchtitan, megatron-lm, deepspeed, megatron-deepspeed, llm-foundry, pytorch, any."
    ),
]
ObjectiveOption = Annotated[
    Objective,
    typer.Option(
        "--objective",
        help="time, memory, or pareto of both; throughput (a GPU) and cost (a token) differ where --gpus compares. "
        "Serving: latency, throughput, cost.",
    ),
]
GpuPrice = Annotated[
    float | None, typer.Option("--gpu-price", min=0.0, help="Price of a GPU for an hour, to cost tokens.")
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", help="Tokens of the whole run (2T, 300B): its days, energy and cost.")
]
Deadline = Annotated[
    str | None,
    typer.Option("--deadline", help="Time for the whole run (30d, 12h, 6w): the cheapest number of GPUs within it."),
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="Money for the whole run (1M): the soonest number of GPUs that it pays for."),
]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit", min=0.0, help="Seconds after which the best so far is the answer.")
]
MaxTp = Annotated[
    int | None, typer.Option("--max-tp", min=1, help="Largest tensor-parallel degree tried; default a node.")
]


def _part(flag: str, what: str) -> Any:
    """Return the option of a part of the plan that may be fixed."""
    return typer.Option(flag, help=f"Only plans with this {what}.", metavar="VALUES")


@takes_serving_flags(QUESTION_FLAGS, {"separate": SEPARATE})
def suggest(
    model: options.Model = "llama3-8b",
    cluster: options.Cluster = "dgx-h100",
    gpu: options.Gpu = None,
    gpus: Gpus = None,
    task: TaskOption = Task.TRAIN,
    seq_len: options.SeqLen = 8192,
    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", min=1, max=1 << 31, help="Sequences in a step; default: a published recipe's."),
    ] = None,
    framework: FrameworkOption = "torchtitan",
    objective: ObjectiveOption = Objective.TIME,
    gpu_price: GpuPrice = None,
    tokens: Tokens = None,
    deadline: Deadline = None,
    budget: Budget = None,
    top: Annotated[int, typer.Option("--top", min=1, max=100, help="How many plans to list.")] = 5,
    all_variants: Annotated[
        bool, typer.Option("--all", help="List variants of one grid too, not only the best of each.")
    ] = False,
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    max_tp: MaxTp = None,
    tp: Annotated[str | None, _part("--tp", "tensor-parallel degree: 8, 1,2,4 or 2-8, as all that follow")] = None,
    pp: Annotated[str | None, _part("--pp", "number of pipeline stages")] = None,
    cp: Annotated[str | None, _part("--cp", "context-parallel degree")] = None,
    ep: Annotated[str | None, _part("--ep", "expert-parallel degree")] = None,
    dp_shard: Annotated[str | None, _part("--dp-shard", "number of FSDP shards")] = None,
    dp_replicate: Annotated[str | None, _part("--dp-replicate", "number of replicas")] = None,
    schedule: Annotated[str | None, _part("--schedule", "pipeline schedule (words, with commas)")] = None,
    virtual_stages: Annotated[str | None, _part("--virtual-stages", "number of stages on a pipeline rank")] = None,
    micro_batch: Annotated[str | None, _part("--micro-batch", "micro batch, in sequences")] = None,
    recompute: Annotated[str | None, _part("--recompute", "recomputation (words, with commas)")] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload", help="Kept in host memory: none, optimizer, or parameters as well (words, with commas)."
        ),
    ] = None,
    time_limit: TimeLimit = None,
    simulate: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Let the simulation order plans that are close.")
    ] = True,
    profile: options.Profile = None,
    runtime: options.LearnedRuntime = None,
    strict: options.Strict = False,
    out: Annotated[Path | None, typer.Option("--out", help="Save the best plan to this file.")] = None,
    pick: Annotated[
        int | None, typer.Option("--pick", min=1, max=100, help="Which listed plan --out saves; default the first.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
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
        suggest_serving(given)
        return
    refuse(stated(serving), Task.TRAIN)
    if out is not None:
        refuse_overwrite(out, force=force)
    elif pick is not None:
        raise UserError("--pick says which plan --out saves", remedy="--out plan.json")
    goal = goal_of(tokens, gpu_price, deadline, budget)
    learned = None if runtime is None else read_learned(runtime)
    if learned is not None:
        framework = learned.like
        compile_model = learned.compile if compile_model is None else compile_model
    flags = Flags(
        model=model,
        cluster=cluster,
        gpu=gpu,
        gpus=gpu_counts(gpus),
        seq_len=seq_len,
        global_batch=global_batch,
        runtime={"compile": compile_model, "param_dtype": param_dtype},
    )
    wanted = SearchOptions(
        objective=objective.value,
        top=max(top, pick or 1),
        bounds=_bounds(given),
        all_variants=all_variants,
        gpu_price_per_hour=gpu_price,
        simulate=simulate,
        time_limit_s=time_limit,
    )
    try:
        measured = measurements(profile, strict=strict)
        if learned is not None:
            measured = LearnedCalibrations(measured, learned)
        run = goal and answer_run(flags, framework, wanted, goal, measured=measured, progress=output.progress)
        result = run.result if run else answer(flags, framework, wanted, measured=measured, progress=output.progress)
    finally:
        output.end_progress()
    unsaved = None
    if out is not None:
        if pick and pick > len(result.plans):
            raise UserError(f"--pick {pick}: {len(result.plans)} plans are listed", remedy="--all lists variants too")
        chosen = result.plans[(pick or 1) - 1]
        content = plan_file(result.question, chosen.plan, chosen.estimate)
        unsaved = output.attempt(lambda: save_plan(content, out, force=force))
    if json:
        output.emit_json(search_document(result) | (run_document(run) if run else {}))
    else:
        print_search(result, out=str(out) if out and unsaved is None else None)
        if run:
            print_run(run)
    if unsaved is not None:
        raise unsaved


def _bounds(given: dict[str, Any]) -> Bounds:
    """Return the parts of a plan that a command's arguments fix. Raises UserError."""
    numbers = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "virtual_stages", "micro_batch")
    spans: dict[str, Any] = {name: read_spans(given[name], "--" + name.replace("_", "-")) for name in numbers}
    schedules, recomputes, offloads = (read_words(given[n], f"--{n}") for n in ("schedule", "recompute", "offload"))
    return Bounds(
        **spans,
        schedules=schedules and tuple(map(schedule_named, schedules)),
        recomputes=recomputes and tuple(RECOMPUTE_SYNONYMS.get(word.lower(), word) for word in recomputes),
        offloads=offloads and known_offloads(offloads),
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
