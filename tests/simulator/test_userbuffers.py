"""Tensor-parallel traffic alongside products in Transformer Engine's way: between no overlap and all hidden."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.overlap.modes import GATHER, OPERATIONS, OverlapRates, Parts, device_s
from simulator.overlap.site_costs import bulk_s

RATES = OverlapRates(signal_s=1e-9, copy_latency_s=1e-9, product_slowdown=0.0)
seconds = st.floats(1e-5, 1e-2)


def parts(ranks: int, product_s: float, copy_s: float) -> Parts:
    """Shards that neither lose to small tiles nor to a slower link."""
    return Parts(
        ranks=ranks,
        shard_bytes=1e6,
        shard_rows=512,
        product_s=product_s,
        shard_product_s=product_s,  # by itself a shard would take as long as the whole
        streamed_product_s=product_s / ranks,
        slice_product_s=product_s / 4,
        collective_s=(ranks - 1) * copy_s,
        slice_collective_s=(ranks - 1) * copy_s / 4,
        copy_s=copy_s,
        stream_s=1e-9,
    )


@given(st.sampled_from(OPERATIONS), st.sampled_from([2, 4, 8]), seconds, seconds)
def test_a_ring_hides_all_but_a_step(operation, ranks, product_s, copy_s):
    """The longer of moving and multiplying, and a step of the other: no less, and no more than both in a row."""
    both = parts(ranks, product_s, copy_s)
    taken = float(device_s("userbuffers", operation, both, RATES))

    assert taken >= max(product_s, both.collective_s) - 1e-6
    assert taken <= product_s + both.collective_s + 1e-4
    if operation == GATHER:
        assert taken == pytest.approx(max(product_s, both.collective_s + product_s / ranks), rel=1e-2, abs=1e-6)


@given(seconds, seconds, seconds)
def test_in_bulk_each_gradient_hides_one_collective(product_s, weight_s, copy_s):
    """Gathering again goes alongside the input's gradient and scattering alongside the weight's, neither alongside the
    other.
    """
    both = parts(2, product_s, copy_s)

    alone = product_s + max(copy_s - product_s, 0) + max(copy_s - weight_s, 0)
    assert float(bulk_s(both, weight_s, RATES)) == pytest.approx(alone, rel=1e-3, abs=1e-6)
