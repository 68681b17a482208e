"""Times of overlap modes against closed forms, and the fit against rates that it does not know."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.overlap_modes import (
    EXECUTED,
    GATHER,
    HOST_CALLS,
    SCATTER,
    OverlapRates,
    OverlapSample,
    Parts,
    all_reduce_s,
    choose,
    fit_rates,
    mean_error,
    mode_s,
)

# Nothing but products and transfers: no latency, no host, nothing lost beside a copy.
IDEAL = OverlapRates(
    copy_latency_s=0.0,
    signal_s=0.0,
    hop_s=0.0,
    beside=0.0,
    fused_beside=0.0,
    collective_beside=0.0,
    fused_ratio=1.0,
    fused_tail_s=0.0,
    host_s=0.0,
    sum_bytes_per_s=1e30,
    copy_bytes_per_s=1e9,
    hop_bytes_per_s=1e9,
)


def parts(*, ranks: int, product_s: float, push_s: float) -> Parts:
    """A product and a shard that takes `push_s` at 1 GB/s."""
    return Parts(
        ranks=ranks,
        moved_bytes=push_s * 1e9,
        product_s=lambda fraction: product_s * fraction,
        collective_s=lambda fraction: (ranks - 1) * push_s * fraction,
    )


@given(
    ranks=st.integers(2, 8),
    product_s=st.floats(1e-4, 1e-2),
    push_s=st.floats(1e-6, 1e-2),
    operation=st.sampled_from([GATHER, SCATTER]),
    mode=st.sampled_from(EXECUTED),
)
def test_no_mode_beats_the_longer_part(ranks: int, product_s: float, push_s: float, operation: str, mode: str) -> None:
    """Nor does one take longer than all parts one after the other."""
    taken = mode_s(mode, operation, parts(ranks=ranks, product_s=product_s, push_s=push_s), IDEAL)

    assert taken >= max(product_s, (ranks - 1) * push_s) * (1 - 1e-9)
    assert taken <= (product_s + (ranks - 1) * push_s) * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_copies_shorter_than_a_shards_product_are_hidden(ranks: int) -> None:
    """Each shard is pushed while one is multiplied, so a push no longer than that costs nothing."""
    fast = parts(ranks=ranks, product_s=1.0, push_s=0.99 / ranks)

    for operation, mode in itertools.product((GATHER, SCATTER), ("copy_engine", "fused")):
        assert mode_s(mode, operation, fast, IDEAL) == pytest.approx(1.0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_long_copies_leave_one_shards_product_exposed(ranks: int) -> None:
    """A decomposed gather that is bound by its copies ends with the product of the shard that came last."""
    slow = parts(ranks=ranks, product_s=1.0, push_s=3.0 / ranks)

    assert mode_s("copy_engine", GATHER, slow, IDEAL) == pytest.approx((ranks - 1) * 3.0 / ranks + 1 / ranks)


def test_one_after_the_other() -> None:
    assert mode_s("nccl", GATHER, parts(ranks=4, product_s=2.0, push_s=0.5), IDEAL) == pytest.approx(3.5)


@pytest.mark.parametrize("mode", EXECUTED)
def test_one_rank_has_nothing_to_move(mode: str) -> None:
    assert mode_s(mode, GATHER, parts(ranks=1, product_s=2.0, push_s=0.5), OverlapRates()) == 2.0


@pytest.mark.parametrize("mode", EXECUTED)
def test_small_calls_take_as_long_as_the_host(mode: str) -> None:
    small = parts(ranks=4, product_s=1e-9, push_s=1e-9)
    always, each = HOST_CALLS[mode]

    assert mode_s(mode, GATHER, small, replace(IDEAL, host_s=1e-3)) == pytest.approx(1e-3 * (always + 3 * each))


def test_two_exchanges_pay_for_large_sums_only() -> None:
    rates = OverlapRates()

    assert all_reduce_s("one_shot", 2**12, 8, rates) < all_reduce_s("two_shot", 2**12, 8, rates)
    assert all_reduce_s("two_shot", 2**24, 8, rates) < all_reduce_s("one_shot", 2**24, 8, rates)
    assert all_reduce_s("multimem", 2**24, 8, rates) < all_reduce_s("two_shot", 2**24, 8, rates)


def test_unknown_words() -> None:
    small = parts(ranks=2, product_s=1.0, push_s=1.0)
    with pytest.raises(ValueError, match="no overlap mode multimem"):
        mode_s("multimem", GATHER, small, IDEAL)
    with pytest.raises(ValueError, match="no operation"):
        mode_s("nccl", "gather", small, IDEAL)
    with pytest.raises(ValueError, match="no all-reduce mode"):
        all_reduce_s("ring", 1.0, 2, IDEAL)
    with pytest.raises(ValueError, match="no samples"):
        fit_rates([])


def test_the_choice_is_the_least_and_measurements_outrank_the_model() -> None:
    large = parts(ranks=4, product_s=5e-3, push_s=1e-3)
    choice = choose(GATHER, large, OverlapRates())
    seconds = dict(choice.seconds)

    assert seconds[choice.mode] == min(seconds.values())
    assert choice.source == "modelled"

    measured = choose(GATHER, large, OverlapRates(), measured={"ring": 1e-3})
    assert (measured.mode, measured.source) == ("ring", "measured")


def test_fit_finds_what_made_the_samples() -> None:
    true = OverlapRates(host_s=15e-6, fused_ratio=1.08, beside=0.05, fused_beside=0.2, hop_bytes_per_s=150e9)
    samples = [
        OverlapSample(operation=operation, mode=mode, parts=case, seconds=mode_s(mode, operation, case, true))
        for ranks, rows, width in itertools.product((2, 4), (1024, 4096, 16384), (1e6, 4e6, 1.6e7))
        for case in [
            Parts(
                ranks=ranks,
                moved_bytes=rows * width / 1024 / ranks,
                product_s=lambda f, s=rows * width / 4e13: s * f,
                collective_s=lambda f, s=rows * width / 1024 / 3e11: 3e-5 + s * f,
            )
        ]
        for operation, mode in itertools.product((GATHER, SCATTER), EXECUTED)
    ]

    fitted = fit_rates(samples)

    assert mean_error(samples, OverlapRates()) > 0.05
    assert mean_error(samples, fitted) < 0.01
