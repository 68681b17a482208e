"""Stand-ins for sbatch, squeue, sacct, scancel and kubectl: a queue whose state is in the files of one folder.

`jobs/NUMBER` holds the state of a job in Slurm's words; a job that `does` says ends leaves the report `report.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = {
    "sbatch": """#!/bin/sh
echo "$1" >> "$QUEUE/submitted"
number=$((4710 + $(wc -l < "$QUEUE/submitted")))
[ -e "$QUEUE/refuse" ] && { echo "sbatch: error: invalid partition" >&2; exit 1; }
echo PENDING > "$QUEUE/jobs/$number"
dirname "$1" > "$QUEUE/folder"
echo "Submitted batch job $number"
""",
    "squeue": """#!/bin/sh
[ -e "$QUEUE/away" ] && { echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }
for word; do case "$word" in --jobs=*) number="${word#--jobs=}";; esac; done
[ -e "$QUEUE/jobs/$number" ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
cat "$QUEUE/jobs/$number"
""",
    "sacct": '#!/bin/sh\n[ -e "$QUEUE/accounted" ] && cat "$QUEUE/accounted"\n',
    "scancel": '#!/bin/sh\necho "$1" >> "$QUEUE/cancelled"\necho CANCELLED > "$QUEUE/jobs/$1"\n',
    "kubectl": """#!/bin/sh
verb="$1"
for word; do case "$word" in --filename=*) file="${word#--filename=}";; --filename) file=;; esac; done
[ -n "$file" ] || file="$3"
case "$verb" in
    apply) dirname "$file" > "$QUEUE/folder"; echo "$file" >> "$QUEUE/submitted"
        echo "trainjob.trainer.kubeflow.org/meshwright created"; echo '{"status": {}}' > "$QUEUE/jobs/kube";;
    get) [ -e "$QUEUE/jobs/kube" ] ||
         { echo 'Error from server (NotFound): trainjobs "meshwright" not found' >&2; exit 1; }
        cat "$QUEUE/jobs/kube";;
    delete) echo "$file" >> "$QUEUE/cancelled"; rm -f "$QUEUE/jobs/kube";;
esac
""",
}


@dataclass(frozen=True)
class Queue:
    """A scheduler that does what a test tells it."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"QUEUE": str(self.folder), "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    @property
    def submitted(self) -> list[str]:
        return self._lines("submitted")

    @property
    def cancelled(self) -> list[str]:
        return self._lines("cancelled")

    def says(self, job: str, word: str) -> None:
        (self.folder / "jobs" / job).write_text(word + "\n")

    def forgets(self, job: str) -> None:
        (self.folder / "jobs" / job).unlink()

    def does(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def runs(self) -> Path:
        """Let the job that was submitted last leave its report, and return its folder."""
        folder = Path((self.folder / "folder").read_text().strip())
        request = json.loads((folder / "request.json").read_text())
        whole = folder / "run.json.part"
        whole.write_text(json.dumps(report(request)))
        whole.replace(folder / "run.json")
        return folder

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().split() if path.is_file() else []


def queue(folder: Path) -> Queue:
    """Make the stand-ins in a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    (folder / "jobs").mkdir()
    for name, text in SCRIPTS.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return Queue(folder)


def report(request: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a run that took what was predicted."""
    kept = {key: request[key] for key in ("plan", "model", "workload", "runtime", "device", "predicted")}
    step_s = request["predicted"]["step_s"]["value"]
    peak = request["predicted"]["memory"]["peak_bytes"]["value"]
    measured = {
        "steps": 10,
        "steps_asked": 10,
        "step_s": {"median": step_s, "spread": 0.01, "all": [step_s] * 10},
        "memory_by_rank": [{"peak_reserved_bytes": peak, "peak_allocated_bytes": peak}],
    }
    about = {"schema_version": 1, "status": "finished", "complete": True, "taken_at": "2026-01-01T00:00:00+00:00"}
    return {**about, **kept, "exit_code": 0, "seconds": 30.0, "failure": None, "measured": measured}
