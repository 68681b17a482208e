"""One job of a scheduler for a whole tuning: a node of the cluster resumes its state file, and all trials run there."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from planner.export.job_files import BASH, directives, slurm_options, train_job
from planner.export.yaml_text import yaml_text
from planner.runs.schedulers.launchers import PLAIN_PATH, STARTING_S, JobFile, LauncherJob, ray_file
from planner.tune.state import TuningRequest
from topology.errors import BadInput, UserError

LAUNCHERS = ("slurm", "ray", "trainjob")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob:
    """The job of the tuning in `state`."""

    request: TuningRequest
    state: Path
    launcher: str
    name: str = "meshwright-tune"
    image: str | None = None
    python: str = "python3"

    def written(self) -> JobFile:
        """Return the job file. Raises UserError where the plans need several nodes or a setting is missing."""
        if self.launcher not in LAUNCHERS:
            raise UserError(f"--launcher is {self.launcher!r}", remedy=f"local, or one of {', '.join(LAUNCHERS)}")
        if self.request.gpus > self.request.cluster.gpus_per_node:
            raise UserError(
                f"{self.request.gpus} GPUs are more than a node of {self.request.cluster.name} has",
                why="one job runs all trials on one node",
                remedy="--each: a job for every trial, submitted from a machine that sees the folder of the nodes",
            )
        directory = self.state.parent.resolve()
        LauncherJob(
            name=self.name, directory=directory, ranks=self.request.gpus, nodes=1, budget_s=self.request.budget_s
        )
        if self.launcher == "ray":
            # Ray does not start a job again: resumed by hand, it goes on with its state file.
            return ray_file(self._command(), directory / "tune.json", self.name, (self._after(),), self._gpus)
        return self._slurm(directory) if self.launcher == "slurm" else self._trainjob(directory)

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
        # Started again after a preemption or on another node, it goes on with its state file.
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

    def _trainjob(self, directory: Path) -> JobFile:
        if self.image is None:
            raise UserError(
                "--launcher trainjob needs --image", why="it runs in a container image with meshwright and torch"
            )
        manifest = train_job(
            self.name,
            nodes=1,
            ranks_per_node=1,
            gpus_per_node=self._gpus,
            command=self._command(),
            image=self.image,
        )
        path = directory / "tune.yaml"
        mounted = f"the directory {directory} must be a volume that the runtime mounts"
        submit = ("kubectl", "apply", "--filename", str(path))
        advice = (f"submit: {shlex.join(submit)}", mounted, self._after())
        return JobFile(path=path, text=yaml_text(manifest), submit=submit, advice=advice)

    def _after(self) -> str:
        return f"what it has found so far, at any time: planner tune --resume {shlex.quote(str(self.state))} --show"
