"""What torch keeps between the halves of a split backward pass, and what the replay of allocations keeps."""

import weakref
from dataclasses import replace

import pytest

from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.memory.replay import MemoryReplay
from simulator.memory.tape import Act
from topology.catalog.clusters import cluster

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention, silu  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

WIDTH, FFN, TOKENS = 64, 256, 128


class Block(nn.Module):
    """A Llama block of one head, with as many heads of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.gate = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (linear(y)[None, None] for linear in self.heads[:3])
        x = x + self.heads[3](scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0])
        y = self.norms[1](x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Held(TorchDispatchMode):
    """Bytes of the tensors that exist, and products that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func is torch.ops.aten.mm.default
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self.live:
                self.live[key] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self.live.pop, key, None)
        return out


def halves(layers: int, *, again: bool = False, early_stop: bool = True) -> tuple[int, int]:
    """Return the bytes that the first half of a backward pass adds, and the products of the second."""
    blocks = nn.ModuleList(Block() for _ in range(layers))
    given = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with Held() as held:
        out = given
        for block in blocks:
            out = checkpoint(block, out, use_reentrant=False, early_stop=early_stop) if again else block(out)
        before = sum(held.live.values())
        _, groups = stage_backward_input([out], [torch.randn_like(out)], [given], iter(blocks.parameters()))
        del out
        added, held.products = sum(held.live.values()) - before, 0
        stage_backward_weight(iter(blocks.parameters()), groups)
    return added, held.products


def test_the_gradient_of_every_operator_with_weights_waits_for_the_second_half() -> None:
    sizes = {"hidden": WIDTH, "heads": 1, "kv_heads": 1, "head_dim": WIDTH, "ffn": FFN}
    model = replace(load_model("llama3.2-1b"), layers=2, **sizes)
    plan = Plan(pp=2, schedule="1F1B")
    scenario = Scenario(
        model=model,
        cluster=cluster("dgx-h100", gpus=2),
        workload=Workload(seq_len=TOKENS, global_batch_size=2),
        runtime=Runtime(name="torchtitan"),
    )
    tensors = MemoryReplay(scenario, plan, micro_batches=2).tensors
    unit = next(unit for unit in tensors.stages[0] if unit.block == "dense")
    events = tensors.passes(unit).backward
    freed = {slot: nbytes for act, slot, nbytes in events if act is Act.FREE}
    needed = {slot for act, slot, _ in events if act is Act.NEEDED}

    (one, _), (two, products) = halves(1), halves(2)  # in float32
    assert (two - one) / 2 == pytest.approx(sum(freed[slot] for slot in needed), rel=0.01)
    assert products == 2 * 7


@pytest.mark.parametrize(("early_stop", "run"), [(True, 6), (False, 7)])  # the last product, which nothing needs
def test_a_recomputed_block_runs_again_for_every_operator_with_weights(early_stop: bool, run: int) -> None:
    _, products = halves(2, again=True, early_stop=early_stop)

    assert products == 2 * (7 + 9 * run)
