"""`planner check`: a configuration of another tool, judged and improved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands import serve
from planner.commands.flags import options
from planner.commands.flags.serving_flags import QUESTION_FLAGS, Task, refuse, stated, takes_serving_flags
from planner.configs.answer import Checked, check_text
from planner.configs.check_document import check_document
from planner.configs.formats.configuration import CheckFlags
from planner.configs.serving import serving_engine
from planner.explain.answer_text import print_estimate
from planner.io import output
from planner.io.inputs import measurements
from planner.io.printable import printable
from simulator.config.estimate import SURE, chance
from topology import codec
from topology.errors import UserError

FILE = "torchtitan TOML or command, Megatron-LM command line or script, Megatron-Bridge recipe dump, DeepSpeed JSON, accelerate YAML, TrainingArguments JSON, vllm serve or SGLang command; - reads stdin."

IN_THE_COMMAND = {"engine", "weights", "kv_cache", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"}
IN_THE_COMMAND |= {"eager", "no_custom_all_reduce"}
# The command says itself with what it serves.
LOAD_FLAGS = {name: kind for name, kind in QUESTION_FLAGS.items() if name not in IN_THE_COMMAND}


@takes_serving_flags(LOAD_FLAGS)
def check(
    file: Annotated[str, typer.Argument(help=FILE)],
    model: Annotated[
        str | None, typer.Option("--model", help="Shipped model or config.json, where the file names none.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Catalogue name, cluster file, capture, or local; default dgx-h100.")
    ] = None,
    gpu: options.Gpu = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, max=1 << 20, help="GPUs it runs on, where the file leaves it open.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len", "--seq", min=1, max=1 << 31, help="Tokens in a sequence, where the file does not say."
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", min=1, max=1 << 31, help="Sequences in a step, where the file does not say."),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option("--micro-batch", min=1, max=1 << 31, help="Sequences in a pass, where the file does not say."),
    ] = None,
    launch: Annotated[
        str, typer.Option("--launch", help="The line that starts it: its GPUs and the program's arguments.")
    ] = "",
    release: Annotated[
        str,
        typer.Option(
            "--release", help="Release of vLLM or SGLang that runs, such as 0.8.3, where the file does not say."
        ),
    ] = "",
    search: Annotated[bool, typer.Option("--search/--no-search", help="Look for the best plan too.")] = True,
    time_limit: options.TimeLimit = None,
    profile: options.Profile = None,
    strict: options.Strict = False,
    json: options.Json = False,
    *,
    serving: dict[str, Any],
) -> None:
    """Check a configuration of another tool: legal, does it fit, how fast, and what to change.

    Changes and the best plan are diffs of the file itself, comments and order kept. Exit code 3 when the configuration is
    not legal; one that does not fit is an answer, and ends with 0.
    """
    text, where = codec.read_path_or_stdin(file)
    flags = CheckFlags(
        model=model,
        cluster=cluster,
        gpu=gpu,
        gpus=gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        micro_batch=micro_batch,
        launch=launch,
        release=release,
    )
    if serving_engine(text):
        batch = {"global_batch": global_batch, "micro_batch": micro_batch}
        others = {"seq_len": seq_len, **batch, "launch": launch or None, "profile": profile, "strict": strict}
        refuse(stated(others | {"time_limit": time_limit}), Task.SERVE)
        serve.check_serving_command(text, where, flags, serving, search=search, json=json)
        return
    refuse(stated({**serving, "release": release or None}), Task.TRAIN)
    if time_limit is not None and not search:
        raise UserError("--time-limit is for the search, which --no-search leaves out", remedy="leave out one of them")
    try:
        checked = check_text(
            text,
            where,
            flags,
            measured=measurements(profile, strict=strict),
            search=search,
            time_limit_s=time_limit,
            progress=output.progress,
        )
    finally:
        output.end_progress()
    if json:
        output.emit_json(check_document(checked))
    else:
        _print(checked, Path(where).name)
    if not checked.legal:
        raise typer.Exit(3)


def _print(checked: Checked, name: str) -> None:
    configuration = checked.configuration
    version = f" {configuration.version}" if configuration.version else ""
    print(printable(f"file      {name}: {configuration.framework}{version}"))
    if checked.found is not None:
        print_estimate(checked.found)
    else:
        for line in checked.assumed:
            print(printable(f"assumed   {line}"))
        for problem in checked.problems:
            print(printable(f"{problem.grade!s:9} {problem.message}"))
        print("verdict   not legal: nothing to estimate")
    if configuration.unknown:
        print(printable(f"unknown   {', '.join(configuration.unknown)}"))
    for number, change in enumerate(checked.changes):
        print(
            printable(
                f"{'change' if number == 0 else 'or':9} {change.what}: {change.step_s:.3g} s, {_fit(change.fit_probability)}"
            )
        )
    if checked.changes:
        print(printable(checked.changes[0].diff))
    if checked.best is not None:
        estimate = checked.best.estimate
        fit = _fit(estimate.memory.fit_probability)
        print(printable(f"best      {estimate.step_s.value:.3g} s, {fit}"))
        print(printable(checked.best.diff))
    elif checked.no_better:
        print(printable(f"best      {checked.no_better}"))


def _fit(probability: float) -> str:
    if probability >= SURE:
        return "fits"
    return "does not fit" if probability <= 1 - SURE else f"fits with a chance of {chance(probability)}"
