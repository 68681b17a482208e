"""What a trial is, however it is made: a plan that was run for a few steps, and what came of it."""

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
    WRONG_NUMBERS = "wrong_numbers"  # it computes something else than one process
    NOT_AS_REQUESTED = "not_as_requested"  # a setting did not take effect
    INTERRUPTED = "interrupted"  # by a person or a scheduler: says nothing of the plan
    OUT_OF_TIME = "out_of_time"  # the budget ended before it: says nothing of the plan, either

    @property
    def blames_plan(self) -> bool:
        """Whether the plan is not tried again."""
        return self not in {Status.INTERRUPTED, Status.OUT_OF_TIME}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial. `key` is its candidate's. `step_s` is the median of the measured steps, None where there are none.

    `noise` is the spread of the logarithm of `step_s`; `seconds` what the trial took, its share of a start of processes
    included; `reserved_bytes` what the fullest rank held. `predicted_s` is (middle, low, high) as believed when it was
    chosen, `why` the reason for the choice, `cause` that of a failure. `directory` has its report.
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
    started_together: int = 1  # trials that shared one start of processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A candidate to be tried: its place, the reason, and what was believed of it."""

    row: int
    why: str
    predicted_s: tuple[float, float, float]


class Runner(Protocol):
    """What makes trials: the executor, another framework's command, or recorded runs."""

    def start_s(self, candidate: Candidate) -> float:
        """Return the seconds from nothing to the first step: processes, groups, the model, compilation."""

    def steps(self) -> int:
        """Return how many steps a trial takes, warm-up included."""

    def shares_start(self, one: Candidate, other: Candidate) -> bool:
        """Return whether two plans can be tried with one start of processes."""

    def run(self, plans: Sequence[tuple[Candidate, Chosen]], left_s: float) -> Iterator[Trial]:
        """Try the plans one after the other within `left_s` seconds, and yield each trial when it is known.

        Never raises for what a plan does. Raises KeyboardInterrupt when interrupted, with all processes ended.
        """
