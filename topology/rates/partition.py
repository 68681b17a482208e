"""Split the GPUs of a node into equal groups so that the slowest group is as fast as possible.

Exact for up to `MAX_EXACT_ITEMS` GPUs, by dynamic programming over subsets; greedy beyond, and in the order of the GPUs
beyond `MAX_GREEDY_ITEMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeAlias

Score: TypeAlias = tuple[float, float]  # (rate, tie breaker): more is better in both
Split: TypeAlias = tuple[Score, tuple[tuple[int, ...], ...]]
MAX_EXACT_ITEMS = 16  # beyond, groups are grown one GPU at a time
MAX_GREEDY_ITEMS = 32  # beyond, neighbours in number are taken to be neighbours: scoring all groups takes minutes


def best_partition(
    items: Sequence[int], size: int, groups: int, score: Callable[[tuple[int, ...]], Score]
) -> tuple[tuple[int, ...], ...]:
    """Return `groups` disjoint groups of `size` of the `items` that maximise the lowest rate, then the sum of scores.

    `score(group)` gives (rate, tie breaker). Items may be left over. Among equals the first in order of `items` wins,
    so the result is deterministic. Exact up to `MAX_EXACT_ITEMS`: the first pass finds the best lowest rate, the
    second the best sum among groups that reach it. Raises ValueError when there are too few items.
    """
    if groups * size > len(items) or size < 1:
        raise ValueError(f"{groups} groups of {size} do not fit in {len(items)} items")
    if size == 1 or len(items) > MAX_GREEDY_ITEMS or size == len(items):
        return tuple(tuple(items[at : at + size]) for at in range(0, groups * size, size))
    if len(items) <= MAX_EXACT_ITEMS:
        scores = {group: score(group) for group in combinations(items, size)}
        worst = _best_worst(tuple(items), size, groups, {group: s[0] for group, s in scores.items()})
        return _best_sum(tuple(items), size, groups, {g: s for g, s in scores.items() if s[0] >= worst})
    return _greedy(items, size, groups, score)


def _best_worst(items: tuple[int, ...], size: int, groups: int, rate: dict[tuple[int, ...], float]) -> float:
    memo: dict[tuple[tuple[int, ...], int], float] = {}

    def solve(left: tuple[int, ...], need: int) -> float:
        if need == 0:
            return float("inf")
        if len(left) < need * size:
            return float("-inf")
        key = (left, need)
        if key not in memo:
            first, rest = left[0], left[1:]
            best = solve(rest, need) if len(rest) >= need * size else float("-inf")
            for others in combinations(rest, size - 1):
                own = rate[first, *others]
                if own > best:  # the rest can only lower it
                    best = max(best, min(own, solve(tuple(i for i in rest if i not in others), need - 1)))
            memo[key] = best
        return memo[key]

    return solve(items, groups)


def _best_sum(
    items: tuple[int, ...], size: int, groups: int, score: dict[tuple[int, ...], Score]
) -> tuple[tuple[int, ...], ...]:
    memo: dict[tuple[tuple[int, ...], int], Split | None] = {}

    def solve(left: tuple[int, ...], need: int) -> Split | None:
        if need == 0:
            return (0.0, 0.0), ()
        if len(left) < need * size:
            return None
        key = (left, need)
        if key in memo:
            return memo[key]
        first, rest = left[0], left[1:]
        best: Split | None = None
        for others in combinations(rest, size - 1):
            group = (first, *others)
            own = score.get(group)
            if own is None:
                continue
            tail = solve(tuple(i for i in rest if i not in others), need - 1)
            if tail is None:
                continue
            total = (own[0] + tail[0][0], own[1] + tail[0][1])
            if best is None or total > best[0]:
                best = total, (group, *tail[1])
        without = solve(rest, need)
        if without is not None and (best is None or without[0] > best[0]):
            best = without
        memo[key] = best
        return best

    found = solve(items, groups)
    if found is None:
        raise ValueError("no split reaches the best worst rate")  # _best_worst found one, so this cannot be
    return found[1]


def _greedy(
    items: Sequence[int], size: int, groups: int, score: Callable[[tuple[int, ...]], Score]
) -> tuple[tuple[int, ...], ...]:
    """Return groups grown one GPU at a time, for more items than can be tried exhaustively."""
    left, result = list(items), []
    for _ in range(groups):
        group = [left.pop(0)]
        while len(group) < size:
            best = max(left, key=lambda item: (score((*group, item)), -left.index(item)))
            group.append(best)
            left.remove(best)
        result.append(tuple(sorted(group)))
    return tuple(result)
