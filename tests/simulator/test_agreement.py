"""Closed form and simulation tell the same step: forty drawn plans of every kind, micro batches few and many."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulator.agreement_plans import draw_plans, tell

PLANS = draw_plans(40, seed=1, most_gpus=16)


@pytest.fixture(scope="module")
def told():
    return [(drawn.kind, tell(drawn, spans=False)) for drawn in PLANS]


def test_steps_take_as_long(told) -> None:
    errors = np.array([abs(both.time_error) for _, both in told])

    assert np.mean(errors < 0.03) >= 0.95, sorted((abs(both.time_error), kind) for kind, both in told)[-3:]
    assert errors.max() < 0.10


def test_peaks_hold_as_much(told) -> None:
    errors = np.array([abs(both.memory_error) for _, both in told])

    assert np.mean(errors < 0.03) >= 0.95, sorted((abs(both.memory_error), kind) for kind, both in told)[-3:]
    assert errors.max() < 0.07
