"""Plans that go through one schedule table, and one walk of their passes, wave by wave: a pass receives its messages,
waits for parameters and for its host, runs, and sends. `simulator.analytical.table_walk` has the walks of all tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats
from simulator.pipeline.schedule_walk import Table
from simulator.pipeline.waves import Ints
from topology.time_limit import check_time

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


# Iterations that find how long kernels take during messages, to a hundredth of the time they lose.
ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Messages:
    """The first (or second) message that each pass receives, or sends, in the order of the passes.

    `waves` says which waves have any. Where a pass has none, `message` is one that nobody waits for, and `hop` is -1.
    `seconds` are those of the message, `host_s` the host's to post it, and `posts_s` the same, or LONG_AGO for none.
    `waited` is how long compute has waited for it.
    """

    waves: list[bool]
    message: Ints
    slot: Ints
    hop: Ints
    seconds: Floats
    host_s: Floats
    posts_s: Floats
    waited: Floats


class WalkedPasses(Protocol):
    """What `TableWalk` has of its passes, in the order of their waves, which begin at `starts`."""

    starts: list[int]
    state: Ints
    states: int
    seconds: Floats
    sent: Floats
    drain: Floats
    waits: NDArray[np.bool_]
    synchronizes: NDArray[np.bool_]
    begins_s: Floats
    messages: int
    needs: list[Messages]
    sends: list[Messages]
    held: Floats


class WaveWalk:
    """A walk with a guess `lags` at how long messages wait and move, or None to find that out (`took`).

    `compute`, `host` and `wires` (the streams of shards and of replicas) are clocks of states. Of passes: when they
    `began`, and when compute and host had got to them (`computed`, `launched`); how much longer kernels took alongside
    messages (`contention`). Where `noted`, also how long passes waited for traffic (`dp_waits`), by how much that could
    have been later (`dp_room`), and whether a pass itself decides when its streams are done (`drained`).
    """

    def __init__(self, table: WalkedPasses, lags: Floats | None, *, noted: bool) -> None:
        self.table, self.lags, self.noted = table, lags, noted
        count, starts = len(table.state), table.starts
        self.compute, self.host = table.begins_s.copy(), table.begins_s.copy()
        self.wires = np.zeros((2, table.states))
        self._ready, self.took = np.full((2, table.messages + 2), LONG_AGO)
        self._until = np.full(table.held.shape, LONG_AGO)  # when messages that hold SMs have arrived, by slot
        self._latest = np.full(table.states, LONG_AGO)  # of these
        self._device, self._kernels, self._hosted, self._waiting, self._slack, self._lead = table.seconds[:6]
        moving = np.any(table.sent > 0.0, axis=0) | np.any(table.drain > 0.5 * LONG_AGO, axis=0)
        self._moves, self._leads = any_of(np.asarray(moving), starts), any_of(self._lead > 0.5 * LONG_AGO, starts)
        self._waits, self._synchronizes = any_of(table.waits, starts), any_of(table.synchronizes, starts)
        takes_time = (self._hosted > 0.0) | (self._slack > 0.0) | (self._waiting > 0.5 * LONG_AGO)
        posts = any(each.host_s.any() for each in (*table.needs, *table.sends))
        self._hosts = bool(takes_time.any() or posts or table.begins_s.any())
        self.contention, self.dp_waits, self.launched, self.began = np.zeros((4, count))
        self.dp_room, self.computed = np.full(count, np.inf), np.empty(count)
        self.drained = np.zeros((2, count), dtype=np.bool_)

    def run(self) -> None:
        """Walk all passes."""
        table = self.table
        for wave, (first, end) in enumerate(pairwise(table.starts)):
            check_time()
            here = slice(first, end)
            state = table.state[here]
            compute, host = self._received(wave, here, self.compute[state], self.host[state])
            if self._leads[wave]:
                compute = self._gathered(here, state, compute, host)
            compute, host = self._ran(here, state, compute, host)
            if self._moves[wave]:
                self._moved(here, state, compute)
            if self._waits[wave]:
                begins = np.maximum(self.wires[:, state].max(axis=0), compute)
                begins = np.where(table.waits[here], begins, compute)
                self.dp_waits[here] += begins - compute
                compute = begins
            if self._synchronizes[wave]:
                host = np.where(table.synchronizes[here], np.maximum(host, compute), host)
            host = self._sent(wave, here, state, compute, host)
            self.compute[state] = compute
            if self._hosts:
                self.host[state] = host

    def _received(self, wave: int, here: slice, compute: Floats, host: Floats) -> tuple[Floats, Floats]:
        """Wait for the messages that passes need; return the clocks of compute and host after them."""
        for needs in self.table.needs:
            if not needs.waves[wave]:
                continue
            message = needs.message[here]
            sent_at = self._ready[message]
            begins = np.maximum(sent_at, compute)
            if self._hosts:
                begins = np.maximum(begins, host + needs.posts_s[here])
                host = host + needs.host_s[here]
            if self.noted:
                np.subtract(begins, compute, out=needs.waited[here])
            compute = begins + needs.seconds[here]
            if self.lags is None:
                self.took[message] = compute - sent_at
        return compute, host

    def _gathered(self, here: slice, state: Ints, compute: Floats, host: Floats) -> Floats:
        """Return when passes begin that wait for the parameters that they gather."""
        wire, lead = self.wires[0, state], self._lead[here]
        begins: Floats = np.maximum(np.maximum(wire, host) + lead, compute)
        if self.noted:
            self.dp_room[here] = np.maximum(compute - (wire + lead), 0.0)
            self.dp_waits[here] = begins - compute
        return begins

    def _ran(self, here: slice, state: Ints, compute: Floats, host: Floats) -> tuple[Floats, Floats]:
        """Run passes as soon as their hosts have launched them, slower alongside messages; return the clocks after
        them.
        """
        self.computed[here] = compute
        if self._hosts:
            compute = np.maximum(compute, np.add(host, self._slack[here], out=self.launched[here]))
        self.began[here] = begins = compute
        compute = begins + self._device[here]
        if self.lags is not None:
            rows = (self._latest[state] > begins).nonzero()[0]
            if len(rows):
                left_s = self._until.take(state[rows], axis=1) - begins[rows]
                held = self.table.held.take(state[rows], axis=1)
                longer = _beside_messages(left_s, held, self._kernels[here][rows])
                self.contention[here.start + rows] = longer
                compute[rows] += longer
        if self._hosts:
            host = np.maximum(host + self._hosted[here], begins + self._waiting[here])
        return compute, host

    def _moved(self, here: slice, state: Ints, compute: Floats) -> None:
        """Run the collectives of passes on their streams."""
        busy, drained = self.wires.take(state, axis=1) + self.table.sent[:, here], compute + self.table.drain[:, here]
        self.wires[0, state], self.wires[1, state] = np.maximum(busy, drained)
        if self.noted:
            np.greater(drained, busy, out=self.drained[:, here])

    def _sent(self, wave: int, here: slice, state: Ints, compute: Floats, host: Floats) -> Floats:
        """Send the messages of passes; return the clocks of their hosts."""
        for sends in self.table.sends:
            if not sends.waves[wave]:
                continue
            message, there = sends.message[here], compute
            if self._hosts:
                host = host + sends.host_s[here]
                there = np.maximum(compute, host)
            self._ready[message] = there
            if self.lags is not None:
                self._until[sends.slot[here], state] = gone = there + self.lags[message]
                self._latest[state] = np.maximum(self._latest[state], gone)
        return host


def any_of(flags: NDArray[np.bool_], starts: Sequence[int]) -> list[bool]:
    """Return for each wave whether any of its passes has a flag."""
    flagged: list[bool] = np.logical_or.reduceat(flags, starts[:-1]).tolist()
    return flagged


def _beside_messages(left_s: Floats, held: Floats, kernels_s: Floats) -> Floats:
    """Return how much longer kernels take while messages hold SMs; rows are messages, on their way for so long."""
    # Of the time that they take, each message takes its share for as long as it is on its way.
    kernel, message = (left_s.T > 0.0).nonzero()
    left_s, held = left_s[message, kernel], held[message, kernel]
    lost: Floats = np.zeros(len(kernels_s))
    one_each = len(kernel) == len(kernels_s) and not (kernel[1:] == kernel[:-1]).any()
    for _ in range(ROUNDS):
        takes = kernels_s + lost
        if one_each:
            lost = held * np.minimum(takes, left_s)
        else:
            lost = np.asarray(np.bincount(kernel, held * np.minimum(takes[kernel], left_s), len(kernels_s)), np.float64)
    return lost
