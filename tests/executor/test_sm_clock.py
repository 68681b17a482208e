"""Mean clocks from what processors wrote down; the kernel that writes needs a GPU."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from executor.gpu.sm_clock import SmClock  # noqa: E402 - after the check for torch


def test_the_mean_clock_is_cycles_over_time_of_processors_that_both_stamps_reached() -> None:
    clock = SmClock(torch.device("cpu"))
    first = torch.tensor([[1_000, 10], [5_000, 12], [0, 0], [7_000, 14]])
    # 1.5 cycles a nanosecond; the third processor was not reached before, the fourth is not reached now.
    second = torch.tensor([[1_000 + 1_500, 10 + 1_000], [5_000 + 3_000, 12 + 2_000], [99, 50], [0, 0]])
    third = torch.zeros((4, 2), dtype=torch.int64)
    clock.stamps = [first, second, third]

    assert clock.hertz() == [pytest.approx(1.5e9), None]
    assert clock.stamps == []


def test_without_a_gpu_no_clock_is_known() -> None:
    clock = SmClock(torch.device("cpu"))
    clock.stamp()
    clock.stamp()

    assert clock.hertz() == []
