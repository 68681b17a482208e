"""`planner suggest`: the best plans for a model on a cluster, and why the others lost."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import options

if TYPE_CHECKING:
    from planner.search import SearchResult
    from topology.cluster import Cluster


class Task(StrEnum):
    TRAIN = "train"
    SERVE = "serve"


class Objective(StrEnum):
    TIME = "time"
    THROUGHPUT = "throughput"
    MEMORY = "memory"
    COST = "cost"
    PARETO = "pareto"


def suggest(
    model: options.Model = "llama3-8b",
    cluster: options.Cluster = "dgx-h100",
    gpu: options.Gpu = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", help="Number of GPUs, several (8,16,32) to compare, or min for the fewest.")
    ] = None,
    task: Annotated[Task, typer.Option("--task", help="train; serving is not covered yet.")] = Task.TRAIN,
    seq_len: options.SeqLen = 8192,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, max=1 << 31, help="Sequences in a step; default 8 a GPU.")
    ] = None,
    framework: Annotated[
        str,
        typer.Option(
            "--framework", help="torchtitan, megatron-lm, deepspeed, megatron-deepspeed, llm-foundry, pytorch, any."
        ),
    ] = "torchtitan",
    objective: Annotated[
        Objective,
        typer.Option(
            "--objective",
            help="time, memory, or pareto of both; throughput (a GPU) and cost (a token) differ where --gpus compares.",
        ),
    ] = Objective.TIME,
    gpu_price: Annotated[
        float | None, typer.Option("--gpu-price", min=0.0, help="Price of a GPU for an hour, to cost tokens.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, max=100, help="How many plans to list.")] = 5,
    all_variants: Annotated[
        bool, typer.Option("--all", help="List variants of one grid too, not only the best of each.")
    ] = False,
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    max_tp: Annotated[
        int | None, typer.Option("--max-tp", min=1, help="Largest tensor-parallel degree tried; default a node.")
    ] = None,
    recompute: Annotated[str | None, typer.Option("--recompute", help="Only plans with this recomputation.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", min=1, help="Only plans with this micro batch.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", min=0.0, help="Seconds after which the best so far is the answer.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Let the simulation order plans that are close.")
    ] = True,
    profile: options.Profile = None,
    out: Annotated[Path | None, typer.Option("--out", help="Save the best plan to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
    json: options.Json = False,
) -> None:
    """Rank the legal plans for one training step by predicted time, memory or cost.

    Every legal plan of the framework is bounded, and those that could be best are costed, so the answer is optimal
    within the model, unless --time-limit cut the search short: then its gap is printed. Defaults that were used are
    printed as assumed.
    """
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.inputs import profile_of  # noqa: PLC0415 - as above
    from planner.plan_file import plan_file, refuse_overwrite, save_plan  # noqa: PLC0415 - as above

    if out is not None:
        refuse_overwrite(out, force=force)
    result = answer(
        model=model,
        cluster=cluster,
        gpu=gpu,
        gpus=gpus,
        task=task,
        seq_len=seq_len,
        global_batch=global_batch,
        framework=framework,
        objective=objective.value,
        top=top,
        all_variants=all_variants,
        runtime={"compile": compile_model, "param_dtype": param_dtype},
        bounds={
            "max_tp": max_tp,
            "micro_batch": micro_batch,
            "recomputes": None if recompute is None else (recompute,),
        },
        gpu_price=gpu_price,
        time_limit=time_limit,
        simulate=simulate,
        profile=profile,
    )
    if out is not None:
        content = plan_file(
            plan=result.plans[0].plan,
            estimate=result.plans[0].estimate,
            model=result.model,
            cluster=result.cluster,
            workload=result.workload,
            runtime=result.runtime,
            framework=result.framework.name,
            profile=profile_of(profile),
        )
        save_plan(content, out, force=force)
    if json:
        output.emit_json(document(result))
    else:
        from planner.tables import print_search  # noqa: PLC0415 - as above

        print_search(result, out=str(out) if out else None)


def document(result: SearchResult) -> dict[str, Any]:
    """Return the JSON document of an answer: the question, what was assumed, the search, plans best first, rejections."""
    from planner.output import SCHEMA_VERSION  # noqa: PLC0415 - keeps `--help` light
    from topology import codec  # noqa: PLC0415 - as above

    return {
        "schema_version": SCHEMA_VERSION,
        "question": {
            "model": result.model.name,
            "cluster": result.cluster.name,
            "gpus": result.plans[0].plan.gpus,
            "framework": result.framework.name,
            "workload": codec.to_builtins(result.workload),
            "runtime": codec.to_builtins(result.runtime),
        },
        "assumed": list(result.assumed),
        "search": codec.to_builtins(result.search),
        "plans": codec.to_builtins(result.plans),
        "rejected": result.rejected,
        "by_gpus": codec.to_builtins(result.by_gpus),
    }


def answer(
    *,
    model: str,
    cluster: str,
    gpu: str | None,
    gpus: str | None,
    task: Task,
    seq_len: int,
    global_batch: int | None,
    framework: str,
    objective: str,
    top: int,
    all_variants: bool,
    runtime: dict[str, Any],
    bounds: dict[str, Any],
    profile: Path | None,
    gpu_price: float | None = None,
    time_limit: float | None = None,
    simulate: bool = True,
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """Return the answer to a question as people put it, which is what the explorer asks too.

    `progress` gets passing states. Raises Infeasible (exit 3) and the errors of what is named.
    """
    from dataclasses import replace  # noqa: PLC0415 - keeps `--help` light

    from planner import output, search  # noqa: PLC0415 - as above
    from planner.around import with_or_without  # noqa: PLC0415 - as above
    from planner.candidates import Bounds  # noqa: PLC0415 - as above
    from planner.case_runtime import resolve_runtime  # noqa: PLC0415 - as above
    from planner.cases import SEQUENCES_PER_GPU  # noqa: PLC0415 - as above
    from planner.counts import best_count  # noqa: PLC0415 - as above
    from planner.frameworks import framework_named  # noqa: PLC0415 - as above
    from planner.infeasible import minimal_gpus  # noqa: PLC0415 - as above
    from planner.inputs import cluster_of, profile_of, unsound_gpus  # noqa: PLC0415 - as above
    from simulator.hf_config import load_model  # noqa: PLC0415 - as above
    from simulator.overlap_samples import assumed_of  # noqa: PLC0415 - as above
    from simulator.workload import Workload  # noqa: PLC0415 - as above

    _training_only(task)
    counts = _gpu_counts(gpus)
    rules = framework_named(framework)
    network = load_model(model)
    version = framework.partition("@")[2] or None
    named = {"name": "pytorch" if rules.name == "any" else rules.name, "version": version, **runtime}
    resolved, assumed = resolve_runtime(named)
    assumed = [*network.assumed, *assumed]
    machine = cluster_of(cluster, max(counts) if counts else None, gpu=gpu)
    unsound = unsound_gpus(machine) if counts is None and machine.node_count == 1 else ()
    measured = profile_of(profile, machine)
    limits = Bounds(**bounds)

    def grow(n: int) -> Cluster:
        return cluster_of(cluster, n, gpu=gpu)

    # The batch is fixed before the number of GPUs is chosen: it must not grow with the answer.
    largest = max(counts) if counts else machine.gpus_per_node if counts == () else machine.gpu_count
    asked = Workload(seq_len=seq_len, global_batch_size=global_batch or SEQUENCES_PER_GPU * largest)
    if global_batch is None:
        assumed.append(f"global batch {asked.global_batch_size} sequences ({SEQUENCES_PER_GPU} a GPU of the question)")
    if counts == ():
        fewest, machine, proof = minimal_gpus(
            network, machine, asked, rules, resolved, profile=measured, bounds=limits, grow=grow
        )
        counts = (fewest,)
        assumed.append(f"{fewest} GPUs is the fewest that fit" + (f": {proof}" if proof else ""))
    started = monotonic()

    def run(number: int) -> SearchResult:
        left = None if time_limit is None else max(0.0, time_limit - (monotonic() - started))
        return search.suggest(
            network,
            machine if counts is None or len(counts) == 1 else grow(number),
            asked,
            framework=rules,
            objective=objective,
            top=top,
            gpus=number,
            runtime=resolved,
            profile=measured,
            bounds=limits,
            all_variants=all_variants,
            gpu_price_per_hour=gpu_price,
            simulate=simulate,
            time_limit_s=left,
            grow=grow,
            progress=progress or output.progress,
        )

    try:
        if counts is not None and len(counts) > 1:
            found = best_count(run, counts, objective=objective, gpu_price_per_hour=gpu_price)
        elif unsound:
            found = with_or_without(run, gpus=machine.gpu_count, unsound=unsound, objective=objective)
        else:
            found = run(counts[0] if counts else machine.gpu_count)
    finally:
        output.end_progress()
    rates = assumed_of([one.plan.tp_overlap for one in found.plans], measured, machine)
    return replace(found, assumed=tuple(dict.fromkeys([*found.assumed, *assumed, *rates])))


def _training_only(task: Task) -> None:
    from topology.errors import UserError  # noqa: PLC0415 - keeps `--help` light

    if task is not Task.TRAIN:
        raise UserError(
            f"--task {task.value} is not covered yet",
            why="only training steps are predicted in this version",
            remedy="use --task train",
        )


def _gpu_counts(text: str | None) -> tuple[int, ...] | None:
    """Return the numbers of GPUs asked for: None for the whole cluster, none at all for the fewest that fit."""
    from topology.errors import UserError  # noqa: PLC0415 - keeps `--help` light

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
