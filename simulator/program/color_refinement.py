"""Tools of colour refinement: numbering equal things, and the links that transfers share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.program.cost_model import CostModel, LinkUse

Ints = NDArray[np.int64]


def columns(first: Ints, *more: Ints) -> Ints:
    """Return arrays of one or two dimensions as the columns of one; an array of length 1 is repeated."""
    wide = [np.broadcast_to(part, (len(first), *part.shape[1:])) for part in (first, *more)]
    return np.column_stack(wide)


def number_rows(rows: Ints) -> Ints:
    """Return a number for each row, equal for equal rows, from 0 without gaps, in the order of the rows."""
    # As bytes, highest byte first and with negative numbers below: rows of any width then compare as byte strings.
    text, width = (rows ^ np.iinfo(np.int64).min).astype(">i8").tobytes(), 8 * rows.shape[1]
    keys = [text[at : at + width] for at in range(0, len(text), width)]
    number = {key: index for index, key in enumerate(sorted(set(keys)))}
    return np.array([number[key] for key in keys], dtype=np.int64)


def number_values(values: Sequence[Hashable], known: dict[Hashable, int] | None = None) -> Ints:
    """Return a number for each value by first appearance; `known` keeps the numbers between calls."""
    numbers = {} if known is None else known
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def number_bags(owner: Ints, token: Ints, owners: int) -> Ints:
    """Return a number for each of `owners`, equal for owners with equal multisets of tokens."""
    order = np.lexsort((token, owner))
    owner, token = owner[order], token[order]
    sizes = np.bincount(owner, minlength=owners)
    starts = np.cumsum(sizes) - sizes
    bags = np.full((owners, max(1, int(sizes.max(initial=0)))), -1, dtype=np.int64)
    bags[owner, np.arange(len(owner)) - starts[owner]] = token
    return number_rows(bags)


class SharedLinks:
    """The use of links by transfers: the third part of the refinement, besides ranks and transfers. Costs nothing if no
    link is shared.
    """

    def __init__(self) -> None:
        self.names: list[Hashable] = []
        self._index: dict[Hashable, int] = {}
        self._shares: dict[float, int] = {}
        self._uses: dict[Hashable, _Uses] = {}
        self._capacity: list[Hashable] = []
        self._known_first: tuple[Ints, Ints] | None = None

    def add(self, key: Hashable, routes: Sequence[Sequence[LinkUse]]) -> None:
        """State which links each instance of transfer `key` crosses, with its share of each."""
        index, shares = self._index, self._shares
        instances: list[int] = []
        links: list[int] = []
        numbers: list[int] = []
        for instance, route in enumerate(routes):
            crossed = [index.setdefault(use.link, len(index)) for use in route]
            parts = [use.share for use in route]
            if len(set(crossed)) < len(crossed):
                total: dict[int, float] = {}
                for link, share in zip(crossed, parts, strict=True):
                    total[link] = total.get(link, 0.0) + share
                crossed, parts = list(total), list(total.values())
            instances += [instance] * len(crossed)
            links += crossed
            numbers += [shares.setdefault(share, len(shares)) for share in parts]
        if instances:
            columns_of = (np.array(part, dtype=np.int64) for part in (instances, links, numbers))
            self._uses[key] = _Uses(len(routes), *columns_of)

    def close(self, costs: CostModel) -> None:
        self.names = list(self._index)
        self._capacity = [costs.link_bytes_per_s(name) for name in self.names]

    def first_colour(self) -> Ints:
        return number_values(self._capacity)

    def signature(self, key: Hashable, colour: Ints) -> Ints:
        """Return a number for each instance of transfer `key`, equal for equal link classes and shares."""
        if key not in self._uses:
            return np.zeros(1, dtype=np.int64)
        uses = self._uses[key]
        return number_bags(uses.instance, colour[uses.link] * len(self._shares) + uses.share, uses.instances)

    def refine(self, colour: Ints, transfers: Iterable[tuple[Hashable, Ints]]) -> Ints:
        """Split link classes by the classes of the transfers that cross them."""
        if not self.names:
            return colour
        rows = []
        for number, (key, transfer_colour) in enumerate(transfers):
            if key in self._uses:
                uses = self._uses[key]
                rows.append(columns(uses.link, np.array([number]), transfer_colour[uses.instance], uses.share))
        table = np.concatenate(rows)
        crossed = number_bags(table[:, 0], number_rows(table[:, 1:]), len(self.names))
        return number_rows(columns(colour, crossed))

    def samples(self, colour: Ints) -> tuple[Hashable, ...]:
        """Return the first link of each class."""
        return tuple(self.names[link] for link in self._first(colour).tolist())

    def total(self, key: Hashable, instances: Ints, colour: Ints) -> tuple[tuple[tuple[int, float], ...], float]:
        """Return the load of all `instances` of a transfer on one link of each class, as ((class, share), ...), and the
        largest share of one instance on one link.
        """
        if key not in self._uses:
            return (), 0.0
        uses = self._uses[key]
        chosen = np.zeros(uses.instances, dtype=bool)
        chosen[instances] = True
        mine = chosen[uses.instance]
        values = np.array(list(self._shares))
        largest = float(values[uses.share[mine]].max(initial=0.0))
        here = mine & (uses.link == self._first(colour)[colour[uses.link]])
        total: dict[int, float] = {}
        for link, share in zip(colour[uses.link[here]].tolist(), values[uses.share[here]].tolist(), strict=True):
            total[link] = total.get(link, 0.0) + share
        return tuple(sorted(total.items())), largest

    def _first(self, colour: Ints) -> Ints:
        if self._known_first is None or self._known_first[0] is not colour:
            self._known_first = (colour, np.unique(colour, return_index=True)[1])
        return self._known_first[1]


@dataclass(frozen=True, slots=True)
class _Uses:
    """Links that the `instances` of one transfer cross: parallel columns with one entry for each link and instance."""

    instances: int
    instance: Ints
    link: Ints
    share: Ints  # index of the share, not its value
