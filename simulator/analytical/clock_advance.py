"""How a pass moves two clocks, when its device and when its host are done: a matrix over maximum and sum.

After a pass the device is at `max(device + device_s, host + late_s)` and the host at `max(host + host_s, device +
waits_s)`, of where both were before. A host that only launches never waits (`waits_s` is minus infinity); one that
reads what the device has computed goes on from there, and what it launches next comes that much later.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats

NEVER = -np.inf
Rows = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockAdvance:
    """Seconds from clock to clock; columns of plans. `late_s` is never less than `device_s`."""

    device_s: Floats
    late_s: Floats
    host_s: Floats
    waits_s: Floats

    def then(self, other: ClockAdvance) -> ClockAdvance:
        """Return both passes, one after the other."""
        return ClockAdvance(
            device_s=np.maximum(self.device_s + other.device_s, self.waits_s + other.late_s),
            late_s=np.maximum(self.late_s + other.device_s, self.host_s + other.late_s),
            host_s=np.maximum(self.host_s + other.host_s, self.late_s + other.waits_s),
            waits_s=np.maximum(self.waits_s + other.host_s, self.device_s + other.waits_s),
        )

    def waited(self) -> ClockAdvance:
        """Return the pass with the host waiting for the device at its end."""
        late_s, device_s = np.maximum(self.late_s, self.host_s), np.maximum(self.device_s, self.waits_s)
        return ClockAdvance(device_s=device_s, late_s=late_s, host_s=late_s, waits_s=device_s)

    def where(self, rows: Rows, other: ClockAdvance) -> ClockAdvance:
        """Return this advance in `rows`, the other one elsewhere."""
        return ClockAdvance(
            **{f.name: np.where(rows, getattr(self, f.name), getattr(other, f.name)) for f in fields(ClockAdvance)}
        )

    def take(self, which: NDArray[np.intp]) -> ClockAdvance:
        """Return some of the rows."""
        return ClockAdvance(**{f.name: getattr(self, f.name)[which] for f in fields(ClockAdvance)})

    def times(self, factor: float) -> ClockAdvance:
        """Return the pass with everything in it so many times as long."""
        return ClockAdvance(**{f.name: factor * getattr(self, f.name) for f in fields(ClockAdvance)})


def launching(device_s: Floats, behind_s: Floats, host_s: Floats) -> ClockAdvance:
    """Return the advance of a host that only launches; see `simulator.analytical.layer_cost.PassCost.behind_s`."""
    late_s = np.maximum(behind_s, device_s)
    return ClockAdvance(device_s=device_s, late_s=late_s, host_s=host_s, waits_s=np.full(device_s.shape, NEVER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """A pass in whose `rows` the host waits for the device: what is launched before it first does, and all that
    follows.

    `before_s` are seconds of the device, of the device behind the host, and of the host, as `launching` takes them.
    """

    rows: Rows
    before_s: tuple[Floats, Floats, Floats]
    after: ClockAdvance

    def take(self, which: NDArray[np.intp]) -> Waits:
        """Return some of the rows."""
        device_s, behind_s, host_s = (seconds[which] for seconds in self.before_s)
        return Waits(rows=self.rows[which], before_s=(device_s, behind_s, host_s), after=self.after.take(which))

    def times(self, factor: float) -> Waits:
        """Return the pass with everything in it so many times as long."""
        device_s, behind_s, host_s = (factor * seconds for seconds in self.before_s)
        return Waits(rows=self.rows, before_s=(device_s, behind_s, host_s), after=self.after.times(factor))

    def advance(self, plain: ClockAdvance, *, host_s: Floats | float = 0.0) -> ClockAdvance:
        """Return the advance with `host_s` of the host's before the pass; `plain` is that of rows in which it does not
        wait.
        """
        device, behind, host = self.before_s
        first = launching(device, behind + host_s, host + host_s)
        return first.waited().then(self.after).where(self.rows, plain)
