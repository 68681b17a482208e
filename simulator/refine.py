"""Tools of colour refinement: numbering equal things, and the links that transfers share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.costs import CostModel, LinkUse

Ints = NDArray[np.int64]


def columns(first: Ints, *more: Ints) -> Ints:
    """Return arrays of one or two dimensions side by side; an array of length 1 is repeated down."""
    wide = [np.broadcast_to(part, (len(first), *part.shape[1:])) for part in (first, *more)]
    return np.column_stack(wide)


def number_rows(rows: Ints) -> Ints:
    """Return a number for each row, equal for equal rows, from 0 without gaps."""
    key = np.unique(rows[:, 0], return_inverse=True)[1]
    # One column after another: sorting plain integers is much faster than sorting rows.
    for column in rows.T[1:]:
        other = np.unique(column, return_inverse=True)[1]
        key = np.unique(key * (int(other.max(initial=0)) + 1) + other, return_inverse=True)[1]
    return key


def number_values(values: Sequence[Hashable], known: dict[Hashable, int] | None = None) -> Ints:
    """Return a number for each value by first appearance; `known` carries numbers over from call to call."""
    numbers = {} if known is None else known
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


class SharedLinks:
    """Who crosses which links: the third side of the refinement, beside ranks and transfers. Free if nobody does."""

    def __init__(self) -> None:
        self.names: list[Hashable] = []
        self._index: dict[Hashable, int] = {}
        self._uses: dict[Hashable, list[list[tuple[int, float]]]] = {}  # by transfer key, then instance
        self._capacity: list[Hashable] = []

    def add(self, key: Hashable, routes: Sequence[Sequence[LinkUse]]) -> None:
        """Say which links each instance of transfer `key` crosses, and with what share."""
        instances = []
        for route in routes:
            total: dict[int, float] = {}
            for use in route:
                link = self._index.setdefault(use.link, len(self._index))
                total[link] = total.get(link, 0.0) + use.share
            instances.append(list(total.items()))
        if any(instances):
            self._uses[key] = instances

    def close(self, costs: CostModel) -> None:
        self.names = list(self._index)
        self._capacity = [costs.link_bytes_per_s(name) for name in self.names]

    def first_colour(self) -> Ints:
        return number_values(self._capacity)

    def signature(self, key: Hashable, colour: Ints) -> Ints:
        """Return a number per instance of transfer `key` that tells apart the link classes and shares it uses."""
        if key not in self._uses:
            return np.zeros(1, dtype=np.int64)
        return number_values(
            [tuple(sorted((int(colour[link]), share) for link, share in uses)) for uses in self._uses[key]]
        )

    def refine(self, colour: Ints, transfers: Iterable[tuple[Hashable, Ints]]) -> Ints:
        """Split link classes by the classes of the transfers that cross them."""
        if not self.names:
            return colour
        crossed: list[dict[tuple[int, int, float], int]] = [{} for _ in self.names]
        for number, (key, transfer_colour) in enumerate(transfers):
            for instance, uses in enumerate(self._uses.get(key, [])):
                for link, share in uses:
                    seen = (number, int(transfer_colour[instance]), share)
                    crossed[link][seen] = crossed[link].get(seen, 0) + 1
        return number_values([(int(colour[link]), *sorted(seen.items())) for link, seen in enumerate(crossed)])

    def samples(self, colour: Ints) -> tuple[Hashable, ...]:
        """Return the first link of each class."""
        return tuple(self.names[link] for link in self._first(colour))

    def total(self, key: Hashable, instances: Ints, colour: Ints) -> tuple[tuple[tuple[int, float], ...], float]:
        """Return the share of `instances` of a transfer together on one link of each class, as ((class, share), ...),
        and the largest share of a single one on a single link.
        """
        if key not in self._uses:
            return (), 0.0
        first = self._first(colour)
        total: dict[int, float] = {}
        largest = 0.0
        for instance in instances.tolist():
            for link, share in self._uses[key][instance]:
                largest = max(largest, share)
                if link == first[colour[link]]:
                    total[int(colour[link])] = total.get(int(colour[link]), 0.0) + share
        return tuple(sorted(total.items())), largest

    @staticmethod
    def _first(colour: Ints) -> list[int]:
        return [int(link) for link in np.unique(colour, return_index=True)[1]]
