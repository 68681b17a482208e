"""A real Slurm of several nodes on this machine, from Debian's packages, for tests and by hand.

    apt-get install munge slurmctld slurmd iproute2
    python -m tests.tools.slurm_nodes FOLDER            starts it, prints how to use it, ends it with Ctrl-C

Each node is a slurmd with a host name and a network of its own (namespaces behind a bridge), and four GPUs that are
files. Everything else is below FOLDER: key, socket, configuration, state and logs. Nothing of the machine's own Slurm
is read or changed; the names of the nodes stand in /etc/hosts meanwhile. Root is needed for all of that.

Sources: slurm.conf(5), gres.conf(5), munged(8).
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.tools import node_networks
from tests.tools.node_networks import Networks

PROGRAMS = (
    "ip",
    "unshare",
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "squeue",
    "scancel",
    "scontrol",
    "sinfo",
    "srun",
)
GPUS = 4
READY_S = 30.0
CONFIGURATION = """\
ClusterName=meshwright
SlurmctldHost={host}({address})
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/{gather}
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core{memory}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout={lost}
SlurmctldTimeout=30
MinJobAge=300
KillWait={grace}
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
InactiveLimit=0
JobRequeue=1
{nodes}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=2 PreemptMode=OFF
"""


@dataclass
class Cluster:
    """A Slurm that runs. `environment` is what its commands need."""

    folder: Path
    networks: Networks
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *words: str, timeout_s: float = 30.0) -> str:
        """Run a command of Slurm and return what it printed. Raises CalledProcessError."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=True, env=environment)
        return done.stdout

    def start(self, name: str, words: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                list(words), stdout=log, stderr=log, env={**os.environ, **self.environment}
            )

    def start_controller(self, *more: str) -> None:
        """Start slurmctld; without `-c` it goes on with the jobs that it knew."""
        self.start("slurmctld", ["slurmctld", "-D", *more, "-f", str(self.folder / "slurm.conf")])

    def start_node(self, name: str) -> None:
        words = ["slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf")]
        self.start(name, self.networks.inside(name, words))

    def kill(self, name: str) -> None:
        """Kill a daemon as `kill -9` does; of a node, the steps of jobs and all that they started, too."""
        self.processes[name].kill()
        self.processes[name].wait()
        for pid in self._on(name) if name in self.networks.addresses else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on(self, name: str) -> Iterator[int]:
        """Yield the processes of jobs on a node, and those of slurmd that watch them, which leave its group."""
        mine = {"SLURM_CONF": str(self.folder / "slurm.conf"), "SLURMD_NODENAME": name}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                found = process.environ()
                if not all(found.get(key) == value for key, value in mine.items()):
                    continue
                parent = process.parent()
                if parent is not None and "slurmstepd" in parent.name():
                    yield parent.pid
                yield process.pid

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        return dict(line.split("|", 1) for line in self.ask("sinfo", "-hN", "-o", "%N|%T", "-p", "gpu").split())

    def wait_ready(self) -> None:
        ends = time.monotonic() + READY_S
        while time.monotonic() < ends:
            with suppress(subprocess.SubprocessError):
                if set(self.states().values()) == {"idle"}:
                    return
            time.sleep(0.2)
        raise RuntimeError("the nodes are not ready:\n" + "\n".join(self._logs()))

    def stop(self) -> None:
        for name in reversed(self.processes):
            process = self.processes[name]
            if name in self.networks.addresses:
                for pid in self._on(name):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _logs(self) -> Iterator[str]:
        for path in sorted(self.folder.glob("*.log")):
            yield f"{path.name}: " + " / ".join(path.read_text(errors="replace").splitlines()[-6:])


def missing() -> list[str]:
    """Return what keeps a cluster from being started here; nothing where it can."""
    return node_networks.missing(PROGRAMS)


@contextmanager
def cluster(
    folder: Path,
    *,
    nodes: int = 2,
    resolved: bool = True,
    lost_s: int = 10,
    grace_s: int = 5,
    memory_mib: int | None = None,
) -> Iterator[Cluster]:
    """Start a cluster below a folder and yield it. With `resolved`, the nodes' names stand in /etc/hosts meanwhile.

    A node counts as lost after `lost_s`, and a job that is preempted or out of time has `grace_s` between SIGTERM and
    SIGKILL. With `memory_mib`, a job that holds more on a node is killed.
    """
    folder = folder.absolute()
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin"
    (folder / "state").mkdir(parents=True, exist_ok=True)
    with node_networks.connected(Networks("mw", "10.213.7", nodes), resolved=resolved) as networks:
        found = Cluster(folder, networks)
        _configure(found, lost_s=lost_s, grace_s=grace_s, memory_mib=memory_mib)
        try:
            _start(found)
            yield found
        finally:
            found.stop()


def _start(found: Cluster) -> None:
    munge = found.folder / "munge"
    munge.mkdir(mode=0o700, exist_ok=True)
    (munge / "key").write_bytes(secrets.token_bytes(128))
    (munge / "key").chmod(0o400)
    files = {name: str(munge / name) for name in ("socket", "key", "log", "seed", "pid")}
    options = {"socket": "socket", "key-file": "key", "log-file": "log", "seed-file": "seed", "pid-file": "pid"}
    found.start("munged", ["munged", "-F", "-f", *(f"--{word}={files[name]}" for word, name in options.items())])
    while not (munge / "socket").exists():
        time.sleep(0.05)
    found.start_controller("-c")
    for name in found.networks.addresses:
        found.start_node(name)
    found.wait_ready()


def _configure(found: Cluster, *, lost_s: int, grace_s: int, memory_mib: int | None) -> None:
    folder, host = found.folder, socket.gethostname()
    for name in found.networks.addresses:
        for number in range(GPUS):
            (folder / f"{name}-gpu{number}").touch()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={name} NodeAddr={address} CPUs=8 RealMemory={memory_mib or 1000} Gres=gpu:{GPUS}"
        f" State=UNKNOWN"
        for name, address in found.networks.addresses.items()
    )
    text = CONFIGURATION.format(
        host=host,
        address=found.networks.here,
        folder=folder,
        nodes=nodes,
        lost=lost_s,
        grace=grace_s,
        gather="none" if memory_mib is None else "linux\nJobAcctGatherParams=OverMemoryKill\nJobAcctGatherFrequency=1",
        memory="" if memory_mib is None else "_Memory",
    )
    (folder / "slurm.conf").write_text(text)
    gpus = (f"NodeName={name} Name=gpu File={folder}/{name}-gpu[0-{GPUS - 1}]\n" for name in found.networks.addresses)
    (folder / "gres.conf").write_text("".join(gpus))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if lacking := missing():
        print(f"cannot be started here: {', '.join(lacking)}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # and so undo what was changed
    with cluster(options.folder) as running, suppress(KeyboardInterrupt):
        print("".join(f"export {name}={value}\n" for name, value in running.environment.items()), end="", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
