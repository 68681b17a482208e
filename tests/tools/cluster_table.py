"""What a person sees who runs plans through schedulers that are real: the table of examples/cluster/README.md.

    python -m tests.tools.cluster_table FOLDER [NAME ...]      runs the cases named, or all: a line each in rows.jsonl

Slurm is that of `slurm_nodes`: two nodes on this machine. Every case starts `planner` as a person does, in a folder of
its own, and does something to the job while it runs. A row has the seconds until planner answered, its exit code, and
the last lines that it printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.tools import slurm_nodes
from tests.tools.slurm_nodes import Cluster

ROOT = Path(__file__).resolve().parents[2]
FOLLOWED = ["--launcher", "slurm", "--submit", "--wait", "5m"]
PATIENT_S = 400.0
LAST_LINES = 9


@dataclass
class Case:
    """One call of planner: `started` begins it, `ended` waits for it and returns its row."""

    name: str
    folder: Path
    environment: dict[str, str]
    process: subprocess.Popen[str] = field(init=False)
    began: float = field(init=False)

    def started(self, *words: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "planner", *words],
            cwd=self.folder,
            text=True,
            stdout=(self.folder / "answer.txt").open("w"),
            stderr=(self.folder / "said.txt").open("w"),
            env=self.environment,
            start_new_session=True,
        )

    def ended(self, **more: object) -> dict[str, object]:
        code: int | str = self.process.wait(PATIENT_S)
        said = [*self.printed("said.txt")[-LAST_LINES:], *self.printed("answer.txt")[-LAST_LINES:]]
        return (
            {"name": self.name, "seconds": round(time.monotonic() - self.began), "exit_code": code}
            | more
            | {"said": said}
        )

    def printed(self, name: str) -> list[str]:
        text = (self.folder / name).read_text(errors="replace").replace("\r", "\n")
        return [line for line in text.splitlines() if line.strip()]

    def wait_for(self, there: Callable[[], bool], limit_s: float = 120.0, *, alone: bool = True) -> None:
        """Wait for something of the job; if `alone`, as long as planner runs."""
        ends = time.monotonic() + limit_s
        while not there() and time.monotonic() < ends and not (alone and self.process.poll() is not None):
            time.sleep(0.3)


def ranks_began(case: Case) -> bool:
    """Return whether all ranks of a run have written their first line."""
    return len([*case.folder.glob("run/records/rank*.jsonl")]) >= 4


def queue(cluster: Cluster) -> list[str]:
    return [line for line in cluster.ask("squeue", "-h", "-o", "%i|%T|%R").splitlines() if line]


def job_of(cluster: Cluster) -> str:
    return queue(cluster)[0].partition("|")[0]


def smoke(case: Case, cluster: Cluster) -> dict[str, object]:
    case.started("apply", *FOLLOWED, "--out", "run")
    return case.ended()


def plan(case: Case, cluster: Cluster) -> dict[str, object]:
    words = ["--model=tiny-llama", "--cluster=2x4xH100", "--gpus=8", "--framework=meshwright", "--seq-len=256"]
    case.started("estimate", *words, "--tp=2", "--dp-shard=4", "--global-batch=8", "--out=plan.json")
    case.process.wait(PATIENT_S)
    case.started("apply", "plan.json", *FOLLOWED, "--device=cpu", "--out", "run")
    return case.ended()


TUNED = ["--model=tiny-llama", "--seq-len=128", "--global-batch=4", "--device=cpu", "--state=state.jsonl"]


def tune_submitted(case: Case, trials: int) -> None:
    """Submit a tuning on one node, and wait until it is in the queue."""
    words = [*TUNED, "--cluster=4xH100", "--gpus=2", "--launcher=slurm", "--submit"]
    case.started("tune", *words, f"--trials={trials}", "--steps=40")
    case.process.wait(PATIENT_S)


def tune_ended(case: Case, cluster: Cluster) -> dict[str, object]:
    """Wait until nothing is in the queue, and ask what was found. A row has how often trials began and ended, too."""
    ends = time.monotonic() + PATIENT_S
    while queue(cluster) and time.monotonic() < ends:
        time.sleep(1.0)
    waited = time.monotonic() - case.began
    case.started("tune", "--resume=state.jsonl", "--show")
    return case.ended() | {"seconds": round(waited), "trials": trials_of(case)}


def trials_of(case: Case) -> list[str]:
    """Return what the state file says of each trial, in its order."""
    lines = [json.loads(line) for line in (case.folder / "state.jsonl").read_text().splitlines()]
    events = [one for one in lines if one["kind"] in {"began", "trial"}]
    return [f"{one['key'][:6]} {one['kind'] if one['kind'] == 'began' else one['status']}" for one in events]


def trial_runs(case: Case) -> bool:
    """Return whether ranks of a trial have written their first line."""
    return bool([*case.folder.glob("trials/**/rank*.jsonl")])


def tune(case: Case, cluster: Cluster) -> dict[str, object]:
    tune_submitted(case, trials=2)
    return tune_ended(case, cluster)


def tune_preempted(case: Case, cluster: Cluster) -> dict[str, object]:
    tune_submitted(case, trials=3)
    case.wait_for(lambda: trial_runs(case), alone=False)
    case.began = time.monotonic()
    cluster.ask("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5")
    return tune_ended(case, cluster)


def tune_node_lost(case: Case, cluster: Cluster) -> dict[str, object]:
    tune_submitted(case, trials=3)
    case.wait_for(lambda: trial_runs(case), alone=False)
    case.began = time.monotonic()
    lost = queue(cluster)[0].rpartition("|")[2]
    cluster.kill(lost)
    row = tune_ended(case, cluster)
    back(cluster, lost)
    return row | {"lost": lost}


EACH = [*TUNED, "--cluster=2x1xH100", "--gpus=2", "--launcher=slurm", "--each", "--steps=10", "--budget=6m"]


def tune_each(case: Case, cluster: Cluster) -> dict[str, object]:
    case.started("tune", *EACH, "--trials=3")
    case.wait_for(lambda: len(queue(cluster)) > 1)
    seen = queue(cluster)
    return case.ended(queue=seen) | {"trials": trials_of(case)}


def tune_each_preempted(case: Case, cluster: Cluster) -> dict[str, object]:
    case.started("tune", *EACH, "--trials=2")
    case.wait_for(lambda: trial_runs(case))
    cluster.ask("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5")
    return case.ended() | {"trials": trials_of(case)}


def tune_each_killed(case: Case, cluster: Cluster) -> dict[str, object]:
    """The tuning is killed while its jobs run, and resumed: it follows them."""
    case.started("tune", *EACH, "--trials=2")
    case.wait_for(lambda: trial_runs(case))
    case.process.kill()
    case.process.wait()
    case.started("tune", "--resume=state.jsonl")
    row = case.ended() | {"trials": trials_of(case)}
    return row | {"submitted": len([*case.folder.glob("trials/*/submission.json")])}


def back(cluster: Cluster, name: str) -> None:
    """Start a node that was lost."""
    cluster.start_node(name)
    with suppress(subprocess.SubprocessError):
        cluster.ask("scontrol", "update", f"nodename={name}", "state=resume")


def cancel(case: Case, cluster: Cluster) -> dict[str, object]:
    case.started("apply", *FOLLOWED, "--out", "run", "--steps=1000")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    os.killpg(case.process.pid, signal.SIGINT)
    row = case.ended()
    time.sleep(6)
    return row | {"left in the queue": queue(cluster)}


def node_lost(case: Case, cluster: Cluster) -> dict[str, object]:
    case.started("apply", *FOLLOWED, "--out", "run", "--steps=1000")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    cluster.kill("mw2")
    row = case.ended(queue=queue(cluster))
    back(cluster, "mw2")
    return row


def controller_killed(case: Case, cluster: Cluster) -> dict[str, object]:
    """Killed while the job runs, and started again after 15 s."""
    case.started("apply", *FOLLOWED, "--out", "run", "--steps=100")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    cluster.kill("slurmctld")
    time.sleep(15.0)
    cluster.start_controller()
    return case.ended()


def preempted(case: Case, cluster: Cluster) -> dict[str, object]:
    case.started("apply", *FOLLOWED, "--out", "run", "--steps=1000")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    cluster.ask("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5")
    return case.ended(queue=queue(cluster))


def time_limit(case: Case, cluster: Cluster) -> dict[str, object]:
    case.started("apply", *FOLLOWED, "--out", "run", "--steps=1000", "--budget=300s")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    cluster.ask("scontrol", "update", f"jobid={job_of(cluster)}", "TimeLimit=1")
    return case.ended()


def requeued(case: Case, cluster: Cluster) -> dict[str, object]:
    case.started("apply", *FOLLOWED, "--out", "run", "--steps=20")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    with suppress(subprocess.SubprocessError):
        cluster.ask("scontrol", "requeue", job_of(cluster))
    return case.ended()


def rank_killed(case: Case, cluster: Cluster) -> dict[str, object]:
    import psutil

    case.started("apply", *FOLLOWED, "--out", "run", "--steps=1000")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, environment = process.info["cmdline"] or [], process.info["environ"] or {}
        if "executor.run.worker" in words and environment.get("RANK") == "2" and str(case.folder) in " ".join(words):
            process.kill()
    return case.ended()


def out_of_memory(case: Case, cluster: Cluster) -> dict[str, object]:
    return smoke(case, cluster)


def node_missing(case: Case, cluster: Cluster) -> dict[str, object]:
    """One of three nodes is given to the job, but its agent never begins."""
    case.started("apply", *FOLLOWED, "--nodes=3", "--out", "run")
    case.wait_for(lambda: bool([*case.folder.glob("run/job.sbatch")]))
    return case.ended()


def unresolved(case: Case, cluster: Cluster) -> dict[str, object]:
    return smoke(case, cluster)


# Cases of one cluster, and how that is made.
CLUSTERS: tuple[tuple[dict[str, object], tuple[Callable[[Case, Cluster], dict[str, object]], ...]], ...] = (
    (
        {},
        (
            smoke,
            plan,
            tune,
            tune_preempted,
            tune_node_lost,
            tune_each,
            tune_each_preempted,
            tune_each_killed,
            cancel,
            node_lost,
            preempted,
            requeued,
            time_limit,
            rank_killed,
            controller_killed,
        ),
    ),
    ({"resolved": False}, (unresolved,)),
    ({"memory_mib": 500}, (out_of_memory,)),
    ({"nodes": 3}, (node_missing,)),
)


def environment(cluster: Cluster, folder: Path) -> dict[str, str]:
    """Return what planner is started with: this checkout, this Python, and a folder of its own for runs."""
    paths = {
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    home = {"XDG_DATA_HOME": str(folder / "data"), "NO_COLOR": "1", "COLUMNS": "160"}
    return {**os.environ, **paths, **home, **cluster.environment}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if lacking := slurm_nodes.missing():
        print(f"Slurm cannot be started here: {', '.join(lacking)}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # and so undo what was changed
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for number, (how, cases) in enumerate(CLUSTERS):
        todo = [one for one in cases if not options.names or one.__name__ in options.names]
        if not todo:
            continue
        with slurm_nodes.cluster(folder / f"slurm{number}", **how) as cluster:
            for run in todo:
                cluster.wait_ready()
                row = run(
                    Case(name=run.__name__, folder=folder / run.__name__, environment=environment(cluster, folder)),
                    cluster,
                )
                with (folder / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row, indent=1), flush=True)
                with suppress(subprocess.SubprocessError):
                    cluster.ask("scancel", "-u", "root")
                    time.sleep(2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
