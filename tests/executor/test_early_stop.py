"""What torch's checkpoint runs again, counted: the independent side of `simulator.runtimes.recomputation`."""

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
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


@pytest.mark.parametrize(("early_stop", "again"), [(True, 1), (False, 2)])
def test_a_feed_forward_recomputed_by_torch(early_stop, again):
    """The second product's input is saved and its result is only added, so stopping early leaves it out."""
    up, down = torch.nn.Linear(8, 32, bias=False), torch.nn.Linear(32, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    out = checkpoint(lambda x: x + down(torch.nn.functional.gelu(up(x))), x, use_reentrant=False, early_stop=early_stop)
    with Products() as products:
        out.sum().backward()
    assert products.count == BACKWARD_PRODUCTS + again
