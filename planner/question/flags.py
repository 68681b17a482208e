"""Flags: what the command line or the explorer states of a question, before names are looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.io.inputs import refuse_empty
from planner.question.case_fields import type_of
from planner.question.case_runtime import graphs_stated
from planner.question.learned_runtime import is_learned
from planner.requests.machines import Calibrate
from planner.requests.runs import Tune
from planner.requests.training import Explain, OnePlan, Suggest, Trained
from simulator.config.adapter import FROZEN, frozen_parts
from simulator.config.model import Model
from simulator.config.overlap_sites import USERBUFFERS
from simulator.config.plan import Plan
from simulator.runtimes.library import graph_parts
from topology.codec import JsonObject
from topology.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """None means not stated. `model` and `cluster` are names or paths, `gpu` a GPU model for captured texts.

    `gpus` holds the numbers of GPUs to choose from: None for the whole cluster, empty for the fewest that fit.
    `runtime` has keys of a case's runtime, `plan` those of a case's plan.
    """

    model: str | None = None
    cluster: str | None = None
    gpu: str | None = None
    gpus: tuple[int, ...] | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    runtime: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    routing: str | None = None
    document_len: int | None = None

    def __post_init__(self) -> None:
        """Raise UserError for a model or cluster that is stated and empty: an unset shell variable."""
        refuse_empty(model=self.model, cluster=self.cluster)


def adapter_stated(trained: Trained) -> JsonObject | None:
    """Return the adapters and frozen weights of flags, in the form of a case. Raises UserError."""
    said = {name: value for name in ("lora", "qlora", "freeze") if (value := getattr(trained, name)) is not None}
    if len(said) > 1:
        raise UserError(
            f"--{' and --'.join(said)} are two ways to train", why="a run has one of them", remedy="give one of them"
        )
    for name, text in said.items():
        head, colon, rest = text.partition(":")
        names = [word.strip() for word in (text if name == "freeze" else rest).split(",") if word.strip()]
        if name == "freeze":
            return {"kind": FROZEN, "target_modules": names}
        if not (head.isascii() and head.isdigit()) or (colon and not names):
            raise UserError(f"--{name} {text[:60]!r} is no rank", remedy=f"--{name} 16, or --{name} 16:q_proj,v_proj")
        return {"kind": name, "rank": int(head[:9]), **({"target_modules": names} if names else {})}
    return None


def _graphs_asked(text: str | None) -> JsonObject:
    """Return what a flag says of CUDA graphs, as a case has it. Raises UserError for parts that nobody has."""
    if text is None:
        return {}
    words = [word.strip() for word in text[:1000].split(",") if word.strip()]
    known = graph_parts()
    if not words or (unknown := [word for word in words if word not in {"full", *known}]):
        raise UserError(
            f"--cuda-graph {', '.join(unknown) if words else repr(text)} is no part of a layer",
            why=f"known: full, {', '.join(known)}",
        )
    return graphs_stated(words, "--cuda-graph")


def flags_of_question(
    asked: Calibrate | Explain | OnePlan | Suggest | Tune,
    *,
    cluster: str | None,
    gpu: str | None = None,
    gpus: tuple[int, ...] | None = None,
    plan: Mapping[str, Any] | None = None,
    **runtime: Any,
) -> Flags:
    """Return the flags of a request's question; `runtime` overrides its own fields."""
    return Flags(
        model=asked.model,
        cluster=cluster,
        gpu=gpu,
        gpus=gpus,
        seq_len=asked.seq_len,
        global_batch=asked.global_batch,
        plan=plan or {},
        routing=trained.routing if (trained := getattr(asked, "trained", None)) else None,
        document_len=trained.document_len if trained else None,
        runtime={
            "compile": asked.compile_model,
            "param_dtype": type_of(asked.param_dtype),
            "compute_dtype": type_of(asked.compute_dtype),
            "adapter": adapter_stated(trained) if trained else None,
            "optimizer": trained.optimizer if trained else None,
            "moe_dispatcher": trained.moe_dispatcher if trained else None,
            "expert_products": trained.expert_products if trained else None,
            **(_graphs_asked(trained.cuda_graph) if trained else {}),
            "savers": trained.saver.split(",") if trained and trained.saver else None,
            **runtime,
        },
    )


def flags_of_search(asked: Suggest) -> Flags:
    """Return the flags of a search. Raises UserError for an invalid number of GPUs."""
    return flags_of_question(asked, cluster=asked.cluster, gpu=asked.gpu, gpus=gpu_counts(asked.gpus))


def flags_of_plan(asked: OnePlan) -> Flags:
    """Return the flags of a request about one plan."""
    name, mark, version = (asked.runtime or "").partition("@")
    # A learned runtime is a file, so it has no version.
    versioned = bool(mark and version) and not is_learned(asked.runtime)
    runtime = {"name": name, "version": version} if versioned else {"name": asked.runtime}
    gpus = None if asked.gpus is None else (asked.gpus,)
    return flags_of_question(asked, cluster=asked.cluster, gpu=asked.gpu, gpus=gpus, plan=asked.plan, **runtime)


def gpu_counts(text: str | None) -> tuple[int, ...] | None:
    """Return the numbers of GPUs asked for: None for the whole cluster, empty for the fewest that fit."""
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


def refuse_unused(flags: Flags, plan: Plan) -> None:
    """Raise UserError if a flag states how a plan does what it does not do."""
    said = flags.plan
    for name, used, what in (
        ("schedule", plan.pp > 1, "orders the stages of a pipeline, and the plan has none (pp 1)"),
        ("cp_method", plan.cp > 1, "is a way of context parallelism, and the plan has none (cp 1)"),
        ("sequence_parallel", plan.tp > 1, "divides tokens over tensor-parallel ranks, and the plan has none (tp 1)"),
        (
            "tp_overlap",
            plan.tp > 1 or said.get("tp_overlap") != USERBUFFERS,  # the rules refuse the others
            "overlaps the products of tensor-parallel ranks, and the plan has none (tp 1)",
        ),
    ):
        if said.get(name) and not used:
            flag = f"--{name.replace('_', '-')}"
            axis = what[-5:-3]
            raise UserError(
                f"{flag}{'' if said[name] is True else f' {said[name]}'} {what}",
                remedy=f"--{axis} 2, or leave {flag} out",
            )


def refuse_absent(flags: Flags, model: Model) -> None:
    """Raise UserError if a flag is about experts or modules that the model does not have."""
    adapter = flags.runtime.get("adapter")
    if adapter and adapter.get("kind") == FROZEN:
        frozen_parts(adapter["target_modules"], model)
    said = {**flags.runtime, "routing": flags.routing}
    for name in ("moe_dispatcher", "expert_products", "routing"):
        if said.get(name) and model.moe is None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{flag} {said[name]} is about experts, and {model.name} has none", remedy=f"leave {flag} out"
            )
