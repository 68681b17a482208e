"""A real Slurm of two nodes on this machine, from Debian's packages (munge, slurmctld, slurmd), for tests and by hand.

    python -m tests.tools.slurm_nodes FOLDER            starts it, prints how to use it, ends it with Ctrl-C

The nodes are two slurmd on ports of their own, each with four GPUs that are files. Everything is below FOLDER: key,
socket, configuration, state and logs. Nothing of the machine's own Slurm is read or changed; the names of the nodes
stand in /etc/hosts meanwhile. Root is needed for that, and since slurmd starts jobs as their users.

Sources: slurm.conf(5), gres.conf(5), munged(8); several slurmd on a host: "Slurm for multiple nodes per host".
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo", "srun")
NODES, GPUS = ("mw1", "mw2"), 4
HOSTS = Path("/etc/hosts")
READY_S = 30.0
CONFIGURATION = """\
ClusterName=meshwright
SlurmctldHost={host}({address})
SlurmctldPort={controller}
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
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
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

    def start_node(self, name: str) -> None:
        self.start(name, ["slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf")])

    def kill(self, name: str) -> None:
        """Kill a daemon as `kill -9` does; of a node, the steps of jobs and all that they started, too."""
        for pid in _below(self.processes[name].pid) if name in NODES else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes[name].kill()
        self.processes[name].wait()

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
            if name in NODES:
                for pid in _below(process.pid):
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
    absent = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return [*absent, *(["root"] if os.geteuid() else [])]


@contextmanager
def cluster(folder: Path, *, resolved: bool = True, lost_s: int = 10, grace_s: int = 5) -> Iterator[Cluster]:
    """Start a cluster below a folder and yield it. With `resolved`, the nodes' names stand in /etc/hosts meanwhile.

    A node counts as lost after `lost_s`, and a job that is preempted or out of time has `grace_s` between SIGTERM and
    SIGKILL.
    """
    folder = folder.absolute()
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin"
    (folder / "state").mkdir(parents=True, exist_ok=True)
    found = Cluster(folder)
    line = f"127.0.0.1 {' '.join(NODES)} # a test of meshwright\n"
    _configure(found, lost_s=lost_s, grace_s=grace_s)
    try:
        if resolved:
            HOSTS.write_text(HOSTS.read_text() + line)
        munge = folder / "munge"
        munge.mkdir(mode=0o700, exist_ok=True)
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o400)
        files = {name: str(munge / name) for name in ("socket", "key", "log", "seed", "pid")}
        options = {"socket": "socket", "key-file": "key", "log-file": "log", "seed-file": "seed", "pid-file": "pid"}
        found.start("munged", ["munged", "-F", "-f", *(f"--{word}={files[name]}" for word, name in options.items())])
        while not (munge / "socket").exists():
            time.sleep(0.05)
        found.start("slurmctld", ["slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf")])
        for name in NODES:
            found.start_node(name)
        found.wait_ready()
        yield found
    finally:
        found.stop()
        if resolved:
            HOSTS.write_text(HOSTS.read_text().replace(line, ""))


def _configure(found: Cluster, *, lost_s: int, grace_s: int) -> None:
    folder, host, ports = found.folder, socket.gethostname(), _free_ports(1 + len(NODES))
    for name in NODES:
        for number in range(GPUS):
            (folder / f"{name}-gpu{number}").touch()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=1000 Gres=gpu:{GPUS}"
        f" State=UNKNOWN"
        for name, port in zip(NODES, ports[1:], strict=True)
    )
    text = CONFIGURATION.format(
        host=host, address="127.0.0.1", controller=ports[0], folder=folder, nodes=nodes, lost=lost_s, grace=grace_s
    )
    (folder / "slurm.conf").write_text(text)
    gpus = (f"NodeName={name} Name=gpu File={folder}/{name}-gpu[0-{GPUS - 1}]\n" for name in NODES)
    (folder / "gres.conf").write_text("".join(gpus))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _below(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    import psutil

    with suppress(psutil.Error):
        return [one.pid for one in psutil.Process(pid).children(recursive=True)]
    return []


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
