"""Options that `planner suggest` alone has."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Objective(StrEnum):
    TIME = "time"
    THROUGHPUT = "throughput"
    LATENCY = "latency"
    MEMORY = "memory"
    COST = "cost"
    PARETO = "pareto"


Gpus = Annotated[
    str | None, typer.Option("--gpus", help="Number of GPUs, several (8,16,32) to compare, or min for the fewest.")
]
FrameworkOption = Annotated[
    str,
    typer.Option(
        "--framework", help="torchtitan, megatron-lm, deepspeed, megatron-deepspeed, llm-foundry, pytorch, any."
    ),
]
ObjectiveOption = Annotated[
    Objective,
    typer.Option(
        "--objective",
        help="time, memory, or pareto of both; throughput (a GPU) and cost (a token) differ where --gpus compares. "
        "Serving: latency, throughput, cost.",
    ),
]
GpuPrice = Annotated[
    float | None, typer.Option("--gpu-price", min=0.0, max=1e9, help="Price of a GPU for an hour, to cost tokens.")
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", help="Tokens of the whole run (2T, 300B): its days, energy and cost.")
]
Deadline = Annotated[
    str | None,
    typer.Option("--deadline", help="Time for the whole run (30d, 12h, 6w): the cheapest number of GPUs within it."),
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="Money for the whole run (1M): the soonest number of GPUs that it pays for."),
]
MaxTp = Annotated[
    int | None, typer.Option("--max-tp", min=1, help="Largest tensor-parallel degree tried; default a node.")
]


def _part(flag: str, what: str) -> Any:
    """Return the option of a part of the plan that may be fixed."""
    return typer.Option(flag, help=f"Only plans with this {what}.", metavar="VALUES")


Top = Annotated[int, typer.Option("--top", min=1, max=100, help="How many plans to list.")]
AllVariants = Annotated[bool, typer.Option("--all", help="List variants of one grid too, not only the best of each.")]
Tp = Annotated[str | None, _part("--tp", "tensor-parallel degree: 8, 1,2,4 or 2-8, as all that follow")]
Pp = Annotated[str | None, _part("--pp", "number of pipeline stages")]
Cp = Annotated[str | None, _part("--cp", "context-parallel degree")]
Ep = Annotated[str | None, _part("--ep", "expert-parallel degree")]
DpShard = Annotated[str | None, _part("--dp-shard", "number of FSDP shards")]
DpReplicate = Annotated[str | None, _part("--dp-replicate", "number of replicas")]
Schedule = Annotated[str | None, _part("--schedule", "pipeline schedule (words, with commas)")]
VirtualStages = Annotated[str | None, _part("--virtual-stages", "number of stages on a pipeline rank")]
MicroBatch = Annotated[str | None, _part("--micro-batch", "micro batch, in sequences")]
Recompute = Annotated[str | None, _part("--recompute", "recomputation (words, with commas)")]
Offload = Annotated[
    str | None,
    typer.Option("--offload", help="Kept in host memory: none, optimizer, or parameters as well (words, with commas)."),
]
EpOverlap = Annotated[
    str | None,
    typer.Option(
        "--ep-overlap", help="All-to-all of experts beside compute: none, combined, delay_wgrad (words, with commas)."
    ),
]
Simulate = Annotated[
    bool, typer.Option("--simulate/--no-simulate", help="Let the simulation order plans that are close.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Save the best plan to this file.")]
Pick = Annotated[
    int | None, typer.Option("--pick", min=1, max=100, help="Which listed plan --out saves; default the first.")
]
Force = Annotated[bool, typer.Option("--force", help="Let --out replace a file.")]
