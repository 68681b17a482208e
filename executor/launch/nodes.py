"""Runs over several nodes: each node has an agent, and the results of all agents are collected afterwards.

The agents meet at an endpoint (torch's c10d rendezvous, hosted by the node of that name) and assign ranks. The run's
directory is shared by all nodes; each agent writes there that it began, and how its ranks ended. A shared file system
may show a file late, or only a part of it. So an agent's result has the sizes of its records, and the collecting
process waits for that much, for a bounded time.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from executor.launch.local_ranks import Failure, LaunchResult, Rendezvous
from topology import codec
from topology.errors import BadInput

LATE_S = 15.0  # seconds for a shared file system to show files of another node
POLL_S = 0.2
CONNECT_S = 5.0
RENDEZVOUS_ERRORS = ("RendezvousTimeoutError", "RendezvousConnectionError")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """How one agent's ranks ended, and when (seconds since the epoch). `met` is False if it did not find the other
    nodes, so that no rank began; `records` are sizes of the ranks' files in bytes.
    """

    node: str
    ended_at: float
    outcome: str
    exit_code: int | None
    seconds: float
    failure: Failure | None
    survivors: tuple[int, ...]
    met: bool = True
    records: dict[str, int] = field(default_factory=dict)


def node_name() -> str:
    """Return the scheduler's name for this node, or its host name."""
    return os.environ.get("MESHWRIGHT_NODE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def not_launched(message: str) -> LaunchResult:
    """Return the result for ranks that were not started."""
    failure = Failure(rank=None, exit_code=None, signal=None, message=message)
    return LaunchResult(outcome="failed", exit_code=None, seconds=0.0, failure=failure, stdout_tail="", stderr_tail="")


def connect(endpoint: str, patience_s: float) -> socket.socket | str:
    """Return a connection to `endpoint` (HOST:PORT), waiting for it, or why there is none."""
    host, _, port = endpoint.rpartition(":")
    ends = time.monotonic() + patience_s
    while True:
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            why = f"the name {host} leads to no address here ({error.strerror or error})"
        else:
            try:
                return socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
            except OSError as error:
                said = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
                addresses = ", ".join(sorted({str(one[4][0]) for one in found}))
                why = f"{said} from {addresses}: a firewall, another network, or it has not begun"
        if time.monotonic() >= ends:
            return why
        time.sleep(POLL_S)


def own_addresses() -> set[str]:
    """Return the addresses of this machine's interfaces."""
    return {one.address.partition("%")[0] for each in psutil.net_if_addrs().values() for one in each}


def write_agent_start(folder: Path, node: str) -> None:
    """Write that an agent began."""
    codec.write_text(folder / "agents" / f"{node}.began", f"{time.time():.3f}\n")


def write_agent_result(folder: Path, node: str, done: LaunchResult, *, met: bool = True) -> None:
    """Write the result of this process's agent."""
    result = AgentResult(
        node=node,
        ended_at=time.time(),
        outcome=done.outcome,
        exit_code=done.exit_code,
        seconds=done.seconds,
        failure=done.failure,
        survivors=done.survivors,
        met=met,
        records=_sizes(folder),
    )
    codec.write_text(folder / "agents" / f"{node}.json", codec.to_json(result) + "\n")


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted((folder / "records").glob("rank*.jsonl"))}


def wait_for_file(path: Path, patience_s: float) -> None:
    """Wait until a file of another node exists, or time is over."""
    end = time.monotonic() + patience_s
    while not path.is_file() and time.monotonic() < end:
        time.sleep(POLL_S)


def read_agent_results(folder: Path) -> list[AgentResult]:
    """Return the results of all agents that have ended, in order of time."""
    paths = sorted((folder / "agents").glob("*.json"))
    results = [codec.convert(codec.read_json(path), AgentResult, where=str(path)) for path in paths]
    return sorted(results, key=lambda result: result.ended_at)


def name_rendezvous(done: LaunchResult, meeting: Rendezvous) -> LaunchResult:
    """Return the result, with a sentence on the cause if torch's rendezvous failed although the agents had met
    before.
    """
    if done.outcome != "failed" or not any(name in done.stderr_tail for name in RENDEZVOUS_ERRORS):
        return done
    what = f"{meeting.count} nodes met at {meeting.endpoint}, but their ranks did not within {meeting.join_s:.0f} s"
    return replace(done, failure=Failure(rank=None, exit_code=done.exit_code, signal=None, message=what))


def combine_agent_results(
    folder: Path, count: int, patience_s: float = LATE_S, names: Sequence[str] = ()
) -> LaunchResult:
    """Return the result of a run of `count` nodes: that of the first agent that failed, else of success. `names` are
    those of all nodes, where known.

    What is not there is waited for, unless the nodes did not meet. A node that left no result after others have theirs
    was lost. Raises BadInput where no agent has ended, or ranks still run.
    """
    end = time.monotonic() + patience_s
    beats = _beats(folder)
    while True:
        results = read_agent_results(folder)
        late = _late(folder, results)
        apart = [result for result in results if not result.met]
        if apart or (len(results) >= count and not late) or time.monotonic() > end:
            break
        time.sleep(POLL_S)
    if not results or (not apart and len(results) < count and _beats(folder) != beats):
        raise BadInput(
            f"{len(results)} of {count} agents have ended",
            why="the others still run" if results else "all still run, or none has begun",
            remedy="wait for the job to end; then collect again",
        )
    first = _first(results)
    outcome, failure = first.outcome, first.failure
    if apart:
        outcome, failure = "failed", apart[0].failure
    elif len(results) < count:
        outcome = "failed"
        failure = Failure(rank=None, exit_code=None, signal=None, message=_lost(folder, results, count, names))
    elif late:
        outcome, cause = "failed", f"the shared file system does not show all of {', '.join(late[:8])}"
        failure = failure or Failure(rank=None, exit_code=None, signal=None, message=f"{cause}: collect again later")
    return LaunchResult(
        outcome=outcome,
        exit_code=first.exit_code if outcome == first.outcome else 1,
        seconds=max(result.seconds for result in results),
        failure=failure,
        stdout_tail="",
        stderr_tail="",
        survivors=tuple(pid for result in results for pid in result.survivors),
    )


def _first(results: Sequence[AgentResult]) -> AgentResult:
    """Return the agent that failed first; agents that only lost their peers fail after the one whose rank failed."""
    failed = [result for result in results if result.outcome != "finished"]
    named = [result for result in failed if result.failure is not None and result.failure.rank is not None]
    return (named or failed or list(results))[0]


def _late(folder: Path, results: Sequence[AgentResult]) -> list[str]:
    """Return the records of which less is visible here than an agent reported."""
    here = _sizes(folder)
    return sorted({name for one in results for name, size in one.records.items() if here.get(name, 0) < size})


def _beats(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime for path in (folder / "records").glob("rank*.beat")}


def absent_words(began: Sequence[str], names: Sequence[str]) -> str:
    """Return a sentence on the named nodes that have not begun."""
    absent = [name for name in names if not any(one.rpartition("-")[0] == name for one in began)]
    return f"; {', '.join(absent[:8])} did not" if absent else ""


def _lost(folder: Path, results: Sequence[AgentResult], count: int, names: Sequence[str]) -> str:
    """Return a sentence on missing nodes, and the reports of their peers."""
    ended = {result.node for result in results}
    lost = sorted(path.stem for path in (folder / "agents").glob("*.began") if path.stem not in ended)
    began = len(ended) + len(lost)
    what = [f"{', '.join(lost[:8])} began and left no result: the node was lost"] if lost else []
    what += [f"{began} of {count} nodes began{absent_words([*ended, *lost], names)}"] if began < count else []
    failure = _first(results).failure
    heard = f" (the others say: {failure.message[:200]})" if failure is not None and failure.message else ""
    return "; ".join(what) + heard
