"""Bytes that a rank of the account has allocated, by category and plan, and the most of it."""

from __future__ import annotations

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.step.rank import Value

CATEGORIES = (
    "parameters",
    "optimizer",
    "gradients",
    "activations",
    "gathered_parameters",
    "gradient_buffers",
    "loss_and_recompute",
    "symmetric_buffers",
)
ROW_OF = {name: row for row, name in enumerate(CATEGORIES)}
GATHERED = ROW_OF["gathered_parameters"]


class Bytes:
    """What is allocated, by category and plan, and the most of it so far."""

    def __init__(self, rows: int) -> None:
        self.now: Floats = np.zeros((len(CATEGORIES), rows))
        self._total = np.zeros(rows)
        self._most, self._peak = self.now.copy(), np.zeros(rows)
        self._grown = False  # since the most was looked at: it can only have come just before something is let go
        self._live: dict[str, tuple[int, Value]] = {}
        self._times: dict[str, float] = {}  # of buffers that stand for so many
        self._body: dict[str, None] | None = None  # what was allocated since a unit began that stands for several
        self._before = self.now

    @property
    def most(self) -> Floats:
        """What was allocated when it was most."""
        if self._grown:
            self._grown = False
            more = self._total > self._peak
            if more.any():
                self._most[:, more] = self.now[:, more]
                self._peak = np.maximum(self._peak, self._total)
        return self._most

    def begin_unit(self) -> None:
        """A unit begins that stands for several."""
        self._body, self._before = {}, self.now.copy()

    def end_unit(self, times: float) -> None:
        """It has ended: what it has taken and let go is `times` as much."""
        _ = self.most
        change = (times - 1.0) * (self.now - self._before)
        change[GATHERED] = 0.0  # counted for all of them together, as they are gathered ahead
        self.now += change
        self._total += change.sum(axis=0)
        self._times |= {
            name: times for name in self._body or () if name in self._live and self._live[name][0] != GATHERED
        }
        self._body = None

    def begin(self) -> None:
        """Look for the most from here on."""
        self._most, self._peak, self._grown = self.now.copy(), self._total.copy(), False

    def alloc(self, buffer: str, nbytes: Value, category: str, *, handed_on: bool = False) -> None:
        """Take memory; what is `handed_on` is let go of by the next unit, however many of them there are."""
        if not (nbytes.any() if isinstance(nbytes, np.ndarray) else nbytes):
            return
        row = ROW_OF[category]
        self._live[buffer] = row, nbytes
        if self._body is not None and not handed_on:
            self._body[buffer] = None
        self.now[row] += nbytes
        self._total += nbytes
        self._grown = True

    def free(self, buffer: str) -> None:
        if buffer not in self._live:
            return
        _ = self.most
        row, nbytes = self._live.pop(buffer)
        times = self._times.pop(buffer, 1.0)
        if self._body is None and times != 1.0:
            nbytes = times * nbytes
        self.now[row] -= nbytes
        self._total -= nbytes
