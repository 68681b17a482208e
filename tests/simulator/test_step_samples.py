"""Operators seen in steps: what they say of operators alone."""

import pytest

from simulator.fitting.step_samples import StandaloneTimes, exact_key, in_step_ratio, standalone_from_steps
from topology.profile.samples import OperatorSample


def product(n: int, seconds: float, **more) -> OperatorSample:
    fields = {"kind": "matmul", "name": "matmul", "shape": {"m": 8, "n": n, "k": 4}, "dtype": "bfloat16"}
    return OperatorSample(**{**fields, "seconds": seconds, "regime": "step", **more})


def alone(*samples: OperatorSample) -> StandaloneTimes:
    return StandaloneTimes(exact={exact_key(s): s.seconds for s in samples}, matmuls={}, attention={})


KNOWN = alone(*(product(n, 1.0 * n, regime="sustained") for n in (1, 2, 3)))


def test_the_in_step_ratio_is_the_median_over_shapes_known_both_ways() -> None:
    steps = [product(1, 0.9), product(2, 1.6), product(3, 4.5), product(7, 70.0)]

    assert in_step_ratio(steps, KNOWN) == pytest.approx(0.9)  # of 0.9, 0.8 and 1.5
    assert in_step_ratio(steps[:2], KNOWN) is None  # two shapes prove nothing


def test_a_shape_that_only_a_step_has_is_known_after_division_by_the_in_step_ratio() -> None:
    steps = [product(1, 0.8), product(2, 1.6), product(3, 2.4), product(7, 4.0)]

    found = standalone_from_steps(steps, KNOWN)

    assert found == {exact_key(product(7, 0.0)): pytest.approx(5.0)}


def test_what_was_measured_alone_stays_and_what_is_no_operator_of_a_plan_is_left_out() -> None:
    steps = [product(n, 0.8 * n) for n in (1, 2, 3)]
    part = OperatorSample(
        kind="attention",
        name="attention",
        shape={"b": 1, "a": 8, "kv": 2, "s": 64, "S": 128, "d": 16},
        dtype="bfloat16",
        seconds=1.0,
        regime="step",
    )
    by_expert = product(9, 1.0, shape={"m": 8, "n": 9, "k": 4, "batch": 4})
    throttled = product(11, 1.0, invalid="thermal slowdown")

    assert standalone_from_steps([*steps, part, by_expert, throttled], KNOWN) == {}


def test_without_operators_measured_alone_a_step_teaches_nothing() -> None:
    assert standalone_from_steps([product(1, 0.8)], alone()) == {}
