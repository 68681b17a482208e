"""The exact split against trying everything."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.rates.partition import best_partition


def every_split(items, size, groups):
    if groups == 0:
        yield ()
        return
    for group in combinations(items, size):
        rest = [item for item in items if item not in group and item > group[0]]
        for tail in every_split(rest, size, groups - 1):
            yield (group, *tail)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_best_worst_then_best_sum(data):
    count = data.draw(st.integers(2, 7))
    size = data.draw(st.integers(2, min(3, count)))
    groups = data.draw(st.integers(1, count // size))
    values = {
        group: (float(data.draw(st.integers(0, 3))), float(data.draw(st.integers(-2, 0))))
        for group in combinations(range(count), size)
    }
    got = best_partition(range(count), size, groups, values.__getitem__)

    def quality(split):
        worst = min(values[group][0] for group in split)
        return worst, sum(values[group][0] for group in split), sum(values[group][1] for group in split)

    assert len(got) == groups
    assert len({item for group in got for item in group}) == groups * size
    assert quality(got) == max(quality(split) for split in every_split(list(range(count)), size, groups))


def test_first_among_equals_and_leftovers():
    assert best_partition(range(8), 4, 2, lambda _: (1.0, 0.0)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert best_partition(range(5), 1, 3, lambda _: (1.0, 0.0)) == ((0,), (1,), (2,))
    assert best_partition(range(3), 2, 1, lambda group: (float(0 not in group), 0.0)) == ((1, 2),)


def test_large_nodes_are_split_group_by_group():
    got = best_partition(range(20), 4, 5, lambda group: (float(max(group) - min(group) < 4), 0.0))
    assert sorted(item for group in got for item in group) == list(range(20))


def test_too_few_items():
    with pytest.raises(ValueError, match="do not fit"):
        best_partition(range(3), 2, 2, lambda _: (1.0, 0.0))
