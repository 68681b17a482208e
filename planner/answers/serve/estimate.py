"""What clients of one deployment would see, and whether the deployment is legal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.question.flags import Flags, flags_of_plan
from planner.question.plan_file import refuse_overwrite
from planner.requests.flag import values_of
from planner.requests.serving import Task, refuse
from planner.requests.serving import stated as stated_names
from planner.requests.training import Estimate
from planner.serving.answer import ServingAnswer, answer_deployment
from planner.serving.overrides import with_serving_flags
from planner.serving.plan_file import load_serving, serving_file
from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.serving.reports.documents import estimate_document
from planner.serving.stated import stated_deployment
from topology import codec
from topology.codec import JsonObject
from topology.errors import Infeasible

DEGREES = frozenset({"tp", "pp", "ep"})  # fields that a deployment shares with a training plan
SPELLED = {
    "zero_stage": "--zero",
    "micro_batch_size": "--micro-batch",
    "name": "--runtime",
    "version": "--runtime",
    "adapter": "--lora, --qlora or --freeze",
    "savers": "--saver",
    "graph_scopes": "--cuda-graph",
}


def serving_flags(
    flags: Flags,
    serving: Mapping[str, Any],
    others: Mapping[str, Any] | None = None,
    *,
    profile: Path | None = None,
    strict: bool = False,
) -> ServingFlags:
    """Return what a command states about serving. Raises UserError for options that only training has."""
    lengths = {name: getattr(flags, name) for name in ("seq_len", "global_batch", "document_len", "routing")}
    only = {**lengths, **flags.plan, **flags.runtime}
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
    """Return the answer to flags, or to a saved plan changed by flags."""
    if plan is None:
        question = serving_question(flags)
        return answer_deployment(question, *stated_deployment(question, flags))
    question, deployment, changed = with_serving_flags(load_serving(plan), flags)
    return answer_deployment(question, deployment, tuple(f"changed {line}" for line in changed))


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedDeployment:
    """The answer of `planner estimate --task serve`."""

    name: str
    found: ServingAnswer

    @property
    def legal(self) -> bool:
        return not self.found.problems

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the deployment to a file. Raises UserError for one that is there already, unless `force` is given, and
        Infeasible where it is not legal.
        """
        refuse_overwrite(Path(path), force=force)
        if not self.legal:
            raise Infeasible("the deployment is not legal", why="; ".join(self.found.problems))
        codec.write_text(path, codec.to_json(serving_file(self.found.question, self.found.deployment)) + "\n")

    def to_dict(self) -> JsonObject:
        """Return the JSON document of the command."""
        return estimate_document(self.name, self.found)


def estimate(asked: Estimate) -> EstimatedDeployment:
    """Return the answer. Raises UserError for flags that do not apply to a deployment."""
    serving = values_of(asked.load, asked.engine, asked.deployment)
    stated = flags_of_plan(asked.stated)
    flags = serving_flags(stated, serving, {"case": asked.case}, profile=asked.profile, strict=asked.strict)
    if asked.out is not None:
        refuse_overwrite(asked.out, force=asked.force)
    return EstimatedDeployment(name="" if asked.plan is None else str(asked.plan), found=answer_of(flags, asked.plan))
