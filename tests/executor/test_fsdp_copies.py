"""Bytes that FSDP2 itself moves around its collectives, counted operator by operator: the independent side of
`simulator.step.fsdp_copies`.
"""

from __future__ import annotations

import numpy as np
import pytest

from simulator.analytical.estimates import calibrated_operators, cost_context
from simulator.analytical.scenario import Scenario
from simulator.columns.plan_table import plan_table
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.runtimes.library import runtime_spec, wraps_one
from simulator.step.fsdp_copies import FsdpCopies
from topology.catalog.clusters import cluster

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - after the skip
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

WIDTH, OTHER = 32, 64
ELEMENTS = 2 * WIDTH * OTHER
# Operators that move a module's parameters or gradients: how often each passes over its tensors.
PASSES = {
    "aten::_foreach_copy_": 1.0,  # over sources and results
    "fsdp::all_gather_copy_in": 2.0,  # over what it packs
    "fsdp::split_with_sizes_copy": 2.0,  # over what it unpacks
    "fsdp::chunk_cat": 1.0,
    "aten::copy_": 1.0,
    "aten::_to_copy": 1.0,
    "aten::add_": 1.5,  # over both terms, and the first once more
}


class Moved(TorchDispatchMode):
    """Adds up the bytes that operators move for tensors as large as shards of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.name().split(".")[0]
        tensors = args[0] if name.startswith("fsdp::") and name != "fsdp::chunk_cat" else (args, kwargs)
        if name == "aten::_to_copy":
            tensors = (args, out)
        large = [x for x in tree_leaves(tensors) if isinstance(x, torch.Tensor) and x.numel() > WIDTH]
        self.nbytes += PASSES.get(name, 0.0) * sum(x.numel() * x.itemsize for x in large)
        return out


def described(ranks: int, stored: str) -> FsdpCopies:
    runtime = Runtime(name="torchtitan", param_dtype=stored)
    plan = Plan(dp_shard=ranks) if ranks > 1 else Plan(tp=2)  # which is wrapped for its types
    asked = Scenario(
        model=load_model("llama3-8b"),
        cluster=cluster("dgx-h100"),
        workload=Workload(seq_len=2048, global_batch_size=8),
        runtime=runtime,
    )
    table = plan_table([plan], asked.workload, wraps_one=wraps_one(runtime_spec("torchtitan"), runtime))
    return FsdpCopies(cost_context(asked, table, calibrated_operators(asked)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_fsdp2_moves_what_is_described(ranks: int, stored: str) -> None:
    """Two micro batches of a root unit, which is gathered in the forward pass alone and reduced in the backward one."""
    copies, (shared, experts) = described(ranks, stored), (np.array([float(ELEMENTS)]), np.zeros(1))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        net = nn.Sequential(nn.Linear(WIDTH, OTHER, bias=False), nn.Linear(OTHER, WIDTH, bias=False))
        net = net.to(getattr(torch, stored))
        fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy)
        for further in (False, True):
            with Moved() as forward:
                out = net(torch.ones(1, WIDTH, dtype=torch.bfloat16))
            with Moved() as backward:
                out.sum().backward()
            gathers = [copies.before_gather(shared, experts), copies.after_gather(shared, experts)]
            reductions = [
                copies.before_reduction(shared, experts, further=further),
                copies.after_reduction(shared, experts, further=further),
            ]
            assert forward.nbytes == pytest.approx(sum(move.nbytes[0] for move in gathers))
            assert backward.nbytes == pytest.approx(sum(move.nbytes[0] for move in reductions))
    finally:
        dist.destroy_process_group()
