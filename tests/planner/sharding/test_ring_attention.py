"""Captured attention over a shared sequence: keys and values are gathered or go around a ring, whichever is faster."""

from __future__ import annotations

import msgspec
import pytest

from planner.sharding.answer import answer_request
from planner.sharding.backends.runnable import simulate_program
from simulator.sharded.program import RING_ATTENTION, Exchange, Kernel
from topology.catalog.clusters import cluster
from topology.errors import BadInput

WIDTH, HEADS, KEYS, HEAD = 1536, 12, 2, 128  # Qwen2.5 1.5B's, whose heads eight ranks do not divide
ATTENTION = "scaled_dot_product_attention_0"


def attention(rows: int, *, batch: int = 1, causal: bool = True, masked: bool = False, **more):
    """Projections and attention of sequences, whose rows eight ranks share, on machines by name."""
    sizes = {"q": HEADS * HEAD, "k": KEYS * HEAD, "v": KEYS * HEAD}
    inputs = [{"name": "x", "shape": (batch, rows, WIDTH), "dtype": "bf16", "kind": "input", "target": "x"}]
    inputs += [
        {"name": f"w{n}", "shape": (size, WIDTH), "dtype": "bf16", "kind": "parameter", "target": n}
        for n, size in sizes.items()
    ]
    if masked:
        inputs += [{"name": "mask", "shape": (rows, rows), "dtype": "bool", "kind": "input", "target": "mask"}]

    def node(name, op, shape, *args, **kwargs):
        given = [{"tensor": one} if isinstance(one, str) else one for one in args]
        return {"name": name, "op": f"aten.{op}", "args": given, "kwargs": kwargs, "shape": shape, "dtype": "bf16"}

    nodes = []
    for name, size in sizes.items():
        heads = size // HEAD
        nodes += [
            node(f"{name}_0", "linear.default", (batch, rows, size), "x", f"w{name}"),
            node(f"{name}_1", "view.default", (batch, rows, heads, HEAD), f"{name}_0", [batch, rows, heads, HEAD]),
            node(f"{name}_2", "transpose.int", (batch, heads, rows, HEAD), f"{name}_1", 1, 2),
        ]
    given = ["q_2", "k_2", "v_2", "mask" if masked else None, 0.0, causal]
    out = (batch, HEADS, rows, HEAD)
    nodes.append(node(ATTENTION, "scaled_dot_product_attention.default", out, *given, enable_gqa=True))
    document = {
        "graph": {"inputs": inputs, "nodes": nodes, "outputs": [ATTENTION]},
        "mesh": {"names": ["seq"], "shape": [8]},
        "placements": {"x": ["S(1)"], "output0": ["S(2)"]},
        "policy": "min_time",
        "backward": True,
        **more,
    }
    return msgspec.json.decode(msgspec.json.encode(document))


def kernels(answer) -> list[str]:
    return [one.op for one in answer.written.program.work.values() if isinstance(one, Kernel)]


@pytest.mark.parametrize(("machine", "way"), [("l40s-x8", "ring"), ("dgx-h100", 1)])
def test_the_way_of_least_time_is_taken(machine: str, way: str | int) -> None:
    answer = answer_request(attention(32768), where="a test", cluster=cluster(machine))
    tried = answer.written.tried[ATTENTION]

    assert answer.plan.choice.layouts[ATTENTION].dims == ((), (), ("seq",), ())
    assert answer.written.chunks.get(ATTENTION, 1) == way == min(tried, key=lambda one: tried[one])
    assert (RING_ATTENTION in kernels(answer)) == (way == "ring")


def test_in_a_ring_no_rank_holds_all_keys() -> None:
    asked = attention(4096, chunks={ATTENTION: "ring"}, policy=None)
    ring = answer_request(asked, where="a test")
    gathered = answer_request({**asked, "chunks": {}}, where="a test")

    def shapes(answer):
        return [
            answer.written.program.buffers[n].local
            for n, one in answer.written.program.work.items()
            if isinstance(one, Exchange)
        ]

    whole = (1, KEYS, 4096, HEAD)
    assert whole in shapes(gathered)
    assert not [one for one in ring.written.program.buffers.values() if one.local == whole]
    assert ring.written.peak_bytes < gathered.written.peak_bytes
    assert simulate_program(ring.written, ring.problem, cluster("dgx-h100")).step_s > 0


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [({"seq": 2}, ((), (), ("seq",), ())), ({"data": 2, "seq": 2}, (("data",), (), ("seq",), ()))],
)
def test_a_stated_ring_is_taken_where_another_division_is_faster(mesh: dict[str, int], layout) -> None:
    """A rank could have whole sequences instead, as many as it has rows of all; what is stated comes first."""
    sharded = ["S(0)"] * (len(mesh) - 1)
    asked = attention(
        4096,
        batch=2 * len(mesh),
        mesh={"names": list(mesh), "shape": list(mesh.values())},
        placements={"x": [*sharded, "S(1)"], "output0": [*sharded, "S(2)"]},
    )
    free = answer_request({**asked, "chunks": {}}, where="a test", cluster=cluster("h200x4"))
    ring = answer_request({**asked, "chunks": {ATTENTION: "ring"}}, where="a test", cluster=cluster("h200x4"))

    def runs_as(answer):
        number = [one.result.name for one in answer.problem.operators].index(ATTENTION)
        return answer.plan.choice.options[number].result.dims

    assert runs_as(free) != layout
    assert runs_as(ring) == ring.plan.choice.layouts[ATTENTION].dims == layout
    assert RING_ATTENTION in kernels(ring)
    assert ring.plan.choice.bound <= free.plan.choice.cost <= ring.plan.choice.cost


def test_what_cannot_be_overlapped_is_said_with_what_to_do() -> None:
    """Whole tokens on every rank: nothing moves, and no product could run in a way of its own."""
    whole = {"x": ["R"], "output0": ["R"]}
    asked = attention(4096, chunks={"q_0": 4}, policy=None, placements=whole)
    with pytest.raises(BadInput, match="leave its way out, or state placements"):
        answer_request(asked, where="a test")


def test_attention_with_a_mask_is_not_passed_around() -> None:
    asked = attention(4096, causal=False, masked=True, chunks={ATTENTION: "ring"}, policy=None)
    with pytest.raises(BadInput, match="does not run as 'ring'"):
        answer_request(asked, where="a test")
