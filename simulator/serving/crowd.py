"""Many more clients than a deployment serves at once: waiting clients lengthen queues and slow nothing else down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from simulator.serving.latency import Distribution, Latency

FIRST = 2048  # clients simulated first; four times as many follow until a deployment is saturated
MOST = 1 << 13  # from so many on only some clients are simulated: a round of all takes seconds for each deployment
SATURATED = 0.01  # saturated if twice the clients raise throughput by at most this share


def latency_of(clients: int, simulated: Callable[[int], Latency]) -> Latency:
    """Return the figures of a closed loop with many clients; `simulated` gives those of fewer.

    A saturated deployment answers no faster with more clients, so each further client waits for one more answer
    (Little's law): times grow linearly, as do counts of requests. Doubling the clients shows the slope.
    """
    for most in _sizes(clients):
        half, whole = simulated(most // 2), simulated(most)
        if whole.output_tokens_per_s <= half.output_tokens_per_s * (1 + SATURATED):
            return _continued(half, whole, most, clients)
    return simulated(clients)


def _sizes(clients: int) -> Iterator[int]:
    most = FIRST
    while clients >= MOST and most <= clients // 4:
        yield most
        most *= 4


def _continued(half: Latency, whole: Latency, most: int, clients: int) -> Latency:
    """Return the figures of `clients` on the line through those of `most` clients and those of half as many."""
    further = (clients - most) / (most - most // 2)

    def on(low: float, high: float) -> float:
        return max(0.0, high + (high - low) * further)

    def all_of(low: Distribution, high: Distribution) -> Distribution:
        return Distribution(**{name: on(getattr(low, name), getattr(high, name)) for name in Distribution.__slots__})

    return replace(
        whole,
        ttft_s=all_of(half.ttft_s, whole.ttft_s),
        e2e_s=all_of(half.e2e_s, whole.e2e_s),
        goodput=min(1.0, on(half.goodput * (most // 2), whole.goodput * most) / clients),
        preempted=round(on(half.preempted, whole.preempted)),
    )
