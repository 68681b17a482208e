"""The flags of one plan, shared by the commands that can be asked about one without a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from planner.commands.flags import options
from planner.question.flags import Flags
from planner.question.learned_runtime import is_learned

Model = Annotated[str | None, typer.Option("--model", "--config", help="Shipped model, config.json or its directory.")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="Catalogue name or cluster file.")]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, max=1 << 20, help="How many GPUs of it.")]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", "--seq", min=1, max=1 << 31, help="Tokens in a sequence; default 8192.")
]
MicroBatch = Annotated[int | None, typer.Option("--micro-batch", min=1, help="Sequences in a micro batch.")]
DpReplicate = Annotated[int | None, typer.Option("--dp-replicate", min=1, help="Replicas.")]
DpShard = Annotated[int | None, typer.Option("--dp-shard", min=1, help="FSDP shards; default fills the GPUs.")]
Zero = Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage over --dp-replicate.")]
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel degree; default 1.")]
SequenceParallel = Annotated[
    bool | None, typer.Option("--sequence-parallel/--no-sequence-parallel", help="Default: the framework's.")
]
Cp = Annotated[int | None, typer.Option("--cp", min=1, help="Context-parallel degree; default 1.")]
Pp = Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline stages; default 1.")]
Ep = Annotated[int | None, typer.Option("--ep", min=1, help="Expert-parallel degree; default 1.")]
VirtualStages = Annotated[int | None, typer.Option("--virtual-stages", min=1, help="Stages a rank holds; default 1.")]
Schedule = Annotated[str | None, typer.Option("--schedule", help="Pipeline schedule, such as 1F1B.")]
Recompute = Annotated[
    str | None, typer.Option("--recompute", help="none, selective, selective-op, full, or the runtime's own word.")
]
TpOverlap = Annotated[
    str | None,
    typer.Option("--tp-overlap", help="none, ring, fused, async, ...; or by site: attention_in=fused,mlp_out=ring."),
]
Offload = Annotated[
    str | None,
    typer.Option("--offload", help="Kept in host memory: none, optimizer, or parameters as well; default none."),
]
EpOverlap = Annotated[
    str | None,
    typer.Option(
        "--ep-overlap",
        help="All-to-all of experts beside compute: none, combined with another micro batch's passes, delay_wgrad.",
    ),
]
Runtime = Annotated[
    str | None,
    typer.Option(
        "--runtime", "--framework", help="The software that runs it, with a version or without: torchtitan@0.2.2."
    ),
]


# By the parameter that carries them; all default to None, which is not said.
PLAN_FLAGS: dict[str, Any] = {
    "model": Model,
    "cluster": Cluster,
    "gpu": options.Gpu,
    "gpus": Gpus,
    "seq_len": SeqLen,
    "global_batch": options.GlobalBatch,
    "micro_batch": MicroBatch,
    "dp_replicate": DpReplicate,
    "dp_shard": DpShard,
    "zero": Zero,
    "tp": Tp,
    "sequence_parallel": SequenceParallel,
    "cp": Cp,
    "pp": Pp,
    "ep": Ep,
    "virtual_stages": VirtualStages,
    "schedule": Schedule,
    "recompute": Recompute,
    "tp_overlap": TpOverlap,
    "offload": Offload,
    "ep_overlap": EpOverlap,
    "runtime": Runtime,
    "compile_model": options.Compile,
    "param_dtype": options.ParamDtype,
    "compute_dtype": options.ComputeDtype,
}


def takes_plan_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command`, whose first parameter is a `Flags`, as typer sees it: with an option for each of `PLAN_FLAGS`."""

    @wraps(command)
    def run(**given: Any) -> None:
        stated = {name: given.pop(name) for name in PLAN_FLAGS}
        command(flags_of(stated), **given)

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [parameter.replace(kind=keyword) for parameter in own]
    parameters += [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in PLAN_FLAGS.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def flags_of(given: dict[str, Any]) -> Flags:
    """Return what a command's arguments state of one plan; `given` has them under their parameters' names."""
    degrees = ("dp_replicate", "dp_shard", "tp", "sequence_parallel", "cp", "pp", "ep", "virtual_stages")
    return Flags(
        **{name: given[name] for name in ("model", "cluster", "gpu", "seq_len", "global_batch")},
        gpus=None if given["gpus"] is None else (given["gpus"],),
        plan={
            **{
                name: given[name] for name in (*degrees, "schedule", "recompute", "tp_overlap", "offload", "ep_overlap")
            },
            "zero_stage": given["zero"],
            "micro_batch_size": given["micro_batch"],
        },
        runtime={
            **_runtime(given["runtime"]),
            "compile": given["compile_model"],
            **{name: given[name] for name in ("param_dtype", "compute_dtype")},
        },
    )


def _runtime(text: str | None) -> dict[str, str | None]:
    """Return the name and the version of `torchtitan@0.2.2`; a learned runtime is a file, and so has no version."""
    name, mark, version = (text or "").partition("@")
    return {"name": name, "version": version} if mark and version and not is_learned(text) else {"name": text}
