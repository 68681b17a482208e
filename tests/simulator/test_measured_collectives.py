"""Interpolation between measured collectives: exact at samples, bent by the model between, fading outside."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.collectives.cost import CollectiveModel
from simulator.collectives.launch_mode import LaunchMode
from simulator.collectives.measured import MeasuredCollectives
from topology.catalog.clusters import cluster
from topology.profile.profile import CollectiveSample
from topology.rates.groups import GroupShape

EIGHT = GroupShape(ranks=8, ranks_per_node=8)
FOUR = GroupShape(ranks=4, ranks_per_node=4)


def line(_op: str, size, _shape):
    """A machine that takes 10 us and 1 us per MB, and jumps by 20 us at 4 MB."""
    return 10e-6 + size * 1e-12 + 20e-6 * (size >= 4e6)


def samples(times, *, launch="queued"):
    return [
        CollectiveSample(op="all_reduce", ranks=8, nodes=1, nbytes=size, time_s=time, launch=launch)
        for size, time in times.items()
    ]


def test_a_machine_twice_as_slow_is_found_from_two_points():
    truth = lambda size: 2 * line("", np.asarray(size, dtype=float), None)  # noqa: E731 - one line is clearer here
    measured = MeasuredCollectives(samples({10_000: float(truth(10_000)), 10**8: float(truth(10**8))}))
    sizes = np.array([1e5, 1e6, 3.9e6, 4.1e6, 2e7])
    times, known = measured.blend("all_reduce", sizes, EIGHT, line)
    assert times == pytest.approx(truth(sizes), rel=0.01)  # the jump at 4 MB is the model's
    assert known.all()


def test_between_neighbours():
    measured = MeasuredCollectives(samples({10**6: 50e-6, 10**7: 51e-6}))
    times, _ = measured.blend("all_reduce", np.logspace(6.01, 6.99, 20), EIGHT, line)
    assert np.all((times >= 50e-6) & (times <= 51e-6))


def test_exact_at_a_sample_even_when_the_model_is_far_off():
    measured = MeasuredCollectives(samples({10**6: 300e-6}))
    times, _ = measured.blend("all_reduce", np.array([1e6]), EIGHT, line)
    assert times == pytest.approx([300e-6], rel=0.01)


def test_a_slow_start_says_little_about_bandwidth():
    measured = MeasuredCollectives(samples({8: 55e-6}))  # 5.5 times the model
    times, known = measured.blend("all_reduce", np.array([8.0, 8e9]), EIGHT, line)
    assert times[0] == pytest.approx(55e-6, rel=0.01)
    assert times[1] < 1.2 * line("", 8e9, None)
    assert known.tolist() == [True, False]


def test_other_groups_and_ops_get_part_of_the_correction():
    size = np.array([1e6])
    measured = MeasuredCollectives(samples({10**6: 2 * float(line("", 1e6, None))}))
    ratios = [
        float(measured.blend(op, size, shape, line)[0][0] / line("", 1e6, None))
        for op, shape in (("all_reduce", EIGHT), ("all_reduce", FOUR), ("all_gather", FOUR))
    ]
    assert ratios[0] > ratios[1] > ratios[2] > 1.0
    assert not measured.blend("all_gather", size, FOUR, line)[1].any()


def test_nothing_measured_changes_nothing():
    times, known = MeasuredCollectives([]).blend("all_reduce", np.array([1e6]), EIGHT, line)
    assert times == pytest.approx(line("", np.array([1e6]), None))
    assert not known.any()


def test_host_bound_samples_are_not_device_times():
    hidden = MeasuredCollectives(samples({1024: 17.6e-6}, launch="eager"))
    times, known = hidden.blend("all_reduce", np.array([1024.0]), EIGHT, line)
    assert times == pytest.approx(line("", np.array([1024.0]), None))
    assert not known.any()
    waited = MeasuredCollectives(samples({10**7: 122e-6}, launch="isolated"))
    assert waited.blend("all_reduce", np.array([1e7]), EIGHT, line)[0] == pytest.approx([100e-6], rel=0.01)


def test_repeated_samples_count_as_their_median():
    rows = [CollectiveSample(op="all_reduce", ranks=8, nodes=1, nbytes=10**6, time_s=t) for t in (40e-6, 41e-6, 900e-6)]
    times, _ = MeasuredCollectives(rows).blend("all_reduce", np.array([1e6]), EIGHT, line)
    assert times == pytest.approx([41e-6], rel=0.02)


def test_a_slow_host_is_told_from_a_slow_network() -> None:
    """Eager calls of 30 us alongside replayed graphs of 10 us: the host takes 30 us a call, the device 10."""
    sizes = [2**k for k in range(10, 21, 2)]
    samples = [
        CollectiveSample(op="all_gather", ranks=4, nodes=1, nbytes=size, time_s=time, launch=launch)
        for size in sizes
        for launch, time in (("graph", 10e-6), ("eager", 30e-6))
    ]
    model = CollectiveModel(cluster("h200x4"), measured=MeasuredCollectives(samples))
    shape = GroupShape(ranks=4, ranks_per_node=4)

    assert model.time_s("all_gather", 2**15, shape, launch=LaunchMode.GRAPH) == pytest.approx(10e-6, rel=0.15)
    assert model.time_s("all_gather", 2**15, shape, launch=LaunchMode.EAGER) == pytest.approx(30e-6)
