"""What torch's checkpoint runs again and keeps, counted: the independent side of `simulator.runtimes.recomputation` and
of `simulator.step.frozen`.
"""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from torch.distributed.fsdp.wrap import CustomPolicy  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

BACKWARD_PRODUCTS = 2 * 2  # gradients of the input and of the weight, for two products


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("how", "again"),
    [
        ({"use_reentrant": False, "early_stop": True}, 1),
        ({"use_reentrant": False, "early_stop": False}, 2),
        ({"use_reentrant": True}, 2),
    ],
)
def test_a_feed_forward_recomputed_by_torch(how, again):
    """The second product's input is saved and its result is only added, so stopping early leaves it out."""
    up, down = torch.nn.Linear(8, 32, bias=False), torch.nn.Linear(32, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    out = checkpoint(lambda x: x + down(torch.nn.functional.gelu(up(x))), x, **how)
    with Products() as products:
        out.sum().backward()
    assert products.count == BACKWARD_PRODUCTS + again


WIDTH, TOKENS, LAYERS = 16, 64, 6


class Streams(TorchDispatchMode):
    """Knows which tensors of the size of a layer's input are there."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() == TOKENS * WIDTH * 4:
                self.seen[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        return found

    def there(self):
        return sum(not storage.expired() for storage in self.seen.values())


class Adapted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.adapter = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.base(x) + self.adapter(x)


class Network(torch.nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.layers = torch.nn.ModuleList(Adapted() for _ in range(LAYERS))
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.sum()


@pytest.fixture
def alone():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("reentrant", "apart", "more"),
    [(True, True, 1), (True, False, -1), (False, True, -1)],
    ids=["re-entrant with adapters apart", "adapters and base in one unit", "not re-entrant"],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_frozen_units_of_fsdp1_keep_the_inputs_of_reentrant_checkpoints(reentrant, apart, more):
    """From the third layer that goes back on, every one leaves one tensor more: its input stays, and so does the
    gradient of it. Otherwise each takes its input away. The most is LAYERS - 2 more than at the second.
    """
    network = Network(reentrant=reentrant)
    layers = list(network.layers)
    units = {one for layer in layers for one in ((layer, layer.adapter) if apart else (layer,))}
    sharded = FullyShardedDataParallel(
        network,
        auto_wrap_policy=CustomPolicy(lambda module: module in units),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    there = []
    with Streams() as streams:
        loss = sharded(torch.randn(TOKENS, WIDTH, requires_grad=True))
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: there.append(streams.there()))
        loss.backward()

    assert len(there) == LAYERS
    assert {after - before for before, after in list(pairwise(there))[1:]} == {more}
