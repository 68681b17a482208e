"""A scheduler's job for a whole tuning: a node of the cluster resumes its state file, and all trials run there."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from planner.export.job_files import BASH, directives, slurm_options
from planner.runs.schedulers import launchers
from planner.runs.schedulers.launchers import PLAIN_PATH, STARTING_S, JobFile, LauncherJob, ray_file
from planner.tune.state import TuningRequest
from topology.errors import BadInput, UserError

ON_KUBERNETES = {"kubernetes": launchers.kubernetes, "jobset": launchers.jobset, "trainjob": launchers.trainjob}
LAUNCHERS = ("slurm", "ray", *ON_KUBERNETES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob:
    """The job of the tuning in `state`."""

    request: TuningRequest
    state: Path
    launcher: str
    name: str = "meshwright-tune"
    image: str | None = None
    volume: str | None = None
    python: str = "python3"

    def written(self) -> JobFile:
        """Return the job file. Raises UserError if the plans need several nodes or a setting is missing."""
        if self.launcher not in LAUNCHERS:
            raise UserError(f"--launcher is {self.launcher!r}", remedy=f"local, or one of {', '.join(LAUNCHERS)}")
        if self.request.gpus > self.request.cluster.gpus_per_node:
            raise UserError(
                f"{self.request.gpus} GPUs are more than a node of {self.request.cluster.name} has",
                why="one job runs all trials on one node",
                remedy="--each: a job for every trial, submitted from a machine that sees the folder of the nodes",
            )
        launchers.require_settings(self.launcher, image=self.image, volume=self.volume)
        directory = self.state.parent.resolve()
        job = LauncherJob(
            name=self.name,
            directory=directory,
            ranks=self.request.gpus,
            nodes=1,
            budget_s=self.request.budget_s,
            image=self.image,
            volume=self.volume,
            on_cpus=self.request.device == "cpu",
        )
        if self.launcher == "ray":
            # Ray does not restart jobs; when resumed by hand, the tuning continues from its state file.
            return ray_file(self._command(), directory / "tune.json", self.name, (self._after(),), self._gpus)
        if self.launcher == "slurm":
            return self._slurm(directory)
        made = ON_KUBERNETES[self.launcher](job, self._command())
        return replace(made, advice=(*made.advice[:-1], self._after()))  # it leaves no run to save

    @property
    def _gpus(self) -> int:
        return 0 if self.request.device == "cpu" else self.request.gpus

    def _command(self) -> list[str]:
        command = self.request.settings.get("command")
        stated = [] if command is None else ["--command", command]
        answer = [*stated, "--out", str(self.state.resolve().with_name("best.plan.json")), "--force", "--json"]
        return [self.python, "-m", "planner", "tune", "--resume", str(self.state.resolve()), *answer]

    def _slurm(self, directory: Path) -> JobFile:
        if not PLAIN_PATH.fullmatch(str(directory)):
            raise BadInput(
                f"{str(directory)!r} cannot be written in an #SBATCH line", remedy="--state with a plain name"
            )
        minutes = math.ceil((self.request.budget_s + STARTING_S) / 60)
        options = slurm_options(self.name, nodes=1, gpus_per_node=self._gpus)
        # When restarted after a preemption or on another node, the tuning continues from its state file.
        heads = directives(
            {**options, "requeue": None, "open-mode": "append", "time": minutes, "output": f"{directory}/slurm-%j.txt"}
        )
        text = (
            f"{BASH}\n{heads}set -uo pipefail\n"
            f"exec {shlex.join(self._command())} > {shlex.quote(str(directory / 'answer.json'))}\n"
        )
        path = directory / "tune.sbatch"
        return JobFile(
            path=path, text=text, submit=("sbatch", str(path)), advice=(f"submit: sbatch {path}", self._after())
        )

    def _after(self) -> str:
        return f"what it has found so far, at any time: planner tune --resume {shlex.quote(str(self.state))} --show"
