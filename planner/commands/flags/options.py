"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option("--model", "--config", help="Shipped model name, config.json or its directory.")]
Cluster = Annotated[
    str, typer.Option("--cluster", help="Catalogue name, cluster file, captured topology text, or local.")
]
Gpu = Annotated[str | None, typer.Option("--gpu", help="GPU model where a captured text does not name it (h200-sxm).")]
SeqLen = Annotated[int, typer.Option("--seq-len", "--seq", min=1, max=1 << 31, help="Tokens in a sequence.")]
GlobalBatch = Annotated[
    int | None,
    typer.Option("--global-batch", min=1, max=1 << 31, help="Sequences in a step; default: a published recipe's."),
]
Profile = Annotated[Path | None, typer.Option("--profile", help="Measured profile of the cluster.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse a profile of other GPUs, another driver or long ago.")]
Redact = Annotated[
    bool,
    typer.Option("--redact", help="Leave out UUIDs, addresses, folders, host and user names, to show it to others."),
]
LearnedRuntime = Annotated[
    Path | None, typer.Option("--runtime", help="Learned runtime (planner learn) in the place of the cases' own.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Compile = Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile the model.")]


def percent(text: str) -> float:
    """Return the number of percent that `text` says: 15 and 15% are the same. Raises BadParameter (exit 2)."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a number of percent")
    return value


Tolerance = Annotated[
    float | None,
    typer.Option("--tolerance", parser=percent, metavar="PERCENT", help="Exit 4 when an error exceeds this: 5 or 5%."),
]
ParamDtype = Annotated[
    str | None, typer.Option("--param-dtype", help="Type parameters are stored in: float32, bfloat16 or float16.")
]
ComputeDtype = Annotated[
    str | None,
    typer.Option(
        "--compute-dtype",
        help="Type products compute in: bfloat16, float16, float32, tf32, float8 or float4; default the runtime's.",
    ),
]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit", min=0.0, help="Seconds after which the best so far is the answer.")
]
