"""How a pass moves two clocks, the ends of the device's work and of the host's: a 2 x 2 matrix over maximum and sum.

From clocks `device` and `host` a pass moves the device to `max(device + device_s, host + late_s)` and the host to
`max(host + host_s, device + waits_s)`. A host that only launches never waits (`waits_s` is minus infinity). One that
reads a result of the device goes on when the device has it, and its next launches are later by that.
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
    """Seconds added from each clock to each, shape (plans,). `late_s` is never less than `device_s`."""

    device_s: Floats
    late_s: Floats
    host_s: Floats
    waits_s: Floats

    def then(self, other: ClockAdvance) -> ClockAdvance:
        """Return the advance of this pass followed by `other`."""
        return ClockAdvance(
            device_s=np.maximum(self.device_s + other.device_s, self.waits_s + other.late_s),
            late_s=np.maximum(self.late_s + other.device_s, self.host_s + other.late_s),
            host_s=np.maximum(self.host_s + other.host_s, self.late_s + other.waits_s),
            waits_s=np.maximum(self.waits_s + other.host_s, self.device_s + other.waits_s),
        )

    def waited(self) -> ClockAdvance:
        """Return the advance with the host waiting for the device at the end of the pass."""
        late_s, device_s = np.maximum(self.late_s, self.host_s), np.maximum(self.device_s, self.waits_s)
        return ClockAdvance(device_s=device_s, late_s=late_s, host_s=late_s, waits_s=device_s)

    def where(self, rows: Rows, other: ClockAdvance) -> ClockAdvance:
        """Return this advance in `rows`, `other` elsewhere."""
        return ClockAdvance(
            **{f.name: np.where(rows, getattr(self, f.name), getattr(other, f.name)) for f in fields(ClockAdvance)}
        )

    def take(self, which: NDArray[np.intp]) -> ClockAdvance:
        """Return the rows `which`."""
        return ClockAdvance(**{f.name: getattr(self, f.name)[which] for f in fields(ClockAdvance)})


def launching(device_s: Floats, behind_s: Floats, host_s: Floats) -> ClockAdvance:
    """Return the advance of a pass whose host only launches; for `behind_s` see
    `simulator.analytical.layer_cost.PassCost`.
    """
    late_s = np.maximum(behind_s, device_s)
    return ClockAdvance(device_s=device_s, late_s=late_s, host_s=host_s, waits_s=np.full(device_s.shape, NEVER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """A pass that waits: in `rows` the host waits for the device within it. `before_s` is what it launches before the
    first wait, `after` everything that follows.

    `before_s` has the seconds that `launching` takes: of the device, of the device behind the host, and of the host.
    """

    rows: Rows
    before_s: tuple[Floats, Floats, Floats]
    after: ClockAdvance

    def take(self, which: NDArray[np.intp]) -> Waits:
        """Return the rows `which`."""
        device_s, behind_s, host_s = (seconds[which] for seconds in self.before_s)
        return Waits(rows=self.rows[which], before_s=(device_s, behind_s, host_s), after=self.after.take(which))

    def advance(self, plain: ClockAdvance, *, host_s: Floats | float = 0.0) -> ClockAdvance:
        """Return the advance of the pass after `host_s` of host work; `plain` is the advance in rows without a wait."""
        device, behind, host = self.before_s
        first = launching(device, behind + host_s, host + host_s)
        return first.waited().then(self.after).where(self.rows, plain)
