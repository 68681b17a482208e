"""Contention: work in flight shares SMs, memory bandwidth and links, and its remaining time changes with every start
and end.

Communication kernels are resident: they hold their SMs from arrival to end, also while they wait for partners, and
compute kernels of that GPU share the SMs that are left, max-min fair. Every activity asks for bytes per second of HBM
on each of its ranks and of the links it crosses; where the sum exceeds a capacity, rates are max-min fair
(`simulator.engine.contention`), and an activity advances at the speed of its tightest resource. Speeds are constant
between two events; whenever something starts or ends, the work left of those affected is re-timed.

Not modelled: wave quantisation of a kernel on fewer SMs, L2 interference, and clocks that fall when both are busy; for
a product that runs next to tensor-parallel transfers, `async_overlap.PRODUCT_SLOWDOWN` and the rates of `overlap_modes`
include them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import simpy

# A resource counts as full only beyond rounding, so that flows which exactly fill a link keep their full speed.
_ROUNDING = 1 + 1e-9


@dataclass(slots=True, eq=False)
class Activity:
    """Work in flight that takes `seconds` alone. `gpu` is the GPU whose SMs it shares (None: it holds its SMs, or uses
    none).

    `rate` is the quantity that fairness compares: its demand on its busiest link, or on HBM if it crosses no link.
    """

    seconds: float
    uses: tuple[tuple[Hashable, float], ...] = ()
    rate: float = 0.0
    gpu: int | None = None
    sms: float = 0.0
    done: simpy.Event | None = None
    left_s: float = 0.0
    speed: float = 1.0
    since_s: float = 0.0
    timer: int = 0  # number of its valid timer; earlier ones are ignored


@dataclass(slots=True)
class _Resource:
    capacity: float
    watch: Callable[[float], None] | None = None
    load: float = 0.0  # total demand if every user ran at full speed
    users: dict[Activity, float] = field(default_factory=dict)
    full_above: float = field(init=False)

    def __post_init__(self) -> None:
        self.full_above = self.capacity * _ROUNDING


@dataclass(slots=True)
class _Sms:
    """A GPU's SMs: some are held by transfers, and copies take shares of what these leave."""

    total: float
    held: float = 0.0
    taken: list[float] = field(default_factory=list)
    kernels: dict[Activity, None] = field(default_factory=dict)
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.share()

    def share(self) -> None:
        """Find what is left for kernels, after a change of what is held or taken."""
        self.left = max(0.0, self.total - self.held) * prod([1.0 - share for share in self.taken])

    @property
    def full(self) -> bool:
        return bool(self.kernels) and sum([k.sms for k in self.kernels]) > self.left * _ROUNDING


class Contention:
    """All resources of a machine, and what is in flight on them. Work that shares nothing costs two events."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._resources: dict[Hashable, _Resource] = {}
        self._sms: dict[int, _Sms] = {}
        self._watched = False  # whether any resource is

    def add_resource(self, key: Hashable, capacity: float, watch: Callable[[float], None] | None = None) -> None:
        """Add a resource; `watch(used_per_s)` is called whenever its use changes."""
        self._resources[key] = _Resource(capacity, watch)
        self._watched |= watch is not None

    def add_gpu(self, gpu: int, sms: float) -> None:
        self._sms[gpu] = _Sms(sms)

    def start(self, activity: Activity) -> simpy.Event:
        """Begin `activity`; return the event of its end."""
        activity.done = self._env.event()
        activity.left_s, activity.since_s = activity.seconds, self._env.now
        for key, amount in activity.uses:
            resource = self._resources[key]
            resource.users[activity] = amount
            resource.load += amount
        if activity.gpu is not None:
            self._sms[activity.gpu].kernels[activity] = None
        if self._meets_others(activity):
            self._share(self._affected([activity]))
        else:
            self._set_timer(activity)
            self._report((activity,))
        return activity.done

    def hold(self, gpu: int, sms: float) -> None:
        """Make `sms` of a GPU unavailable to its compute kernels (negative: give them back)."""
        pool = self._sms[gpu]
        was_full = pool.full
        pool.held += sms
        pool.share()
        self._have_changed(pool, was_full=was_full)

    def take(self, gpu: int, share: float) -> Callable[[object], None]:
        """Take a share of what a GPU's compute kernels have left from them; return what gives it back."""
        pool = self._sms[gpu]
        was_full = pool.full
        pool.taken.append(share)
        pool.share()
        self._have_changed(pool, was_full=was_full)

        def give_back(_: object) -> None:
            was_full = pool.full
            pool.taken.remove(share)
            pool.share()
            self._have_changed(pool, was_full=was_full)

        return give_back

    def _have_changed(self, pool: _Sms, *, was_full: bool) -> None:
        if pool.kernels and (was_full or pool.full):
            self._share(self._affected(pool.kernels))

    def starved(self) -> list[int]:
        """Return the GPUs whose compute kernels stand still because resident transfers hold every SM."""
        return [gpu for gpu, pool in self._sms.items() if pool.kernels and pool.held >= pool.total]

    # --- who is affected ----------------------------------------------------------------------------------------

    def _meets_others(self, activity: Activity) -> bool:
        for key, _ in activity.uses:
            resource = self._resources[key]
            if resource.load > resource.full_above:
                return True
        return activity.gpu is not None and self._sms[activity.gpu].full

    def _affected(self, first: list[Activity] | dict[Activity, None]) -> list[Activity]:
        """Return `first` and all activities that share a full resource with them, directly or through others.

        A resource that can carry all its users at full speed limits none of them, so the set does not spread through
        it.
        """
        found = dict.fromkeys(first)
        frontier = list(found)
        while frontier:
            activity = frontier.pop()
            neighbours: list[Activity] = []
            for key, _ in activity.uses:
                resource = self._resources[key]
                if resource.load > resource.full_above:
                    neighbours += resource.users
            if activity.gpu is not None and self._sms[activity.gpu].full:
                neighbours += self._sms[activity.gpu].kernels
            for other in neighbours:
                if other not in found:
                    found[other] = None
                    frontier.append(other)
        return list(found)

    # --- sharing and timers -------------------------------------------------------------------------------------

    def _share(self, activities: list[Activity]) -> None:
        """Give each of `activities` its fair speed from this moment."""
        caps = dict.fromkeys(activities, 1.0)
        for gpu in dict.fromkeys(a.gpu for a in activities if a.gpu is not None):
            pool = self._sms[gpu]
            kernels = list(pool.kernels)
            if pool.full:
                parts = water_fill([kernel.sms for kernel in kernels], pool.left)
                for kernel, part in zip(kernels, parts, strict=True):
                    caps[kernel] = part / kernel.sms if kernel.sms else 1.0
        shared = {key: self._resources[key] for activity in activities for key, _ in activity.uses}
        if any(resource.load > resource.full_above for resource in shared.values()):
            flows = [Flow(a.rate, a.uses, caps[a]) for a in activities]
            capacity = {key: resource.capacity for key, resource in shared.items()}
            speeds = max_min_speeds(flows, capacity)
        else:
            speeds = list(caps.values())
        for activity, speed in zip(activities, speeds, strict=True):
            if activity.timer == 0 or speed != activity.speed:
                now = self._env.now
                activity.left_s = max(0.0, activity.left_s - (now - activity.since_s) * activity.speed)
                activity.since_s, activity.speed = now, speed
                self._set_timer(activity)
        self._report(activities)

    def _set_timer(self, activity: Activity) -> None:
        activity.timer += 1
        if activity.speed > 0.0:
            timer = self._env.timeout(activity.left_s / activity.speed)
            timer.callbacks.append(partial(self._on_timer, activity, activity.timer))

    def _on_timer(self, activity: Activity, timer: int, _: simpy.Event) -> None:
        if timer != activity.timer or activity.done is None:
            return  # re-timed since
        contended = self._meets_others(activity)
        others = self._affected([activity]) if contended else []
        for key, amount in activity.uses:
            resource = self._resources[key]
            del resource.users[activity]
            resource.load = resource.load - amount if resource.users else 0.0
        if activity.gpu is not None:
            del self._sms[activity.gpu].kernels[activity]
        if contended:
            self._share([other for other in others if other is not activity])
        self._report((activity,))
        activity.done.succeed()

    def _report(self, activities: Sequence[Activity]) -> None:
        if not self._watched:
            return
        for activity in activities:
            for key, _ in activity.uses:
                resource = self._resources[key]
                if resource.watch is not None:
                    resource.watch(sum(user.speed * amount for user, amount in resource.users.items()))


# Max-min fair shares of resources that several flows want more of than there is.
#
# An allocation is max-min fair when nobody's rate can grow without taking from someone who has no more (Bertsekas and
# Gallager, Data Networks, 2nd ed. 1992, section 6.5.2). It is what per-flow fair queueing and, roughly, congestion
# control converge to, and it is unique, so the answer does not depend on the order of the flows.


@dataclass(frozen=True, slots=True)
class Flow:
    """A flow that would run at `rate` alone and would then use `amount` of each resource in `uses`.

    Fairness is counted in `rate`. `cap` is the fraction of `rate` it can reach for reasons outside the resources.
    """

    rate: float
    uses: tuple[tuple[Hashable, float], ...]
    cap: float = 1.0


def max_min_speeds(flows: Sequence[Flow], capacity: Mapping[Hashable, float]) -> list[float]:
    """Return the fraction of its `rate` that each flow runs at, between 0 and its cap.

    Progressive filling: all rates rise together; a flow stops at its cap or when a resource it uses is full. Takes
    O(rounds * uses) time with at most one round per flow. Flows with `rate` 0 compete for nothing and get their cap.
    """
    speeds = [flow.cap for flow in flows]
    rising = {i: flow for i, flow in enumerate(flows) if flow.rate > 0.0 and flow.cap > 0.0}
    left = {r: capacity[r] for flow in rising.values() for r, _ in flow.uses}
    while rising:
        # What a resource loses for each unit by which the common level rises.
        slope = dict.fromkeys(left, 0.0)
        for flow in rising.values():
            for r, amount in flow.uses:
                slope[r] += amount / flow.rate
        full_at = {r: left[r] / slope[r] for r in left if slope[r] > 0.0}
        level = min([flow.rate * flow.cap for flow in rising.values()] + list(full_at.values()))
        # Flows on any resource that fills at this level stop, and so do flows that reach their cap. The tolerance makes
        # ties stop in the same round; otherwise rounding errors would cost a second one.
        edge = level * (1 + 1e-12)
        stopped = [
            i
            for i, flow in rising.items()
            if flow.rate * flow.cap <= edge or any(full_at.get(r, edge + 1) <= edge for r, _ in flow.uses)
        ]
        for i in stopped:
            flow = rising.pop(i)
            speeds[i] = level / flow.rate
            for r, amount in flow.uses:
                left[r] = max(0.0, left[r] - amount * speeds[i])
    return speeds


def water_fill(wants: Sequence[float], supply: float) -> list[float]:
    """Return max-min fair shares of one `supply`: each gets its demand or the common level, whichever is less."""
    parts = [0.0] * len(wants)
    waiting = sorted(range(len(wants)), key=lambda i: (wants[i], i))
    for position, i in enumerate(waiting):
        parts[i] = min(wants[i], supply / (len(waiting) - position))
        supply -= parts[i]
    return parts
