"""The power that other work leaves for products, against a GPU that ran both in turn."""

from __future__ import annotations

import pytest

from simulator.serving.power import PowerLimit
from topology.catalog.gpus import gpu_kind

LIMIT = PowerLimit.of(gpu_kind("h200-sxm"), 1 / 0.84)
ALONE_S, AT_ONCE = 1.651e-3, 4  # a product of 8,192 at the limit of one H200, and how many run in a row
# (examples/validation/kernels.md, products of 16 bits in turn with copies)


MEASURED = ((0.82, 1.570e-3), (0.60, 1.552e-3), (0.39, 1.445e-3), (0.19, 1.386e-3))  # by the products' share of time


@pytest.mark.parametrize(("share", "measured_s"), MEASURED)
def test_products_in_turn_with_copies_take_as_long_as_measured(share: float, measured_s: float) -> None:
    limited, copied = AT_ONCE * ALONE_S, AT_ONCE * measured_s * (1 - share) / share
    held = LIMIT.held_back(limited, moving_s=LIMIT.least * limited, attending_s=0.0, before_s=copied)
    assert ALONE_S * (LIMIT.least + held * (1 - LIMIT.least)) == pytest.approx(measured_s, rel=0.04)


def test_more_spare_power_never_delays_products() -> None:
    spare = ((0.0, 0.0, 0.0), (2e-3, 0.0, 0.0), (2e-3, 2e-3, 0.0), (2e-3, 2e-3, 1e-2), (1.0, 1.0, 1.0))
    found = [
        LIMIT.held_back(2e-2, moving_s=2e-2 * LIMIT.least + moving, attending_s=attending, before_s=before)
        for moving, attending, before in spare
    ]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (1.0, 0.0)
