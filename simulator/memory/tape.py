"""The live tensors of a block while its operators run, and the events that come of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

NOTHING = 0  # the slot of no tensor


class Act(IntEnum):
    ALLOCATE = 0
    FREE = 1
    GRADIENT = 2  # the gradient of the weight `slot` has been computed
    FREE_LATE = 3  # the host frees a tensor that NCCL's sends and receives use on a stream of their own


Event = tuple[Act, int, int]  # (act, slot of a tensor or of a weight, bytes)


@dataclass(slots=True)
class Tape:
    """The live tensors of a block while its operators run. `held`: the slots of those that backward needs."""

    events: list[Event] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)  # slots of tensors that are sent or received
    saved_by: dict[int, list[int]] = field(default_factory=dict)  # index of an operator -> slots
    slots: int = 0

    def given(self, nbytes: int) -> int:
        """Return the slot of a tensor that exists already."""
        self.slots += 1
        self.live[self.slots] = nbytes
        return self.slots

    def allocate(self, nbytes: int) -> int:
        slot = self.given(nbytes)
        self.events.append((Act.ALLOCATE, slot, nbytes))
        return slot

    def free(self, slot: int) -> None:
        if slot in self.live:
            self.events.append((Act.FREE_LATE if slot in self.sent else Act.FREE, slot, self.live.pop(slot)))
            self.held.discard(slot)

    def claim(self, nbytes: int, other: int = NOTHING) -> int:
        """Hold a tensor of `nbytes`: the earliest live one that is not held and not `other`, else a new one."""
        free = (slot for slot, size in self.live.items() if size == nbytes and slot not in self.held)
        found = next((slot for slot in free if slot != other), None)
        slot = self.allocate(nbytes) if found is None else found
        self.held.add(slot)
        return slot

    def free_read(self, sizes: Iterable[int], among: Sequence[int], keep: set[int]) -> None:
        """Free tensors that were read: those in `among` of the given sizes that are not held."""
        wanted = list(sizes)
        for slot in among:
            if slot in self.live and slot not in self.held and slot not in keep and self.live[slot] in wanted:
                wanted.remove(self.live[slot])
                self.free(slot)

    def send(self, whole_bytes: int, ranks: int, gathered: Sequence[int], before: Sequence[int]) -> None:
        """Shards of `whole_bytes` go around a ring of ranks: a rank's own one to the tensor `gathered`; or, if that is
        empty, sums of them, which take two shards for each of the other ranks.
        """
        size = whole_bytes // ranks if gathered else whole_bytes
        self.sent |= {*gathered, *[slot for slot in before if self.live.get(slot) == size][-1:]}
        more = 0 if gathered else 2 * (ranks - 1) * (whole_bytes // ranks) - whole_bytes
        if more > 0:
            slot = self.allocate(more)
            self.sent.add(slot)
            self.free(slot)

    def free_rest(self, keep: set[int]) -> None:
        for slot in [s for s in self.live if s not in self.held and s not in keep]:
            self.free(slot)

    def take_events(self) -> tuple[Event, ...]:
        events, self.events = tuple(self.events), []
        return events
