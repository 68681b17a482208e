"""A run over several nodes: each has an agent of its own, and one of them, or a command afterwards, collects.

The agents find each other at an endpoint (torch's c10d rendezvous, which the machine of that name hosts) and agree on
who is which rank. The run's directory is one that all nodes see. Each agent leaves in it how its ranks ended.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.launch import Failure, Launched
from topology import codec
from topology.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """How one agent's ranks ended, and when (time of the clock)."""

    node: str
    ended_at: float
    outcome: str
    exit_code: int | None
    seconds: float
    failure: Failure | None
    survivors: tuple[int, ...]


def leave_word(folder: Path, done: Launched) -> None:
    """Write how the agent of this process ended."""
    node = f"{socket.gethostname()}-{os.getpid()}"
    word = AgentEnd(
        node=node,
        ended_at=time.time(),
        outcome=done.outcome,
        exit_code=done.exit_code,
        seconds=done.seconds,
        failure=done.failure,
        survivors=done.survivors,
    )
    codec.write_text(folder / "agents" / f"{node}.json", codec.to_json(word) + "\n")


def read_words(folder: Path) -> list[AgentEnd]:
    """Return how the agents ended, in order of time."""
    paths = sorted((folder / "agents").glob("*.json"))
    words = [codec.convert(codec.read_json(path), AgentEnd, where=str(path)) for path in paths]
    return sorted(words, key=lambda word: word.ended_at)


def together(words: Sequence[AgentEnd], count: int) -> Launched:
    """Return how the run of `count` nodes ended: as its first agent that did not end well, or well.

    Raises BadInput when an agent left no word: its node was lost, or is still running.
    """
    if len(words) < count:
        raise BadInput(
            f"{len(words)} of {count} agents have ended",
            why="the others still run, or their nodes were lost",
            remedy="wait for the job to end; then collect again",
        )
    # Agents that lose the others complain later than the one whose rank failed.
    bad = [word for word in words if word.outcome != "finished"]
    named = [word for word in bad if word.failure is not None and word.failure.rank is not None]
    first = (named or bad or list(words))[0]
    return Launched(
        outcome=first.outcome,
        exit_code=first.exit_code,
        seconds=max(word.seconds for word in words),
        failure=first.failure,
        stdout_tail="",
        stderr_tail="",
        survivors=tuple(pid for word in words for pid in word.survivors),
    )
