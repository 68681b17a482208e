"""What is done to a job of a scheduler while it runs, one function a case: rows of `cluster_table`.

A case starts `planner` as a person does, in a folder of its own. Its row has the seconds until planner answered, its
exit code, and the last lines that it printed.
"""

from __future__ import annotations

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
from typing import Any

import psutil

from tests.tools.kube_api import KubeApi
from tests.tools.ray_nodes import RayCluster
from tests.tools.slurm_nodes import Cluster

PATIENT_S = 400.0
LAST_LINES = 9
ACTIVE = {"PENDING", "RUNNING"}  # states of a job of Ray
RUN_RANKS = 4
Row = dict[str, object]


@dataclass
class Case:
    """One call of planner: `started` begins it, `ended` waits for it and returns its row."""

    name: str
    folder: Path
    launcher: str
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

    @property
    def places(self) -> list[str]:
        """Return flags for where the launcher's containers come from, and what they mount."""
        image = ["--image=any"] if self.launcher in {"kubernetes", "jobset", "trainjob"} else []
        return [*image, *([f"--volume=shared:{self.folder}"] if self.launcher in {"kubernetes", "jobset"} else [])]

    def applied(self, *words: str) -> None:
        """Begin `planner apply` of a job that is submitted and followed."""
        flags = [f"--launcher={self.launcher}", "--submit", "--wait=5m", "--out=run", *self.places]
        self.started(
            "apply",
            *(one for one in words if not one.startswith("-")),
            *flags,
            *(one for one in words if one.startswith("-")),
        )

    def stopped_by(self, name: str, line: str) -> None:
        """Let a line of a shell run before Python does on a node."""
        folder = self.folder / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        python = subprocess.check_output(["which", "python3"], env=self.environment, text=True).strip()
        test = f'[ "$SLURMD_NODENAME" = {name} ]'
        (folder / "python3").write_text(f'#!/bin/sh\nif {test}; then {line}; fi\nexec {python} "$@"\n')
        (folder / "python3").chmod(0o755)
        self.environment = {**self.environment, "PATH": f"{folder}:{self.environment['PATH']}"}

    def ended(self, **more: object) -> Row:
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
    return len([*case.folder.glob("run/records/rank*.jsonl")]) >= RUN_RANKS


def queue(cluster: Any) -> list[str]:
    """Return a line for each job that waits or runs."""
    if isinstance(cluster, KubeApi):
        return [name for plural, name in cluster.objects if plural != "services"]
    if isinstance(cluster, RayCluster):
        return [f"{one['submission_id']}|{one['status']}" for one in cluster.jobs() if one["status"] in ACTIVE]
    return [line for line in cluster.ask("squeue", "-h", "-o", "%i|%T|%R").splitlines() if line]


def job_of(cluster: Cluster) -> str:
    return queue(cluster)[0].partition("|")[0]


def smoke(case: Case, cluster: Any) -> Row:
    case.applied()
    return case.ended()


def plan(case: Case, cluster: Any) -> Row:
    words = ["--model=tiny-llama", "--cluster=2x4xH100", "--gpus=8", "--framework=meshwright", "--seq-len=256"]
    case.started("estimate", *words, "--tp=2", "--dp-shard=4", "--global-batch=8", "--out=plan.json")
    case.process.wait(PATIENT_S)
    case.applied("plan.json", "--device=cpu")
    return case.ended()


TUNED = ["--model=tiny-llama", "--seq-len=128", "--global-batch=4", "--device=cpu", "--state=state.jsonl"]


def tune_submitted(case: Case, trials: int) -> None:
    """Submit a tuning on one node, and wait until it is in the queue."""
    words = [*TUNED, "--cluster=4xH100", "--gpus=2", f"--launcher={case.launcher}", "--submit"]
    case.started("tune", *words, f"--trials={trials}", "--steps=40")
    case.process.wait(PATIENT_S)


def tune_ended(case: Case, cluster: Any) -> Row:
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


def tune(case: Case, cluster: Any) -> Row:
    tune_submitted(case, trials=2)
    return tune_ended(case, cluster)


def tune_preempted(case: Case, cluster: Cluster) -> Row:
    tune_submitted(case, trials=3)
    case.wait_for(lambda: trial_runs(case), alone=False)
    case.began = time.monotonic()
    cluster.ask("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5")
    return tune_ended(case, cluster)


def tune_node_lost(case: Case, cluster: Cluster) -> Row:
    tune_submitted(case, trials=3)
    case.wait_for(lambda: trial_runs(case), alone=False)
    case.began = time.monotonic()
    lost = queue(cluster)[0].rpartition("|")[2]
    cluster.kill(lost)
    row = tune_ended(case, cluster)
    back(cluster, lost)
    return row | {"lost": lost}


EACH = [*TUNED, "--cluster=2x1xH100", "--gpus=2", "--each", "--steps=10", "--budget=6m"]


def tune_each(case: Case, cluster: Any) -> Row:
    case.started("tune", *EACH, f"--launcher={case.launcher}", "--trials=3")
    case.wait_for(lambda: len(queue(cluster)) > 1)
    seen = queue(cluster)
    return case.ended(queue=seen) | {"trials": trials_of(case)}


def tune_each_preempted(case: Case, cluster: Cluster) -> Row:
    case.started("tune", *EACH, f"--launcher={case.launcher}", "--trials=2")
    case.wait_for(lambda: trial_runs(case))
    cluster.ask("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5")
    return case.ended() | {"trials": trials_of(case)}


def tune_each_killed(case: Case, cluster: Cluster) -> Row:
    """The tuning is killed while its jobs run, and resumed: it follows them."""
    case.started("tune", *EACH, f"--launcher={case.launcher}", "--trials=2")
    case.wait_for(lambda: trial_runs(case))
    case.process.kill()
    case.process.wait()
    case.started("tune", "--resume=state.jsonl")
    row = case.ended() | {"trials": trials_of(case)}
    return row | {"submitted": len([*case.folder.glob("trials/*/submission.json")])}


def back(cluster: Any, name: str) -> None:
    """Start a node that was lost."""
    cluster.start_node(name)
    if isinstance(cluster, Cluster):
        with suppress(subprocess.SubprocessError):
            cluster.ask("scontrol", "update", f"nodename={name}", "state=resume")


def cancel(case: Case, cluster: Any) -> Row:
    case.applied("--steps=1000")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    os.killpg(case.process.pid, signal.SIGINT)
    row = case.ended()
    time.sleep(6)
    return row | {"left in the queue": queue(cluster)}


def node_lost(case: Case, cluster: Any) -> Row:
    case.applied("--steps=1000")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    second = [*cluster.networks.addresses][1]
    cluster.kill(second)
    row = case.ended(queue=queue(cluster))
    back(cluster, second)
    return row


def controller_killed(case: Case, cluster: Cluster) -> Row:
    """Killed while the job runs, and started again after 15 s."""
    case.applied("--steps=30")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    cluster.kill("slurmctld")
    time.sleep(15.0)
    cluster.start_controller()
    return case.ended()


def preempted(case: Case, cluster: Cluster) -> Row:
    case.applied("--steps=1000")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    cluster.ask("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5")
    return case.ended(queue=queue(cluster))


def time_limit(case: Case, cluster: Cluster) -> Row:
    case.applied("--steps=1000", "--budget=300s")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    cluster.ask("scontrol", "update", f"jobid={job_of(cluster)}", "TimeLimit=1")
    return case.ended()


def requeued(case: Case, cluster: Cluster) -> Row:
    case.applied("--steps=20")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    with suppress(subprocess.SubprocessError):
        cluster.ask("scontrol", "requeue", job_of(cluster))
    return case.ended()


def rank_killed(case: Case, cluster: Any) -> Row:
    case.applied("--steps=1000")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, environment = process.info["cmdline"] or [], process.info["environ"] or {}
        if "executor.run.worker" in words and environment.get("RANK") == "2" and str(case.folder) in " ".join(words):
            process.kill()
    return case.ended()


def out_of_memory(case: Case, cluster: Cluster) -> Row:
    return smoke(case, cluster)


def node_missing(case: Case, cluster: Cluster) -> Row:
    """One of three nodes belongs to the job, but its agent never begins."""
    case.stopped_by("mw3", "exec sleep 200")
    case.applied("--nodes=3")
    return case.ended()


def versions_differ(case: Case, cluster: Cluster) -> Row:
    other = case.folder / "other"
    about = other / "triton-9.9.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: triton\nVersion: 9.9\n")
    case.stopped_by("mw2", f"export PYTHONPATH={other}:$PYTHONPATH")
    case.applied()
    return case.ended()


def wrong_interface(case: Case, cluster: Cluster) -> Row:
    case.stopped_by("mw2", "export GLOO_SOCKET_IFNAME=bond0")
    case.applied()
    return case.ended()


def port_closed(case: Case, cluster: Cluster) -> Row:
    """What a firewall drops: nobody answers."""
    rule = "INPUT -p tcp --dport 29400:30399 -j DROP"
    inside = ["nsenter", "--net=/run/netns/mw1", "iptables"]
    subprocess.run([*inside, "-A", *rule.split()], check=True)
    try:
        case.started("doctor", "--launcher=slurm", "--gpus-per-node=0")
        doctor = case.ended()["said"]
        case.applied()
        return case.ended(doctor=doctor)
    finally:
        subprocess.run([*inside, "-D", *rule.split()], check=True)


def unresolved(case: Case, cluster: Cluster) -> Row:
    return smoke(case, cluster)


def no_room(case: Case, cluster: RayCluster) -> Row:
    """More nodes than there are: a person waits, and interrupts."""
    case.started("doctor", "--launcher=ray", "--nodes=3")
    return case.ended()


def budget_over(case: Case, cluster: Any) -> Row:
    """Jobs of Ray and TrainJobs have no time limit: the run's own ends it."""
    case.applied("--steps=1000", "--budget=60s")
    case.wait_for(lambda: ranks_began(case))
    return case.ended()


def pod_lost(case: Case, cluster: KubeApi) -> Row:
    return _disrupted(case, cluster, lost=True)


def pod_preempted(case: Case, cluster: KubeApi) -> Row:
    return _disrupted(case, cluster, lost=False)


def _disrupted(case: Case, cluster: KubeApi, *, lost: bool) -> Row:
    case.applied("--steps=1000")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    cluster.disrupt("meshwright", 1, lost=lost)
    return case.ended(queue=queue(cluster))


def pods_too_long(case: Case, cluster: KubeApi) -> Row:
    """The job's own limit, which is set a moment from now."""
    case.applied("--steps=1000")
    case.wait_for(lambda: ranks_began(case))
    case.began = time.monotonic()
    cluster.limits["meshwright"] = time.monotonic() + 5.0
    return case.ended()


def pod_unresolved(case: Case, cluster: KubeApi) -> Row:
    cluster.resolves = False
    try:
        return smoke(case, cluster)
    finally:
        cluster.resolves = True


def tune_pod(case: Case, cluster: KubeApi) -> Row:
    words = [*TUNED, "--cluster=4xH100", "--gpus=2", "--trials=2", "--steps=10"]
    case.started("tune", *words, f"--launcher={case.launcher}", *case.places, "--submit", "--job-name=tuned")
    case.process.wait(PATIENT_S)
    case.wait_for(lambda: not cluster.active("tuned"), PATIENT_S, alone=False)
    waited = time.monotonic() - case.began
    case.started("tune", "--resume=state.jsonl", "--show")
    return case.ended() | {"seconds": round(waited), "trials": trials_of(case)}
