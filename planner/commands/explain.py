"""`planner explain`: where a plan's step and memory go, why the others lost, and when the answer would be another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import options

if TYPE_CHECKING:
    from planner.cases import Case
    from planner.explain import Explanation
    from planner.search import SearchResult
    from simulator.estimate import Estimate
    from simulator.model import Model
    from simulator.plan import Plan


def explain(
    file: Annotated[
        str | None,
        typer.Argument(help="Plan file of suggest --out, or a case; without one the best plan is explained."),
    ] = None,
    case_id: Annotated[str | None, typer.Option("--id", help="Which case of a list.")] = None,
    model: options.Model = "llama3-8b",
    cluster: options.Cluster = "dgx-h100",
    gpu: options.Gpu = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="Number of GPUs to use.")] = None,
    seq_len: options.SeqLen = 8192,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, max=1 << 31, help="Sequences in a step; default 8 a GPU.")
    ] = None,
    framework: Annotated[str, typer.Option("--framework", help="Whose rules and kernels.")] = "torchtitan",
    top: Annotated[int, typer.Option("--top", min=1, max=20, help="How many runners-up.")] = 4,
    memory: Annotated[bool, typer.Option("--memory", help="Memory only, stage by stage.")] = False,
    observed_peak: Annotated[
        str | None, typer.Option("--observed-peak", help="A peak that was measured: 32GB, 29.8GiB.")
    ] = None,
    flips: Annotated[bool, typer.Option("--flips/--no-flips", help="Ask again on changed machines.")] = True,
    compile_model: options.Compile = None,
    param_dtype: options.ParamDtype = None,
    profile: options.Profile = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw step and memory to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --svg replace a file.")] = False,
    json: options.Json = False,
) -> None:
    """Explain a plan: from the peak of the GPU to the achieved step, memory by stage, runners-up, flip points.

    Without a file, the best plan of the question that the flags ask, as planner suggest would answer it.
    """
    from planner import explain as reasons  # noqa: PLC0415 - as above
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.inputs import bytes_of, cluster_of, profile_of  # noqa: PLC0415 - as above
    from planner.plan_file import refuse_overwrite  # noqa: PLC0415 - as above

    if svg is not None:
        refuse_overwrite(svg, force=force)
    observed = None if observed_peak is None else bytes_of(observed_peak)
    measured = profile_of(profile)
    if file is not None:
        asked = _case(file, case_id)
        if memory:
            _memory_only(asked, observed, measured, svg, json=json)
            return
        result, plan = _search(asked, measured, top), asked.plan
    else:
        from planner.commands.suggest import Task, answer  # noqa: PLC0415 - as above

        result = answer(
            model=model,
            cluster=cluster,
            gpu=gpu,
            gpus=gpus,
            task=Task.TRAIN,
            seq_len=seq_len,
            global_batch=global_batch,
            framework=framework,
            objective="time",
            top=top + 1,
            all_variants=False,
            runtime={"compile": compile_model, "param_dtype": param_dtype},
            bounds={},
            profile=profile,
        )
        plan = result.plans[0].plan
    try:
        found = reasons.explain(
            plan,
            result,
            profile=measured,
            observed_bytes=observed,
            with_flips=flips and not memory,
            grow=None if file is not None else lambda n: cluster_of(cluster, n, gpu=gpu),
            progress=output.progress,
        )
    finally:
        output.end_progress()
    if svg is not None:
        _draw(found.plan, found.estimate, result.model, svg, memory=memory)
    if json:
        output.emit_json(document(found, result))
        return
    from planner.explain_text import print_explanation, print_memory  # noqa: PLC0415 - as above
    from planner.headroom import room_text  # noqa: PLC0415 - as above

    if memory:
        print_memory(found.memory, room_text(found.estimate, found.room))
    else:
        print_explanation(found, result)


def document(found: Explanation, result: SearchResult) -> dict[str, Any]:
    """Return the JSON document of an explanation."""
    from planner.output import SCHEMA_VERSION  # noqa: PLC0415 - keeps `--help` light
    from topology import codec  # noqa: PLC0415 - as above

    return {
        "schema_version": SCHEMA_VERSION,
        "question": {
            "model": result.model.name,
            "cluster": result.cluster.name,
            "gpus": found.plan.gpus,
            "framework": result.framework.name,
            "workload": codec.to_builtins(result.workload),
            "runtime": codec.to_builtins(result.runtime),
        },
        **codec.to_builtins(found),
    }


def _case(file: str, case_id: str | None) -> Case:
    from planner.cases import case_of_file  # noqa: PLC0415 - keeps `--help` light

    return case_of_file(file, case_id)


def _search(asked: Case, profile: Any, top: int) -> SearchResult:
    """Answer the question that a plan or a case is about. Raises Infeasible."""
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.search import suggest  # noqa: PLC0415 - as above

    try:
        return suggest(
            asked.model,
            asked.cluster,
            asked.workload,
            framework=asked.framework,
            top=top,
            gpus=asked.plan.gpus,
            runtime=asked.runtime,
            profile=profile,
            simulate=False,
            progress=output.progress,
        )
    finally:
        output.end_progress()


def _draw(plan: Plan, estimate: Estimate, model: Model, path: Path, *, memory: bool) -> None:
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.pictures.memory import memory as held  # noqa: PLC0415 - as above
    from planner.pictures.waterfall import explained  # noqa: PLC0415 - as above
    from planner.tables import arithmetic  # noqa: PLC0415 - as above
    from topology import codec  # noqa: PLC0415 - as above

    title = f"{model.name}, {arithmetic(plan)}"
    codec.write_text(path, held(estimate.memory, title=title) if memory else explained(estimate, title=title))
    output.warn(f"saved {path}")


def _memory_only(asked: Case, observed: float | None, profile: Any, svg: Path | None, *, json: bool) -> None:
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.commands.estimate import room_of  # noqa: PLC0415 - as above
    from planner.costs import cost_table  # noqa: PLC0415 - as above
    from planner.explain import memory_account  # noqa: PLC0415 - as above
    from planner.explain_text import print_memory  # noqa: PLC0415 - as above
    from planner.headroom import room_text  # noqa: PLC0415 - as above
    from topology import codec  # noqa: PLC0415 - as above

    table = cost_table(asked.model, asked.cluster, asked.workload, [asked.plan], asked.runtime, profile)
    estimate = table.estimate(0)
    account, room = memory_account(estimate, observed), room_of(asked, estimate, profile)
    if svg is not None:
        _draw(asked.plan, estimate, asked.model, svg, memory=True)
    if json:
        found = {"memory": codec.to_builtins(account), "fit": estimate.memory.fit, "room": codec.to_builtins(room)}
        output.emit_json({"schema_version": output.SCHEMA_VERSION, **found})
    else:
        print_memory(account, room_text(estimate, room))
