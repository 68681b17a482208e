"""Walk plans through the tables of their schedules, which gives every rank's clocks after its last pass.

All plans of all tables are walked together, wave by wave (`simulator.pipeline.waves`), since a wave takes about as long
to compute however many passes it has. Data are flat arrays of passes, of the sending or receiving ends of messages, or
of states; a state is one rank of one plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.wave_walk import LONG_AGO, SECONDS, Course, Messages, PassClocks, WaveWalk, any_of
from simulator.columns.plan_table import Floats
from simulator.pipeline.waves import Ends, Ints

MOST_PASSES = 1 << 18  # passes walked at once: limits memory


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks of the ranks of a course after their last passes, and the seconds they waited, shape (ranks, plans).

    `issued` are the seconds of all work of a host, `moved` those of collectives on the stream of shards. `room` is how
    much later host and wire could be without delaying passes of the second half.
    """

    host: Floats
    compute: Floats
    wire: Floats
    summed: Floats  # when the stream of sums over replicas is done
    issued: Floats
    moved: Floats
    waits: Mapping[str, Floats]
    room: Mapping[str, Floats]

    @property
    def _busy(self) -> Floats:
        """Seconds in which the device works, or waits for parameters."""
        return self.compute - self.waits["host"] - self.waits["bubble"]

    def longer_by(self, rounds: Floats, before: Clocks) -> tuple[Clocks, dict[str, Floats]]:
        """Return the clocks after `rounds` further rounds of micro batches, and for how long the hosts and wires of the
        ranks delay these rounds, by part; `before` has the clocks of one round less.

        A further round takes as long as this one or, if that is longer, as the work that a device, host or wire has in
        it: a device waits less with every round, and a host or wire loses its lead.
        """
        grown = rounds * (self.compute - before.compute)
        most = grown.max(axis=0)
        busy, host, wire = (
            np.maximum(rounds * (now - earlier) - lead - most, 0.0)
            for now, earlier, lead in (
                (self._busy, before._busy, 0.0),
                (self.issued, before.issued, self.room["host"]),
                (self.moved, before.moved, self.room["dp"]),
            )
        )
        grown = grown + np.max([busy, host, wire], axis=(0, 1))
        # Hosts and wires keep their distance from the device, unless they are on their own and slower.
        ends = {
            name: (now := getattr(self, name)) + np.maximum(grown, rounds * (now - getattr(before, name)))
            for name in ("host", "wire", "summed")
        }
        return replace(self, compute=self.compute + grown, **ends), {"host": host, "dp": np.maximum(wire - host, 0.0)}

    @property
    def sent(self) -> Floats:
        """When all streams of data-parallel traffic are done."""
        return np.maximum(self.wire, self.summed)

    def joined(self, other: Clocks) -> Clocks:
        """Return the clocks of this course's plans followed by those of `other`."""
        names = [each.name for each in fields(Clocks) if each.name not in ("waits", "room")]
        both = {name: np.concatenate([getattr(self, name), getattr(other, name)], axis=1) for name in names}
        waits, room = (
            {part: np.concatenate([these, theirs[part]], axis=1) for part, these in mine.items()}
            for mine, theirs in ((self.waits, other.waits), (self.room, other.room))
        )
        return Clocks(**both, waits=waits, room=room)


def walk_tables(courses: Sequence[Course]) -> list[Clocks]:
    """Return the clocks of all ranks of every course after its last pass.

    Messages in transit slow down the kernels of their sender. A first walk without this effect finds how long each
    message is in transit.
    """
    found: list[Clocks | None] = [None] * len(courses)
    for batch in _batches(courses):
        walk = TableWalk([course for _, course in batch])
        walk.run(walk.lags())
        for (number, _), clocks in zip(batch, walk.clocks(), strict=True):
            before = found[number]
            found[number] = clocks if before is None else before.joined(clocks)
    return [clocks for clocks in found if clocks is not None]


def _batches(courses: Sequence[Course]) -> Iterator[list[tuple[int, Course]]]:
    """Yield batches of (number, course) that are walked at once; a long course is split by plans."""
    batch: list[tuple[int, Course]] = []
    left = MOST_PASSES
    for number, course in enumerate(courses):
        turns, plans, start = len(course.table.waves.wave), len(course.begins_s), 0
        while start < plans:
            count = min(plans - start, max(1, left // turns))
            if batch and count * turns > left:
                yield batch
                batch, left = [], MOST_PASSES
                continue
            batch.append((number, _some_plans(course, slice(start, start + count)) if count < plans else course))
            start, left = start + count, left - count * turns
    if batch:
        yield batch


def _some_plans(course: Course, some: slice) -> Course:
    known: dict[int, PassClocks] = {}
    for did in course.passes:
        if id(did) not in known:
            values = {name: getattr(did, name)[some] for name in SECONDS}
            known[id(did)] = PassClocks(**values, waits_for_traffic=did.waits_for_traffic)
    passes = [known[id(did)] for did in course.passes]
    return replace(course, passes=passes, hops=course.hops.take(some), begins_s=course.begins_s[some])


class TableWalk:
    """The clocks of some courses. Passes are in the order of their waves; within a wave, those of one table are
    together.
    """

    def __init__(self, courses: Sequence[Course]) -> None:
        self.courses = courses
        self._waves = [course.table.waves for course in courses]
        plans = np.array([len(course.begins_s) for course in courses])
        self.plans, self._one_each = plans, bool((plans == 1).all())
        ranks = np.array([course.table.schedule.ranks for course in courses])
        turns = np.array([len(each.wave) for each in self._waves])
        self._slots = max(1, *(each.slots for each in self._waves))
        self.states, self.states_of = self._offsets(ranks)
        self.messages, messages_of = self._offsets([each.messages for each in self._waves])
        _, self.hops_of = self._offsets(2 * ranks)
        values, which, waits = zip(*map(_pass_values, courses), strict=True)
        _, values_of = self._offsets([block.shape[1] for block in values])

        wave = np.concatenate([each.wave for each in self._waves])
        # Of each pass: its turn among those of all courses, its course, and its plan.
        order = np.argsort(wave, kind="stable")
        course = np.repeat(np.arange(len(courses)), turns)[order]
        self._turn, self._course, self._plan = order, course, np.zeros(len(order), dtype=np.intp)
        if not self._one_each:
            many = plans[course]
            self._turn, self._course = np.repeat(order, many), np.repeat(course, many)
            self._plan = np.arange(len(self._turn)) - np.repeat(np.cumsum(many) - many, many)
        self.starts = np.searchsorted(wave[order].repeat(plans[course]), np.arange(int(wave.max()) + 2)).tolist()
        self.state = self._each(self.states_of, np.concatenate([each.rank for each in self._waves]))
        self.kind = np.concatenate([each.table.turn_kinds for each in courses])[self._turn]
        kinds = self._each(values_of, np.concatenate(which))
        self.seconds = np.concatenate([block.reshape(len(SECONDS), -1) for block in values], axis=1)[:, kinds]
        # Of the streams of shards and of replicas.
        self.sent, self.drain = (
            self.seconds[[SECONDS.index(name) for name in names]]
            for names in (("sent_s", "summed_s"), ("drain_s", "summed_drain_s"))
        )
        self.waits = np.concatenate(waits)[self._turn]
        self.synchronizes = np.array([each.synchronizes for each in courses])[self._course]
        self.begins_s = np.concatenate([np.tile(c.begins_s, count) for c, count in zip(courses, ranks, strict=True)])
        hops = [each.hops for each in courses]
        hop_s, held = (np.concatenate([getattr(hop, name).ravel() for hop in hops]) for name in ("seconds", "held"))
        host_s = np.concatenate([hop.host_s for hop in hops])[self._each(np.cumsum(plans) - plans)]
        self.needs, self.sends = (
            [self._messages(ends, number, messages_of, none, hop_s, host_s) for number in range(max(map(_most, ends)))]
            for ends, none in (
                ([each.needs for each in self._waves], self.messages),
                ([each.sends for each in self._waves], self.messages + 1),
            )
        )
        self.held = np.zeros((self._slots + 1, self.states))  # by slots of messages, the last for none
        for sends in self.sends:
            self.held[sends.slot, self.state] = np.where(sends.hop < 0, 0.0, held[sends.hop])
        # What passes and messages have waited.
        self.waited: dict[str, Floats] = {}
        self.room: dict[str, Floats] = {}
        self.began = np.zeros(len(self.state))
        self.drained = np.zeros((2, 0), dtype=np.bool_)  # whether a pass itself decides when its streams are done
        self.compute = self.host = self.wire = self.summed = self.begins_s

    def _offsets(self, counts: Sequence[int] | Ints) -> tuple[int, Ints]:
        """Return the total of `counts` times plans over all courses, and where the entries of each course begin."""
        ends = np.cumsum(np.asarray(counts) * self.plans)
        return int(ends[-1]), np.concatenate([[0], ends[:-1]])

    def _each(self, of_course: Ints, of_turn: Ints | None = None) -> Ints:
        """Return for each pass an index: of the entry `of_turn`, if there are several in a course, and its plan, where
        the entries of each course begin at `of_course`.
        """
        first: Ints = of_course[self._course]
        if of_turn is not None:
            entry = of_turn[self._turn]
            first = first + (entry if self._one_each else entry * self.plans[self._course])
        return first if self._one_each else first + self._plan

    def _messages(
        self, ends: Sequence[Ends], number: int, messages_of: Ints, none: int, hop_s: Floats, host_s: Floats
    ) -> Messages:
        """Return the messages that are the first (`number` 0) or second of their passes."""
        message, hop, slot = (
            np.concatenate(
                [
                    getattr(each, name)[number]
                    if number < _most(each)
                    else np.full(each.message.shape[1], -1, dtype=np.intp)
                    for each in ends
                ]
            )
            for name in ("message", "hop", "slot")
        )
        there = (message >= 0)[self._turn]
        hops = np.where(there, self._each(self.hops_of, hop), -1)
        return Messages(
            waves=any_of(there, self.starts),
            message=np.where(there, self._each(messages_of, message), none),
            slot=np.where(there, slot[self._turn], self._slots),
            hop=hops,
            seconds=np.where(there, hop_s[hops], 0.0),
            host_s=np.where(there, host_s, 0.0),
            posts_s=np.where(there, host_s, LONG_AGO),
            waited=np.zeros(len(there)),
        )

    def lags(self) -> Floats:
        """Walk all passes, and return how long every message waited and moved."""
        return self._walk(None, noted=False)

    def run(self, lags: Floats | None) -> None:
        """Walk all passes, and note what they wait for; `lags` are a guess at how long messages wait and move."""
        self._walk(lags, noted=True)

    def _walk(self, lags: Floats | None, *, noted: bool) -> Floats:
        walk = WaveWalk(self, lags, noted=noted)
        walk.run()
        self.compute, self.host, (self.wire, self.summed) = walk.compute, walk.host, walk.wires
        self.began, self.drained = walk.began, walk.drained
        self.waited = {"host": walk.began - walk.computed, "dp": walk.dp_waits, "contention": walk.contention}
        self.room = {"host": np.maximum(walk.computed - walk.launched, 0.0), "dp": walk.dp_room}
        walk.took[self.messages :] = LONG_AGO
        return walk.took

    def last_pass(self, state: int) -> int:
        """Return the last pass of a state."""
        return int(np.nonzero(self.state == state)[0][-1])

    def clocks(self) -> list[Clocks]:
        """Return the clocks of every course."""
        bubble, pp = np.zeros(self.states), np.zeros(self.states)
        for needs in self.needs:
            bubble += np.bincount(self.state, needs.waited, self.states)
            pp += np.bincount(self.state, needs.seconds, self.states)
        waits: dict[str, Floats] = {
            part: np.asarray(np.bincount(self.state, waited, self.states), dtype=np.float64)
            for part, waited in self.waited.items()
        }
        waits |= {"host": waits["host"] + self.begins_s, "bubble": bubble, "pp": pp}
        hosted_s, sent_s = (self.seconds[SECONDS.index(name)] for name in ("host_s", "sent_s"))
        hosted_s = sum((messages.host_s for messages in (*self.needs, *self.sends)), hosted_s)
        ends = {name: getattr(self, name) for name in ("host", "compute", "wire", "summed")} | {
            name: np.bincount(self.state, seconds, self.states)
            for name, seconds in (("issued", hosted_s), ("moved", sent_s))
        }
        found, rooms = [], self._least_room()
        for course, plans, start in zip(self.courses, self.plans.tolist(), self.states_of.tolist(), strict=True):
            shape = course.table.schedule.ranks, plans
            mine = slice(start, start + shape[0] * plans)
            of_rank, waited, room = (
                {name: seconds[mine].reshape(shape) for name, seconds in some.items()} for some in (ends, waits, rooms)
            )
            found.append(Clocks(**of_rank, waits=waited, room=room))
        return found

    def _least_room(self) -> dict[str, Floats]:
        """Return for each state the least lead of its host and of its wire in the second half of its passes."""
        order = np.argsort(self.state, kind="stable")
        starts = np.searchsorted(self.state[order], np.arange(self.states + 1))
        passes = np.diff(starts)
        second_half = np.arange(len(order)) >= np.repeat(starts[:-1] + passes // 2, passes)
        return {
            part: np.minimum.reduceat(np.where(second_half, room[order], np.inf), starts[:-1])
            for part, room in self.room.items()
        }


def _pass_values(course: Course) -> tuple[Floats, Ints, NDArray[np.bool_]]:
    """Return the seconds of the distinct passes of a course, shape (SECONDS, passes, plans); the index of each turn's
    pass among them; and whether that turn waits for traffic.
    """
    number_of: dict[int, int] = {}
    numbers = [number_of.setdefault(id(did), len(number_of)) for did in course.passes]
    differing = dict(zip(numbers, course.passes, strict=True))
    values = np.empty((len(SECONDS), len(differing), len(course.begins_s)))
    for number, did in differing.items():
        for row, name in enumerate(SECONDS):
            values[row, number] = getattr(did, name)
    kinds = course.table.turn_kinds
    waits = np.array([did.waits_for_traffic for did in course.passes])
    return values, np.array(numbers, dtype=np.intp)[kinds], waits[kinds]


def _most(ends: Ends) -> int:
    """Return the most messages of a pass."""
    return len(ends.message)
