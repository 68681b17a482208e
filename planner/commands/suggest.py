"""`planner suggest`: the best plans for a model on a cluster, and why the others lost."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import options

if TYPE_CHECKING:
    from planner.search import SearchResult
    from topology.cluster import Cluster


class Task(StrEnum):
    TRAIN = "train"
    SERVE = "serve"
    FINETUNE = "finetune"


class Objective(StrEnum):
    TIME = "time"
    THROUGHPUT = "throughput"
    MEMORY = "memory"


def suggest(
    model: options.Model = "llama3-8b",
    cluster: options.Cluster = "dgx-h100",
    gpu: options.Gpu = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="Number of GPUs to use, or min for the fewest.")] = None,
    task: Annotated[Task, typer.Option("--task", help="Only train is covered so far.")] = Task.TRAIN,
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
    objective: Annotated[Objective, typer.Option("--objective", help="What the best plan has least of, or most.")] = (
        Objective.TIME
    ),
    top: Annotated[int, typer.Option("--top", min=1, max=100, help="How many plans to list.")] = 5,
    all_variants: Annotated[
        bool, typer.Option("--all", help="List variants of one grid too, not only the best of each.")
    ] = False,
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    max_tp: Annotated[
        int | None, typer.Option("--max-tp", min=1, help="Largest tensor-parallel degree tried; default a node.")
    ] = None,
    profile: options.Profile = None,
    out: Annotated[Path | None, typer.Option("--out", help="Save the best plan to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace a file.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="For searches with randomness; this one has none.")] = 0,
    json: options.Json = False,
) -> None:
    """Rank the legal plans for one training step by predicted time, throughput or memory.

    Every legal plan of the framework is costed, so the answer is optimal within the closed form. Defaults that were
    used are printed as assumed.
    """
    from planner import output  # noqa: PLC0415 - keeps `--help` light
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
        max_tp=max_tp,
        profile=profile,
        seed=seed,
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
        )
        save_plan(content, out, force=force)
    if json:
        output.emit_json(document(result))
    else:
        from planner.tables import print_search  # noqa: PLC0415 - as above

        print_search(result, out=str(out) if out else None)


def document(result: SearchResult) -> dict[str, Any]:
    """Return the JSON document of an answer, as CONTRACT.md describes it."""
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
    max_tp: int | None,
    profile: Path | None,
    seed: int,
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """Return the answer to a question as people put it, which is what the explorer asks too. `progress` gets passing states."""
    from dataclasses import replace  # noqa: PLC0415 - keeps `--help` light

    from planner import output, search  # noqa: PLC0415 - as above
    from planner.around import with_or_without  # noqa: PLC0415 - as above
    from planner.candidates import Bounds  # noqa: PLC0415 - as above
    from planner.cases import SEQUENCES_PER_GPU, resolve_runtime  # noqa: PLC0415 - as above
    from planner.frameworks import framework_named  # noqa: PLC0415 - as above
    from planner.infeasible import minimal_gpus  # noqa: PLC0415 - as above
    from planner.inputs import cluster_of, profile_of, unsound_gpus  # noqa: PLC0415 - as above
    from simulator.hf_config import load_model  # noqa: PLC0415 - as above
    from simulator.workload import Workload  # noqa: PLC0415 - as above

    _training_only(task)
    count = _gpu_count(gpus)
    rules = framework_named(framework)
    network = load_model(model)
    version = framework.partition("@")[2] or None
    named = {"name": "pytorch" if rules.name == "any" else rules.name, "version": version, **runtime}
    resolved, assumed = resolve_runtime(named)
    assumed = [*network.assumed, *assumed]
    machine = cluster_of(cluster, count or None, gpu=gpu)
    unsound = unsound_gpus(machine) if count is None and machine.node_count == 1 else ()
    measured = profile_of(profile, machine)

    def grow(n: int) -> Cluster:
        return cluster_of(cluster, n, gpu=gpu)

    if count == 0:
        # The batch is fixed before the count is known: it must not grow with the answer.
        asked = Workload(seq_len=seq_len, global_batch_size=global_batch or SEQUENCES_PER_GPU * machine.gpus_per_node)
        count, machine, bound = minimal_gpus(network, machine, asked, rules, resolved, profile=measured, grow=grow)
        assumed.append(f"{count} GPUs is the fewest that fit" + (f"; {bound}" if bound else ""))
    else:
        count = count or machine.gpu_count
        asked = Workload(seq_len=seq_len, global_batch_size=global_batch or SEQUENCES_PER_GPU * count)
    if global_batch is None:
        assumed.append(f"global batch {asked.global_batch_size} sequences ({SEQUENCES_PER_GPU} a GPU of the question)")

    def run(number: int) -> SearchResult:
        return search.suggest(
            network,
            machine,
            asked,
            framework=rules,
            objective=objective,
            top=top,
            gpus=number,
            seed=seed,
            runtime=resolved,
            profile=measured,
            bounds=Bounds(max_tp=max_tp),
            all_variants=all_variants,
            grow=grow,
            progress=progress or output.progress,
        )

    try:
        found = with_or_without(run, gpus=count, unsound=unsound) if unsound else run(count)
    finally:
        output.end_progress()
    return replace(found, assumed=tuple(dict.fromkeys([*found.assumed, *assumed])))


def _training_only(task: Task) -> None:
    from topology.errors import UserError  # noqa: PLC0415 - keeps `--help` light

    if task is not Task.TRAIN:
        raise UserError(
            f"--task {task.value} is not covered yet",
            why="only training steps are predicted in this version",
            remedy="use --task train",
        )


def _gpu_count(text: str | None) -> int | None:
    """Return the count asked for: None for the whole cluster, 0 for the fewest that fit."""
    from topology.errors import UserError  # noqa: PLC0415 - keeps `--help` light

    if text is None:
        return None
    if text.strip().lower() == "min":
        return 0
    if text.strip().isascii() and text.strip().isdigit() and 0 < int(text[:12]) <= 1 << 20:
        return int(text)
    raise UserError(f"--gpus {text!r} is neither a number from 1 to {1 << 20} nor min", remedy="--gpus 16")
