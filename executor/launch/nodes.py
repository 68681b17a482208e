"""Runs over several nodes: each node has an agent, and the results of all agents are collected afterwards.

The agents meet at an endpoint (torch's c10d rendezvous, hosted by the node of that name) and assign ranks. The run's
directory is shared by all nodes; each agent writes there how its ranks ended.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.launch.local_ranks import Failure, LaunchResult
from topology import codec
from topology.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """How one agent's ranks ended, and when (seconds since the epoch)."""

    node: str
    ended_at: float
    outcome: str
    exit_code: int | None
    seconds: float
    failure: Failure | None
    survivors: tuple[int, ...]


def write_agent_result(folder: Path, done: LaunchResult) -> None:
    """Write the result of this process's agent."""
    node = f"{socket.gethostname()}-{os.getpid()}"
    result = AgentResult(
        node=node,
        ended_at=time.time(),
        outcome=done.outcome,
        exit_code=done.exit_code,
        seconds=done.seconds,
        failure=done.failure,
        survivors=done.survivors,
    )
    codec.write_text(folder / "agents" / f"{node}.json", codec.to_json(result) + "\n")


def read_agent_results(folder: Path) -> list[AgentResult]:
    """Return the results of all agents that have ended, in order of time."""
    paths = sorted((folder / "agents").glob("*.json"))
    results = [codec.convert(codec.read_json(path), AgentResult, where=str(path)) for path in paths]
    return sorted(results, key=lambda result: result.ended_at)


def combine_agent_results(results: Sequence[AgentResult], count: int) -> LaunchResult:
    """Return the result of a run of `count` nodes: that of the first agent that failed, else of success.

    Raises BadInput when the result of an agent is missing: its node was lost, or is still running.
    """
    if len(results) < count:
        raise BadInput(
            f"{len(results)} of {count} agents have ended",
            why="the others still run, or their nodes were lost",
            remedy="wait for the job to end; then collect again",
        )
    # Agents that only lost their peers fail later than the agent whose rank failed.
    failed = [result for result in results if result.outcome != "finished"]
    named = [result for result in failed if result.failure is not None and result.failure.rank is not None]
    first = (named or failed or list(results))[0]
    return LaunchResult(
        outcome=first.outcome,
        exit_code=first.exit_code,
        seconds=max(result.seconds for result in results),
        failure=first.failure,
        stdout_tail="",
        stderr_tail="",
        survivors=tuple(pid for result in results for pid in result.survivors),
    )
