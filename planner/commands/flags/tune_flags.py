"""Options that `planner tune` alone has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands.flags import options

Model = Annotated[str | None, typer.Option("--model", "--config", help="Shipped model, config.json or its directory.")]
Cluster = Annotated[str, typer.Option("--cluster", help="local, or what this machine is: a name or file.")]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, max=1 << 20, help="How many GPUs of it.")]
Framework = Annotated[
    str, typer.Option("--framework", help="Whose plans: meshwright (our executor), torchtitan, megatron-lm.")
]
Objective = Annotated[str, typer.Option("--objective", help="time, throughput or cost: one order here.")]
Budget = Annotated[str | None, typer.Option("--budget", help="Time for all trials: 90s, 10m, 2h; default 10m.")]
Trials = Annotated[int | None, typer.Option("--trials", min=1, max=1000, help="No more than so many trials.")]
Within = Annotated[
    float | None,
    typer.Option("--within", parser=options.percent, metavar="PERCENT", help="By how much to be better; default 1%."),
]
Device = Annotated[str, typer.Option("--device", help="cuda, or cpu to try plans where times mean little.")]
Steps = Annotated[int, typer.Option("--steps", min=2, max=1000, help="Steps to measure in a trial.")]
TrialLimit = Annotated[str, typer.Option("--trial-limit", help="Time for one trial, its start included.")]
AllowBusy = Annotated[bool, typer.Option("--allow-busy", help="Run though others use the GPUs.")]
Command = Annotated[
    str | None,
    typer.Option("--command", help="What runs a trial: 'torchrun ... {config}'; also {folder} and {gpus}."),
]
Metric = Annotated[
    str | None,
    typer.Option("--metric", help="How its output tells steps: jsonl, or a regular expression with (?P<step_s>...)."),
]
Recorded = Annotated[
    Path | None, typer.Option("--recorded", help="Look trials up in these recorded runs (cases), run nothing.")
]
CaseId = Annotated[str | None, typer.Option("--id", help="A recorded run of the question, where there are several.")]
State = Annotated[Path | None, typer.Option("--state", help="State file; default: in a new folder here.")]
Resume = Annotated[Path | None, typer.Option("--resume", help="Continue the tuning of this state file.")]
Launcher = Annotated[str, typer.Option("--launcher", help="local, or a job of slurm or trainjob for all trials.")]
Each = Annotated[bool, typer.Option("--each", help="With --launcher: a job for each trial, submitted from here.")]
JobName = Annotated[str, typer.Option("--job-name", help="Name of a job.")]
Image = Annotated[str | None, typer.Option("--image", help="Container image of a trainjob.")]
Submit = Annotated[bool, typer.Option("--submit", help="Hand the job to sbatch or kubectl.")]
Show = Annotated[bool, typer.Option("--show", help="With --resume: answer from the state file, and try nothing.")]
Learn = Annotated[
    Path | None, typer.Option("--learn", help="Add what the trials' operators took to this profile of such GPUs.")
]
Html = Annotated[Path | None, typer.Option("--html", help="Write a report with pictures to this file.")]
Out = Annotated[Path | None, typer.Option("--out", help="Save the best measured plan to this file.")]
Force = Annotated[bool, typer.Option("--force", help="Let --out and --state replace a file.")]
