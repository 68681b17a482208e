"""What the planner counts as copied around an exchange is what the executor copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import distributed as dist  # noqa: E402 - after the check for torch
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402 - as above
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - as above

from executor.sharding.exchanges import Group, Pieces, exchange  # noqa: E402 - as above
from executor.sharding.places import in_order  # noqa: E402 - as above
from planner.sharding.backends.local_copies import copies_of, lies_in  # noqa: E402 - as above
from planner.sharding.backends.memory_order import order_of  # noqa: E402 - as above
from simulator.sharded.program import Buffer, Exchange  # noqa: E402 - as above

EVEN = SimpleNamespace(member_sizes=lambda *_: (1, 1))  # a place whose ranks have pieces of one size
COPIES = {"clone", "copy_", "div"}


class Copies(TorchDispatchMode):
    """Bytes that copies read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function._schema.name.removeprefix("aten::") in COPIES:
            self.nbytes += 2 * out.numel() * out.element_size()
        return out


@pytest.fixture
def pair():
    """A group of two ranks, of which only this one is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield Group(dist.group.WORLD, 2, (0, 1))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("do", "read", "written"),
    [
        (Exchange(kind="all_reduce", axes=("d",), reducer="sum"), (4, 6, 8), (4, 6, 8)),
        (Exchange(kind="all_reduce", axes=("d",), reducer="avg"), (4, 6, 8), (4, 6, 8)),
        (Exchange(kind="all_gather", axes=("d",), dim=0), (4, 6, 8), (8, 6, 8)),
        (Exchange(kind="all_gather", axes=("d",), dim=1), (4, 6, 8), (4, 12, 8)),
        (Exchange(kind="all_gather", axes=("d",), dim=1), (1, 6, 8), (1, 12, 8)),
        (Exchange(kind="all_gather", axes=("d",), dim=0, blocks=2), (4, 6, 8), (8, 6, 8)),
        (Exchange(kind="reduce_scatter", axes=("d",), dim=0, reducer="sum"), (4, 6, 8), (2, 6, 8)),
        (Exchange(kind="reduce_scatter", axes=("d",), dim=2, reducer="sum"), (4, 6, 8), (4, 6, 4)),
        (Exchange(kind="all_to_all", axes=("d",), dim=0, to_dim=1), (4, 6, 8), (8, 3, 8)),
        (Exchange(kind="all_to_all", axes=("d",), dim=2, to_dim=0), (4, 6, 8), (2, 6, 16)),
    ],
)
@pytest.mark.parametrize("orders", [((), ()), ((), (1, 0, 2)), ((1, 0, 2), (1, 0, 2)), ((2, 0, 1), (1, 2, 0))])
def test_copies_around_an_exchange_are_those_that_are_counted(pair, do, read, written, orders) -> None:
    if do.kind == "all_reduce":
        orders = orders[:1] * 2
    buffers = [
        Buffer(tensor="x", shape=shape, dtype="f32", dims=((),) * 3, local=shape, order=order)
        for shape, order in zip((read, written), orders, strict=True)
    ]
    before, after = copies_of(do, *buffers)
    x = in_order(torch.zeros(read), orders[0] or (0, 1, 2))
    with Copies() as found:
        out = exchange(do, x, pair, Pieces(EVEN, *buffers), 0)

    assert tuple(out.shape) == written
    assert lies_in(written, order_of(written, out.stride()), orders[1])
    assert found.nbytes == sum(one.bytes for one in (*before, *after))
