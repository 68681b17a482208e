"""The order of dims in memory: chosen so that exchanges copy little, stated, and priced."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sharding.answer import answer_request
from planner.sharding.backends.local_copies import copies_of
from planner.sharding.backends.memory_order import order_of, strides_of, viewed
from planner.sharding.backends.runnable import simulate_program
from simulator.sharded.program import Exchange
from topology.catalog.clusters import cluster
from topology.errors import BadInput

DGX = cluster("dgx-h100")


def feed_forward(batch: int, *, domains=None, **more):
    """Two products on eight ranks, rows of the sequence in and out: a gather before, a reduce-scatter after them."""
    shapes = {"x": (batch, 64, 256), "up": (1024, 256), "down": (256, 1024)}
    kinds = {"x": "input", "up": "parameter", "down": "parameter"}
    inputs = [{"name": n, "shape": s, "dtype": "bf16", "kind": kinds[n], "target": n} for n, s in shapes.items()]

    def node(name, op, args, width):
        given = [{"tensor": one} for one in args]
        return {"name": name, "op": op, "args": given, "shape": (batch, 64, width), "dtype": "bf16"}

    nodes = [
        node("linear_0", "aten.linear.default", ("x", "up"), 1024),
        node("gelu_0", "aten.gelu.default", ("linear_0",), 1024),
        node("linear_1", "aten.linear.default", ("gelu_0", "down"), 256),
    ]
    document = {
        "graph": {"inputs": inputs, "nodes": nodes, "outputs": ["linear_1"]},
        "mesh": {"names": ["tp"], "shape": [8]},
        "placements": {"x": ["S(1)"], "up": ["S(0)"], "down": ["S(1)"], "output0": ["S(1)"]},
        "domains": domains or {},
        "backward": True,
        "gradients": ["x"],
        "chunks": {},
        **more,
    }
    return answer_request(msgspec.json.decode(msgspec.json.encode(document)), where="a test", cluster=DGX)


def copied(answer) -> dict[str, float]:
    """Bytes that are copied around each exchange."""
    program, found = answer.written.program, {}
    for data in program.instructions:
        do = program.work.get(data.get("writes", [""])[0])
        if isinstance(do, Exchange):
            before, after = copies_of(do, program.buffers[data["reads"][0]], program.buffers[data["writes"][0]])
            found[do.kind] = found.get(do.kind, 0.0) + sum(one.bytes for one in (*before, *after))
    return found


def in_order_of_dims(answer):
    buffers = {name: msgspec.structs.replace(one, order=()) for name, one in answer.written.program.buffers.items()}
    program = msgspec.structs.replace(answer.written.program, buffers=buffers)
    return replace(answer, written=replace(answer.written, program=program, copied={}))


def test_rows_of_a_sequence_go_outermost_and_only_given_pieces_are_copied() -> None:
    """As Megatron-LM has it: [sequence, batch, width], so that gathers and scatters copy nothing (2205.05198)."""
    answer, piece, whole = feed_forward(4), 2 * 4 * 64 * 256 * 2 // 8, 2 * 4 * 64 * 256 * 2
    plain = in_order_of_dims(answer)

    assert answer.written.program.buffers["linear_0"].order == (1, 0, 2)
    # x lies by batches, as does the result's gradient: of each, a rank's own piece is put in order
    assert copied(answer) == {"all_gather": 2 * piece, "reduce_scatter": 0}
    assert copied(plain) == {"all_gather": 2 * whole, "reduce_scatter": 2 * whole}
    run, longer = (simulate_program(one.written, one.problem, DGX).step_s for one in (answer, plain))
    assert run < longer


def test_an_argument_that_lies_so_is_not_copied_at_all() -> None:
    stated = {"x": "allocate(1, 0, 2)"}
    answer = feed_forward(4, domains=stated)

    assert answer.written.program.buffers["x"].order == (1, 0, 2)
    gathers = [one.kind for one in answer.written.program.work.values() if isinstance(one, Exchange)].count(
        "all_gather"
    )
    assert gathers == 2
    assert copied(answer)["all_gather"] == 2 * 4 * 64 * 256 * 2 // 8  # of the result's gradient alone
    assert not answer.written.copied.get("linear_0")


def test_of_one_sequence_nothing_is_copied_and_no_order_is_chosen() -> None:
    answer = feed_forward(1)

    assert not any(one.order for one in answer.written.program.buffers.values())
    assert not any(copied(answer).values())


def test_the_order_that_is_stated_is_kept_by_an_exchange() -> None:
    whole = {"x": ["S(1)"], "up": ["S(0)"], "down": ["S(1)"], "output0": ["S(1)"]}
    answer = feed_forward(4, placements=whole, domains={"linear_1": "allocate(0, 1, 2)"})

    last = answer.written.program.outputs[0]
    assert answer.written.program.buffers[last].order == ()


@pytest.mark.parametrize(
    ("domains", "why"),
    [
        ({"gelu_0": "allocate(1, 0, 2)"}, "gelu_0' is allocated"),
        ({"up": "allocate(1, 0)"}, "up' is allocated"),
        ({"x": "allocate(1, 0)"}, "no order of 3 dims"),
        ({"x": "allocate(1, 1, 2)"}, "no order of 3 dims"),
    ],
)
def test_what_cannot_be_allocated_is_refused(domains, why) -> None:
    with pytest.raises(BadInput, match=why):
        feed_forward(4, domains=domains)


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(SHAPES, st.randoms(use_true_random=False), st.integers(1, 3))
def test_views_are_those_that_numpy_has_without_a_copy(shape, random, cuts) -> None:
    order = random.sample(range(len(shape)), len(shape))
    dense = np.empty([shape[dim] for dim in order], dtype=np.int8)
    array = dense.transpose([order.index(dim) for dim in range(len(shape))])
    assert order_of(tuple(shape), strides_of(tuple(shape), tuple(order))) == order_of(tuple(shape), array.strides)

    left, wanted = prod(shape), []
    for _ in range(cuts):
        wanted.append(random.choice([n for n in range(1, left + 1) if left % n == 0]))
        left //= wanted[-1]
    found = viewed(tuple(shape), array.strides, (*wanted, left))
    try:
        seen = array.view()
        seen.shape = (*wanted, left)
    except AttributeError:
        assert found is None
        return
    assert found is not None
    assert all(a == b for a, b, n in zip(found, seen.strides, seen.shape, strict=True) if n > 1)
