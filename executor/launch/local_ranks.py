"""Start N local ranks of a module within a wall-clock budget, and end every process of the run.

Ranks of one machine are forked by an agent that has imported their modules (`executor.launch.forked_agent`); those of
several nodes run under torch's elastic agent (`python -m torch.distributed.run`); a worker without ranks, and a single
rank, run as a plain `python -m module`. All use an argument list without a shell and a session of their own; all
processes of a run are ended by SIGTERM and then SIGKILL, and the result names the first rank that failed.

An agent puts each rank into a session of its own, so killing a process group is not enough. Every process of a run
inherits a random tag in its environment, by which exactly these processes are found.

Does not import torch, so that it works (and reports errors) where torch does not.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from executor.launch.bytecode import compile_ahead, keep_bytecode
from topology.codec import JsonObject
from topology.processes import alive, kill
from topology.units import MIB

# NVLink multicast stays off in all workers: in virtual machines and on shared hosts it can hang the fabric.
FORCED_VARIABLES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# With one connection, copies and kernels of different streams share a queue, which would hide overlap.
REMOVED_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS",)
TAG = "MESHWRIGHT_RUN"
LAUNCH_TIME_VARIABLE = "MESHWRIGHT_LAUNCHED"  # launch time on the host's monotonic clock
# Signals that identify the first failure. Not SIGTERM, which the agent sends to the other ranks, nor SIGABRT, with
# which NCCL's watchdog ends a rank after a timeout.
KILL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
# Errors of a rank whose neighbour has ended: the neighbour is the cause.
LOST_PEER = ("closed by peer", "connection reset", "broken pipe")
# Variables that the agent sets, for a single rank without one; it hosts its own store, at a port chosen by the system.
ALONE = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
}
TAIL_BYTES = 16 * 1024
POLL_S = 0.05
KILLED_S = 5.0  # seconds within which killed processes are gone, even on a busy machine
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The rendezvous of several nodes: how many there are, its endpoint (HOST:PORT) and its id.

    `join_s` bounds how long an agent waits for the others, in seconds. `names` are those of all nodes, where known.
    `address` is this node's address for the others, needed where its host name does not resolve; the agent then cannot
    tell by itself whether it hosts the endpoint.
    """

    count: int
    endpoint: str
    run_id: str
    address: str = ""
    names: tuple[str, ...] = ()
    join_s: float = 60.0

    @property
    def loopback(self) -> bool:
        """Whether all agents are on one host."""
        return self._host in {"127.0.0.1", "localhost", "::1"}

    @property
    def address_arguments(self) -> list[str]:
        limits = f"join_timeout={self.join_s:.0f},read_timeout={self.join_s:.0f}"
        if self.loopback:
            return ["--local-addr=127.0.0.1", f"--rdzv-conf={limits}"]
        if not self.address:
            return [f"--rdzv-conf={limits}"]
        return [f"--local-addr={self.address}", f"--rdzv-conf=is_host={int(self.address == self._host)},{limits}"]

    @property
    def _host(self) -> str:
        return self.endpoint.rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first rank that failed. `rank` is None when the launcher itself did; `signal` is a name such as SIGKILL."""

    rank: int | None
    exit_code: int | None
    signal: str | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """How a run ended: `finished`, `failed`, `timeout` or `interrupted`. `survivors` are pids that ignored SIGKILL."""

    outcome: str
    exit_code: int | None
    seconds: float
    failure: Failure | None
    stdout_tail: str
    stderr_tail: str
    survivors: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return self.outcome == "finished" and not self.survivors


def launch(
    module: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int = 1,
    elastic: bool = True,
    budget_s: float,
    grace_s: float = 5.0,
    environment: Mapping[str, str] | None = None,
    directory: str | Path | None = None,
    nodes: Rendezvous | None = None,
) -> LaunchResult:
    """Run `ranks` copies of `module` for at most `budget_s` seconds.

    All processes end within another `grace_s` and KILLED_S.

    `elastic` False starts one plain process, without torch. `environment` is added to this process's own. `directory`
    keeps the output and the ranks' error files; without it they go to a temporary folder and only tails remain.
    `nodes`: this is one of several agents, each with `ranks` ranks of its own.
    Ctrl-C ends the processes and returns the outcome `interrupted`; a second Ctrl-C during that kills at once.
    Raises ValueError for less than one rank, several ranks without the agent, or a budget that is not positive.
    """
    if ranks < 1 or (ranks > 1 and not elastic):
        raise ValueError(f"{ranks} ranks cannot run {'with' if elastic else 'without'} the elastic agent")
    if not budget_s > 0:
        raise ValueError(f"a budget of {budget_s} s leaves no time to run")
    if elastic and ranks == 1 and nodes is None:
        elastic, environment = False, {**(environment or {}), **ALONE}
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
            return _launch(module, arguments, ranks, elastic, budget_s, grace_s, environment, Path(folder), nodes)
    folder_path = Path(directory)
    folder_path.mkdir(parents=True, exist_ok=True)
    return _launch(module, arguments, ranks, elastic, budget_s, grace_s, environment, folder_path, nodes)


def command(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    elastic: bool,
    logs: Path,
    nodes: Rendezvous | None = None,
) -> list[str]:
    """Return the argument list; `logs` is where ranks write their errors."""
    if not elastic:
        return [sys.executable, "-m", module, *arguments]
    if nodes is None:
        return [sys.executable, "-m", "executor.launch.forked_agent", str(ranks), str(logs), module, *arguments]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes.count}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={nodes.endpoint}",
        f"--rdzv-id={nodes.run_id}",
        *nodes.address_arguments,
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        f"--log-dir={logs}",
        "-m",
        module,
        *arguments,
    ]


def child_environment(
    added: Mapping[str, str] | None, *, run_id: str, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of the run's processes: the caller's, then `added`, then the forced variables."""
    environment = {**(os.environ if base is None else base), **(added or {}), **FORCED_VARIABLES}
    for name in REMOVED_VARIABLES:
        environment.pop(name, None)
    inherited = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), inherited] if inherited else [str(ROOT)])
    keep_bytecode(environment)
    environment["PYTHONSAFEPATH"] = "1"  # a torch.py in the current folder is not torch
    environment["PYTHONUNBUFFERED"] = "1"  # so that the last output of a killed rank is on disk
    environment[TAG] = run_id
    environment[LAUNCH_TIME_VARIABLE] = f"{time.monotonic():.3f}"
    return environment


def loopback_environment() -> dict[str, str]:
    """Return environment variables that make the ranks of one host communicate over the loopback interface."""
    if not Path("/sys/class/net/lo").exists():
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def _launch(
    module: str,
    arguments: Sequence[str],
    ranks: int,
    elastic: bool,
    budget_s: float,
    grace_s: float,
    environment: Mapping[str, str] | None,
    folder: Path,
    nodes: Rendezvous | None,
) -> LaunchResult:
    run_id = f"meshwright-{uuid.uuid4().hex}"
    started = time.monotonic()
    child = child_environment(environment, run_id=run_id)
    error_file = folder / "error.json"
    error_file.unlink(missing_ok=True)
    child["TORCHELASTIC_ERROR_FILE"] = str(error_file)
    outcome, survivors = "finished", tuple[int, ...]()
    out_path, err_path = folder / "stdout.txt", folder / "stderr.txt"
    compiling = compile_ahead(child)  # carries the run's tag, so that its end is the run's
    # Files, not pipes: a grandchild that keeps a pipe open would block us after its parent died.
    with out_path.open("wb") as out, err_path.open("wb") as err:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "executor.launch.guard",
                str(os.getpid()),
                *command(
                    module,
                    arguments,
                    ranks=ranks,
                    elastic=elastic,
                    logs=folder / "ranks",
                    nodes=nodes,
                ),
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=child,
            start_new_session=True,
        )
        try:
            if not _wait(process, started + budget_s):
                outcome = "timeout"
        except KeyboardInterrupt:
            outcome = "interrupted"
        finally:
            survivors = _stop(process, run_id, grace_s)
            if compiling is not None:
                compiling.poll()  # so that it is no zombie of ours
    if outcome == "finished" and process.returncode != 0:
        outcome = "failed"
    out_tail, err_tail = _end_of(out_path), _end_of(err_path)
    failure = None
    if outcome == "failed":
        failure = _first_failure(folder, process.returncode, err_tail, elastic=elastic)
    return LaunchResult(
        outcome=outcome,
        exit_code=process.returncode,
        seconds=time.monotonic() - started,
        failure=failure,
        stdout_tail=out_tail,
        stderr_tail=err_tail,
        survivors=survivors,
    )


# Stopping


def _wait(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait until the process ends or the deadline passes; return whether it ended."""
    while process.poll() is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(POLL_S, left))
    return True


def _stop(process: subprocess.Popen[bytes], run_id: str, grace_s: float) -> tuple[int, ...]:
    """End every process of this run, first with SIGTERM, then with SIGKILL; return the pids of survivors."""
    with suppress(KeyboardInterrupt):  # the second press: no more waiting
        if process.poll() is None:
            # The agent forwards SIGTERM to its ranks, and can leave the rendezvous. Its group has its pid.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)
            _wait_for_none(process, run_id, grace_s)
    kill(tagged_processes(run_id))
    process.kill()
    # A process in an uninterruptible call never ends: the wait is bounded and such processes are reported.
    _wait_for_none(process, run_id, KILLED_S)
    left = {member.pid for member in tagged_processes(run_id)}
    return tuple(sorted(left if process.poll() is not None else left | {process.pid}))


def _wait_for_none(process: subprocess.Popen[bytes], run_id: str, grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if process.poll() is not None and not tagged_processes(run_id):
            return
        time.sleep(POLL_S)


def tagged_processes(run_id: str) -> list[psutil.Process]:
    """Return the living processes that carry this run's tag, in any session."""
    found = []
    for pid in psutil.pids():
        with suppress(psutil.Error):  # it ended meanwhile, or belongs to another user
            process = psutil.Process(pid)  # new objects: `process_iter` caches what it knew about a reused pid
            if process.environ().get(TAG) == run_id and alive(process):
                found.append(process)
    return found


# Reporting


def _end_of(path: Path) -> str:
    """Return the end of a file as text."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _first_failure(folder: Path, exit_code: int | None, err_tail: str, *, elastic: bool) -> Failure:
    """Return the first failure as the agent reports it, with the message of that rank's error file if there is one."""
    if not elastic:
        if exit_code is not None and -exit_code in KILL_SIGNALS:
            return _ended_by_signal(0, exit_code)
        message = _message(folder / "error.json") or _last_line(err_tail)
        return Failure(rank=_to_blame(0, message), exit_code=_code(exit_code), signal=_name(exit_code), message=message)
    # The agent prints a block per failure, with the first that it saw under "Root Cause". That may be a peer of a rank
    # that was killed: the killed rank writes no timestamp. So a killed rank takes precedence.
    _, _, verdict = err_tail.rpartition("Root Cause")
    blocks = re.findall(
        r"^[ \t]*time\s*:\s*(\S+)\n.*\n[ \t]*rank\s*:\s*(\d+)(?!\d).*\n[ \t]*exitcode\s*:\s*(-?\d+)",
        err_tail,
        re.MULTILINE,
    )
    if not blocks and exit_code is not None and exit_code < 0:
        name = _name(exit_code)
        return Failure(rank=None, exit_code=None, signal=name, message=f"the agent of the ranks was ended by {name}")
    for _, rank_text, code_text in blocks:
        if -int(code_text) in KILL_SIGNALS:
            return _ended_by_signal(int(rank_text), int(code_text))
    rank = re.search(r"^[ \t]*rank\s*:\s*(\d+)", verdict, re.MULTILINE)
    code = re.search(r"^[ \t]*exitcode\s*:\s*(-?\d+)", verdict, re.MULTILINE)
    number = int(code[1]) if code else None
    root_time = re.search(r"^[ \t]*time\s*:\s*(\S+)", verdict, re.MULTILINE)
    if any(words in verdict.lower() for words in LOST_PEER):
        for at, rank_text, code_text in blocks:
            if int(code_text) == -signal.SIGTERM and root_time and at <= root_time[1]:  # before the agent's own
                return _ended_by_signal(int(rank_text), int(code_text))
    if number == -signal.SIGTERM and rank:
        return _ended_by_signal(int(rank[1]), number)
    files = sorted(folder.glob("ranks/**/error.json"), key=_error_time)
    message = _message(folder / "error.json") or next((text for file in files if (text := _message(file))), "")
    message = message or _last_line(verdict or err_tail)
    return Failure(
        rank=_to_blame(int(rank[1]) if rank else _rank_of(files), message),
        exit_code=_code(number if number is not None else exit_code),
        signal=_name(number),
        message=message,
    )


def _to_blame(rank: int | None, message: str) -> int | None:
    """Return the rank that failed first, unless it exceeded a limit that all ranks share: then any could be the
    first.
    """
    return None if os.strerror(errno.EMFILE) in message else rank


def _ended_by_signal(rank: int, code: int) -> Failure:
    name = _name(code)
    return Failure(rank=rank, exit_code=None, signal=name, message=f"the process was ended by {name}")


def _error(path: Path) -> JsonObject:
    try:
        document = json.loads(path.read_text(errors="replace")[:MIB])
    except (OSError, ValueError):
        return {}
    message = document.get("message") if isinstance(document, dict) else None
    return message if isinstance(message, dict) else {"message": message} if message else {}


def _message(path: Path) -> str:
    return str(_error(path).get("message", ""))[:2000]


def _error_time(path: Path) -> float:
    extra = _error(path).get("extraInfo")
    try:
        return float(extra["timestamp"]) if isinstance(extra, dict) else float("inf")
    except (KeyError, TypeError, ValueError):
        return float("inf")


def _rank_of(files: Sequence[Path]) -> int | None:
    """The agent writes `attempt_0/<local rank>/error.json`."""
    return int(files[0].parent.name) if files and files[0].parent.name.isdigit() else None


def _code(number: int | None) -> int | None:
    return None if number is None or number < 0 else number


def _name(number: int | None) -> str | None:
    if number is None or number >= 0:
        return None
    try:
        return signal.Signals(-number).name
    except ValueError:
        return f"signal {-number}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" =-\t")]
    return lines[-1][:2000] if lines else ""
