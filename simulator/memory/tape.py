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
    NEEDED = 3  # the gradient in `slot` is needed for that of a weight


Event = tuple[Act, int, int]  # (act, slot of a tensor or of a weight, bytes)


@dataclass(slots=True)
class Tape:
    """The live tensors of a block while its operators run. `held`: the slots of those that backward needs."""

    events: list[Event] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
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
            self.events.append((Act.FREE, slot, self.live.pop(slot)))
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

    def free_rest(self, keep: set[int]) -> None:
        for slot in [s for s in self.live if s not in self.held and s not in keep]:
            self.free(slot)

    def take_events(self) -> tuple[Event, ...]:
        events, self.events = tuple(self.events), []
        return events
