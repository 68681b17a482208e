"""The flags that spell one plan, shared by the commands that can be asked about one without a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from planner.cases import Case

Model = Annotated[str | None, typer.Option("--model", "--config", help="Shipped model, config.json or its directory.")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="Catalogue name or cluster file.")]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, max=1 << 20, help="How many GPUs of it.")]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", min=1, max=1 << 31, help="Sequences in a step; default 8 a GPU.")
]
MicroBatch = Annotated[int | None, typer.Option("--micro-batch", min=1, help="Sequences in a micro batch.")]
DpReplicate = Annotated[int | None, typer.Option("--dp-replicate", min=1, help="Replicas.")]
DpShard = Annotated[int | None, typer.Option("--dp-shard", min=1, help="FSDP shards; default fills the GPUs.")]
Zero = Annotated[int | None, typer.Option("--zero", min=0, max=3, help="ZeRO stage over --dp-replicate.")]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel degree.")]
SequenceParallel = Annotated[
    bool | None, typer.Option("--sequence-parallel/--no-sequence-parallel", help="Default: the framework's.")
]
Cp = Annotated[int, typer.Option("--cp", min=1, help="Context-parallel degree.")]
Pp = Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages.")]
Ep = Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel degree.")]
VirtualStages = Annotated[int, typer.Option("--virtual-stages", min=1, help="Stages a rank holds.")]
Schedule = Annotated[str | None, typer.Option("--schedule", help="Pipeline schedule, such as 1F1B.")]
Recompute = Annotated[
    str | None, typer.Option("--recompute", help="none, selective, selective-op, full, or the runtime's own word.")
]
TpOverlap = Annotated[
    str | None,
    typer.Option("--tp-overlap", help="none, ring, fused, async, ...; or by site: attention_in=fused,mlp_out=ring."),
]
Runtime = Annotated[str | None, typer.Option("--runtime", "--framework", help="The software that runs it.")]


def spelled(given: dict[str, Any]) -> Case:
    """Return the case that a command's arguments describe; `given` has them under their parameters' names.

    The data-parallel degree left unsaid fills the GPUs. Raises UserError where a value cannot be.
    """
    from planner.cases import case_from_flags  # noqa: PLC0415 - keeps `--help` light

    asked = ("model", "cluster", "gpus", "gpu", "seq_len", "global_batch")
    degrees = ("dp_replicate", "dp_shard", "tp", "sequence_parallel", "cp", "pp", "ep", "virtual_stages")
    return case_from_flags(
        **{name: given[name] for name in asked},
        plan={
            **{name: given[name] for name in (*degrees, "schedule", "recompute", "tp_overlap")},
            "zero_stage": given["zero"],
            "micro_batch_size": given["micro_batch"],
        },
        runtime={
            "name": given["runtime"] or "torchtitan",
            "compile": given["compile_model"],
            "param_dtype": given["param_dtype"],
        },
    )
