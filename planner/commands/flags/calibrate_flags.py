"""Options that `planner calibrate` alone has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Cluster = Annotated[
    str, typer.Option("--cluster", help="What this machine is: local, a catalogue name or a cluster file.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Profile to write; one that exists is added to.")]
Budget = Annotated[str, typer.Option("--budget", help="Time for measuring, such as 60s or 10m.")]
Model = Annotated[
    str | None, typer.Option("--model", "--config", help="Measure what decides between this model's plans.")
]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", "--seq", min=1, max=1 << 31, help="Tokens in a sequence, with --model.")
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", min=1, max=1 << 31, help="Sequences in a step, with --model.")
]
MicroBatch = Annotated[
    int | None, typer.Option("--micro-batch", min=1, max=1 << 20, help="Only plans with this micro batch.")
]
Framework = Annotated[str | None, typer.Option("--framework", help="Whose plans, with --model; default torchtitan.")]
Wanted = Annotated[
    list[Path] | None,
    typer.Option("--for", help="Plan or case file: measure what its steps rest on; again for more."),
]
Runtime = Annotated[
    list[str] | None,
    typer.Option("--runtime", help="Measure what typical plans of this runtime rest on; again for more."),
]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="How many GPUs to use; default all.")]
Operators = Annotated[bool, typer.Option("--operators/--no-operators", help="Measure operators.")]
Collectives = Annotated[bool, typer.Option("--collectives/--no-collectives", help="Measure collectives.")]
Text = Annotated[
    Path | None, typer.Option("--text", help="torchtitan's tokenizer/ and c4_test/, to load data as it does.")
]
Store = Annotated[bool, typer.Option("--store/--no-store", help="Also keep the samples among this user's data.")]
AllowBusy = Annotated[bool, typer.Option("--allow-busy", help="Measure though others use the GPUs.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Say what would be measured, in which order and how long; --cluster may be another machine."
    ),
]
Device = Annotated[str, typer.Option("--device", hidden=True)]
