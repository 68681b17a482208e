"""`planner suggest`: the best plans for a model on a cluster, and why the others lost."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from planner.commands import options
from planner.explain.documents import search_document
from planner.explain.tables import print_search
from planner.io import output
from planner.io.inputs import measurements
from planner.question.flags import Flags
from planner.question.plan_file import plan_file, refuse_overwrite, save_plan
from planner.search.answer import answer
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions
from topology.errors import UserError


class Task(StrEnum):
    TRAIN = "train"
    SERVE = "serve"


class Objective(StrEnum):
    TIME = "time"
    THROUGHPUT = "throughput"
    MEMORY = "memory"
    COST = "cost"
    PARETO = "pareto"


Gpus = Annotated[
    str | None, typer.Option("--gpus", help="Number of GPUs, several (8,16,32) to compare, or min for the fewest.")
]
TaskOption = Annotated[Task, typer.Option("--task", help="train; serving is not covered yet.")]
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
        help="time, memory, or pareto of both; throughput (a GPU) and cost (a token) differ where --gpus compares.",
    ),
]
GpuPrice = Annotated[
    float | None, typer.Option("--gpu-price", min=0.0, help="Price of a GPU for an hour, to cost tokens.")
]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit", min=0.0, help="Seconds after which the best so far is the answer.")
]
MaxTp = Annotated[
    int | None, typer.Option("--max-tp", min=1, help="Largest tensor-parallel degree tried; default a node.")
]


def suggest(
    model: options.Model = "llama3-8b",
    cluster: options.Cluster = "dgx-h100",
    gpu: options.Gpu = None,
    gpus: Gpus = None,
    task: TaskOption = Task.TRAIN,
    seq_len: options.SeqLen = 8192,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, max=1 << 31, help="Sequences in a step; default 8 a GPU.")
    ] = None,
    framework: FrameworkOption = "torchtitan",
    objective: ObjectiveOption = Objective.TIME,
    gpu_price: GpuPrice = None,
    top: Annotated[int, typer.Option("--top", min=1, max=100, help="How many plans to list.")] = 5,
    all_variants: Annotated[
        bool, typer.Option("--all", help="List variants of one grid too, not only the best of each.")
    ] = False,
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    max_tp: MaxTp = None,
    recompute: Annotated[str | None, typer.Option("--recompute", help="Only plans with this recomputation.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", min=1, help="Only plans with this micro batch.")
    ] = None,
    time_limit: TimeLimit = None,
    simulate: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Let the simulation order plans that are close.")
    ] = True,
    profile: options.Profile = None,
    strict: options.Strict = False,
    out: Annotated[Path | None, typer.Option("--out", help="Save the best plan to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
    json: options.Json = False,
) -> None:
    """Rank the legal plans for one training step by predicted time, memory or cost.

    Every legal plan of the framework is bounded, and those that could be best are costed, so the answer is optimal
    within the model, unless --time-limit cut the search short: then its gap is printed. Defaults that were used are
    printed as assumed.
    """
    if out is not None:
        refuse_overwrite(out, force=force)
    _training_only(task)
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
        top=top,
        bounds=Bounds(max_tp=max_tp, micro_batch=micro_batch, recomputes=None if recompute is None else (recompute,)),
        all_variants=all_variants,
        gpu_price_per_hour=gpu_price,
        simulate=simulate,
        time_limit_s=time_limit,
    )
    try:
        result = answer(
            flags, framework, wanted, measured=measurements(profile, strict=strict), progress=output.progress
        )
    finally:
        output.end_progress()
    unsaved = None
    if out is not None:
        best = result.plans[0]
        content = plan_file(result.question, best.plan, best.estimate)
        unsaved = output.attempt(lambda: save_plan(content, out, force=force))
    if json:
        output.emit_json(search_document(result))
    else:
        print_search(result, out=str(out) if out and unsaved is None else None)
    if unsaved is not None:
        raise unsaved


def _training_only(task: Task) -> None:
    if task is not Task.TRAIN:
        raise UserError(
            f"--task {task.value} is not covered yet",
            why="only training steps are predicted in this version",
            remedy="use --task train",
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
