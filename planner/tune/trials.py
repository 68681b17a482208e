"""A trial, however it is made: a plan that was run for a few steps, and its outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from planner.tune.candidates import Candidate


class Status(StrEnum):
    """How a trial ended."""

    FINISHED = "finished"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"  # it hung, or did not end within its time
    FAILED = "failed"  # a rank raised, or was killed
    WRONG_NUMBERS = "wrong_numbers"  # its results differ from those of one process
    NOT_AS_REQUESTED = "not_as_requested"  # a setting did not take effect
    INTERRUPTED = "interrupted"  # by a person or a scheduler; says nothing of the plan
    OUT_OF_TIME = "out_of_time"  # the budget ended first; says nothing of the plan

    @property
    def blames_plan(self) -> bool:
        """Whether the plan is not tried again."""
        return self not in {Status.INTERRUPTED, Status.OUT_OF_TIME}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial. `key` is its candidate's. `step_s` is the median of the measured steps, None without any.

    `noise` is the spread of the logarithm of `step_s`; `seconds` is the time of the trial, including its share of a
    start of processes; `reserved_bytes` those of the fullest rank. `predicted_s` is (middle, low, high) of the
    prediction when it was chosen, `why` the reason for the choice, `cause` that of a failure. `directory` has its
    report.
    """

    key: str
    status: Status
    step_s: float | None = None
    noise: float = 0.0
    seconds: float = 0.0
    reserved_bytes: float | None = None
    cause: str = ""
    predicted_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    why: str = ""
    directory: str = ""
    machine: str = ""  # the host that ran it
    started_together: int = 1  # in files of earlier versions, and not read


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A candidate to be tried: its index, the reason, and its prediction."""

    row: int
    why: str
    predicted_s: tuple[float, float, float]


class Runner(Protocol):
    """The interface of what runs trials: the executor, another framework's command, or recorded runs."""

    def start_s(self, candidate: Candidate) -> float:
        """Return the seconds from the start of processes to the first step: groups, the model, compilation."""

    def steps(self) -> int:
        """Return the number of steps in a trial, warm-up included."""

    def shares_start(self, one: Candidate, other: Candidate) -> bool:
        """Return whether two plans can be tried with one start of processes."""

    def run(self, plans: Sequence[tuple[Candidate, Chosen]], left_s: float) -> Iterator[Trial]:
        """Try the plans one after the other within `left_s` seconds, and yield each trial when it is known.

        A failing plan never raises. Raises KeyboardInterrupt when interrupted, with all processes ended.
        """
