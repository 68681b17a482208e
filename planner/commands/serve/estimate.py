"""`planner estimate --task serve`: what clients of one deployment would see, and whether it is legal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from planner.io import output
from planner.question.flags import Flags, flags_of_plan
from planner.question.plan_file import refuse_overwrite
from planner.requests.flag import values_of
from planner.requests.serving import Task, refuse
from planner.requests.serving import stated as stated_names
from planner.requests.training import Estimate
from planner.serving import (
    ServingAnswer,
    ServingFlags,
    answer_deployment,
    estimate_document,
    load_serving,
    print_answer,
    serving_file,
    serving_question,
    stated_deployment,
    with_serving_flags,
)
from topology import codec

DEGREES = frozenset({"tp", "pp", "ep"})  # what a deployment shares with a training plan
SPELLED = {"zero_stage": "--zero", "micro_batch_size": "--micro-batch", "name": "--runtime", "version": "--runtime"}


def serving_flags(
    flags: Flags,
    serving: Mapping[str, Any],
    others: Mapping[str, Any] | None = None,
    *,
    profile: Path | None = None,
    strict: bool = False,
) -> ServingFlags:
    """Return what a command states of serving. Raises UserError for options that only training has."""
    only = {"seq_len": flags.seq_len, "global_batch": flags.global_batch, **flags.plan, **flags.runtime}
    names = [name for name, value in only.items() if name not in DEGREES and value is not None]
    refuse([*names, *stated_names(others or {})], Task.SERVE, SPELLED)
    return ServingFlags(
        model=flags.model,
        cluster=flags.cluster,
        gpu=flags.gpu,
        gpus=None if flags.gpus is None else flags.gpus[0],
        tp=flags.plan.get("tp"),
        pp=flags.plan.get("pp"),
        ep=flags.plan.get("ep"),
        profile=profile,
        strict=strict,
        **serving,
    )


def answer_of(flags: ServingFlags, plan: str | Path | None) -> ServingAnswer:
    """Return the answer to flags, or to a saved plan as flags change it."""
    if plan is None:
        question = serving_question(flags)
        return answer_deployment(question, *stated_deployment(question, flags))
    question, deployment, changed = with_serving_flags(load_serving(plan), flags)
    return answer_deployment(question, deployment, tuple(f"changed {line}" for line in changed))


def estimate(asked: Estimate) -> None:
    """Print the answer; raise Exit(3) where the deployment is not legal."""
    serving = values_of(asked.load, asked.engine, asked.deployment)
    stated = flags_of_plan(asked.stated)
    flags = serving_flags(stated, serving, {"case": asked.case}, profile=asked.profile, strict=asked.strict)
    plan, out = asked.plan, asked.out
    if out is not None:
        refuse_overwrite(out, force=asked.force)
    found = answer_of(flags, plan)
    if asked.json:
        output.emit_json(estimate_document("" if plan is None else str(plan), found))
    else:
        print_answer(found)
    if found.problems:
        raise typer.Exit(3)
    if out is not None:
        codec.write_text(out, codec.to_json(serving_file(found.question, found.deployment)) + "\n")
