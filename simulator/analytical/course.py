"""Plans that go through one schedule table, and what walking them takes: how each kind of pass moves the clocks of its
rank, and what messages take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from simulator.columns.plan_table import Floats
from simulator.pipeline.schedule_walk import Table

LONG_AGO = -1e6  # seconds: earlier than any clock, so it delays nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PassClocks:
    """How a kind of pass moves the clocks of its rank, in seconds of shape (plans,). `device_s` is its time on the
    device, `kernels_s` the kernels in it. `host_s` is the host's time. With `lead_s` it begins that much after the wire
    is free, for the parameters that it gathers (negative: before). `drain_s` after its end the wire is done with what
    it sent.
    """

    device_s: Floats
    kernels_s: Floats
    host_s: Floats
    waits_s: Floats  # from the device's start until the host goes on, where the host waits for the device
    slack_s: Floats  # where the host comes last, the device ends this much later than `device_s` after the host's clock
    lead_s: Floats
    drain_s: Floats
    sent_s: Floats  # seconds of its collectives on the stream of shards
    summed_drain_s: Floats
    summed_s: Floats  # and on the stream of sums over replicas
    waits_for_traffic: bool


SECONDS = tuple(each.name for each in fields(PassClocks) if each.name != "waits_for_traffic")


@dataclass(frozen=True, slots=True)
class Hops:
    """Seconds of a message from each rank to the next one and to the one before, shape (2, ranks, plans). While a
    message waits for its receiver it holds a share `held` of the sender's SMs.
    """

    seconds: Floats
    held: Floats
    host_s: Floats

    def take(self, some: slice) -> Hops:
        """Return the hops of the plans `some`."""
        return Hops(self.seconds[..., some], self.held[..., some], self.host_s[some])


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Plans that go through one table. `passes` has one entry for each kind of the table; ranks begin at `begins_s`.

    With `synchronizes` the host waits for its device after each pass.
    """

    table: Table
    passes: Sequence[PassClocks]
    hops: Hops
    begins_s: Floats
    synchronizes: bool = False
