"""Options that `planner explain` alone has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[
    str | None,
    typer.Argument(help="Plan file of suggest --out, or a case; without one the best plan is explained."),
]
CaseId = Annotated[str | None, typer.Option("--id", help="Which case of a list.")]
Gpus = Annotated[str | None, typer.Option("--gpus", help="Number of GPUs to use.")]
Framework = Annotated[str | None, typer.Option("--framework", help="Whose rules and kernels; default torchtitan.")]
Top = Annotated[int, typer.Option("--top", min=1, max=20, help="How many runners-up.")]
Memory = Annotated[bool, typer.Option("--memory", help="Memory only, stage by stage.")]
ObservedPeak = Annotated[str | None, typer.Option("--observed-peak", help="A peak that was measured: 32GB, 29.8GiB.")]
Flips = Annotated[
    bool,
    typer.Option("--flips/--no-flips", help="Search again on changed machines: takes as long as dozens of answers."),
]
Svg = Annotated[Path | None, typer.Option("--svg", help="Draw step and memory to this file.")]
Force = Annotated[bool, typer.Option("--force", help="Let --svg replace a file.")]
