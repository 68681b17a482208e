"""The deadline of a solver."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from time import monotonic

from topology.errors import Infeasible


@dataclass(frozen=True, slots=True)
class Deadline:
    """A value of `time.monotonic`; infinity without a limit."""

    end: float = inf

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        return cls() if seconds is None else cls(monotonic() + seconds)

    def sooner(self, seconds: float) -> Deadline:
        """Return this deadline, or the one in `seconds` if that is sooner."""
        return Deadline(min(self.end, monotonic() + seconds))

    def earlier(self, seconds: float) -> Deadline:
        """Return this deadline, moved earlier by some seconds."""
        return Deadline(self.end - seconds)

    @property
    def left_s(self) -> float:
        return self.end - monotonic()

    @property
    def over(self) -> bool:
        return self.left_s < 0

    def check(self) -> None:
        """Raise Infeasible if it has passed; used before the first answer."""
        if self.over:
            raise Infeasible(
                "no answer within the time limit",
                why="none was found before it was over",
                remedy="a longer limit, fewer mesh axes, or more pinned tensors",
            )


NO_DEADLINE = Deadline()
