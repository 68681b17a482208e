"""Options that `planner shard` alone has."""

from __future__ import annotations

from typing import Annotated

import typer

File = Annotated[str | None, typer.Argument(metavar="FILE", help="Cases: mesh, operators, placements; - for stdin.")]
Model = Annotated[
    str | None, typer.Option("--model", help="Instead of FILE: layers of a shipped model or config.json, none placed.")
]
Layers = Annotated[
    int | None, typer.Option("--layers", min=1, help="How many of its layers; default: all, with embedding and loss.")
]
Mesh = Annotated[str | None, typer.Option("--mesh", help="With --model: axes and sizes, data=8,model=8.")]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", "--seq", min=1, max=1 << 24, help="With --model: tokens; default 4096.")
]
MicroBatch = Annotated[
    int | None,
    typer.Option(
        "--micro-batch", min=1, max=1 << 24, help="With --model: sequences in all; default: as many as ranks."
    ),
]
Cluster = Annotated[
    str | None, typer.Option("--cluster", help="Choose by time there: catalogue name, cluster file or capture.")
]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, max=1 << 20, help="GPUs of the cluster to have.")]
Program = Annotated[
    str | None, typer.Option("--program", help="Write the program of a captured graph there, for the executor.")
]
Python = Annotated[
    str | None, typer.Option("--python", help="Write a Python file of DTensor placements there, which torch runs.")
]
Picture = Annotated[
    str | None, typer.Option("--picture", help="Write the plan as an SVG there: operators, placements, collectives.")
]
Listing = Annotated[
    bool, typer.Option("--listing", help="Print the program, a line a tensor: what of it a device has, and exchanges.")
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Say why each collective is there, and what the plan without it takes.")
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", min=0.1, help="Seconds to look for the cheapest; then the best so far, and its gap."),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option("--memory-limit", min=0.001, help="GiB of a rank for parameters, their state and what is saved."),
]
