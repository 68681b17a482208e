"""`planner check`: a configuration of another tool, judged and improved."""

from __future__ import annotations

from pathlib import Path

import typer

from planner.configs.answer import Checked, check_text
from planner.configs.check_document import check_document
from planner.configs.formats.configuration import CheckFlags
from planner.configs.serving import VERSIONS, CheckedServing, check_serving, serving_engine
from planner.configs.serving_document import checked_serving_document
from planner.explain.answer_text import print_estimate
from planner.io import output
from planner.io.inputs import measurements
from planner.io.output import console
from planner.io.printable import printable
from planner.requests.flag import values_of
from planner.requests.serving import Task, refuse, stated
from planner.requests.tools import Check
from planner.serving import ServingFlags, deployment_text, print_answer
from simulator.config.estimate import SURE, chance
from topology import codec
from topology.errors import UserError
from topology.units import two_digits


def check(asked: Check) -> None:
    """Print what `planner check` answers."""
    text, where = codec.read_path_or_stdin(asked.file)
    flags = CheckFlags(
        model=asked.model,
        cluster=asked.cluster,
        gpu=asked.gpu,
        gpus=asked.gpus,
        seq_len=asked.seq_len,
        global_batch=asked.global_batch,
        micro_batch=asked.micro_batch,
        launch=asked.launch,
        release=asked.release,
    )
    if serving_engine(text):
        batch = {"global_batch": asked.global_batch, "micro_batch": asked.micro_batch}
        others = {
            "seq_len": asked.seq_len,
            **batch,
            "launch": asked.launch or None,
            "profile": asked.profile,
            "strict": asked.strict,
        }
        refuse(stated(others | {"time_limit": asked.time_limit}), Task.SERVE)
        _check_serving(text, where, flags, asked)
        return
    refuse(stated({**values_of(asked.load), "release": asked.release or None}), Task.TRAIN)
    if asked.time_limit is not None and not asked.search:
        raise UserError("--time-limit is for the search, which --no-search leaves out", remedy="leave out one of them")
    try:
        checked = check_text(
            text,
            where,
            flags,
            measured=measurements(asked.profile, strict=asked.strict),
            search=asked.search,
            time_limit_s=asked.time_limit,
            progress=output.progress,
        )
    finally:
        output.end_progress()
    if asked.json:
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


def _check_serving(text: str, where: str, stated: CheckFlags, asked: Check) -> None:
    """Print what there is to say about a command; raise Exit(3) where the engine would not run it."""
    try:
        load = ServingFlags(**values_of(asked.load))
        checked = check_serving(text, where, stated, load, search=asked.search, progress=output.progress)
    finally:
        output.end_progress()
    if asked.json:
        output.emit_json(checked_serving_document(where, checked))
    else:
        _print_serving(checked, Path(where).name)
    if not checked.legal:
        raise typer.Exit(3)


def _print_serving(checked: CheckedServing, name: str) -> None:
    screen = console()
    screen.print(printable(f"file      {name}: {checked.engine} {VERSIONS[checked.engine]}"))
    for problem in checked.problems:
        screen.print(printable(f"illegal   {problem}"))
    if checked.answer is not None and checked.answer.estimate is not None:
        print_answer(checked.answer)
    for one in checked.changes:
        estimate = one.plan.estimate
        figures = (
            f"first token {two_digits(1e3 * estimate.ttft_s.value)} ms, a token {two_digits(1e3 * estimate.tpot_s.value)} ms, "
            f"{two_digits(estimate.output_tokens_per_s_per_gpu.value)} tokens/s a GPU"
        )
        screen.print(printable(f"\nbetter    {deployment_text(one.plan.deployment)}: {figures}"))
        screen.print(printable(f"change    {one.what}"))
    if checked.changes:
        print(printable(checked.changes[0].diff))
    elif checked.no_better:
        screen.print(printable(f"\nbest      {checked.no_better}"))
