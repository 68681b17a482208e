"""Sharded modules in what people train with: AdamW, clipped gradients, FSDP over further ranks, DCP checkpoints."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import distributed as dist  # noqa: E402 - after the check for torch
from torch import nn  # noqa: E402 - as above
from torch.distributed import checkpoint  # noqa: E402 - as above
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402 - as above
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402 - as above
from torch.distributed.fsdp import fully_shard  # noqa: E402 - as above

from executor.sharding import api, shard  # noqa: E402 - as above
from tests.executor.sharding import modules, ranks  # noqa: E402 - as above
from topology.errors import BadInput  # noqa: E402 - as above

COLUMNS = {"up.weight": ["S(0)"], "up.bias": ["S(0)"], "down.weight": ["S(1)"]}
PLACED = (COLUMNS, {"x": ["S(0)"], "up.weight": ["S(1)"]})


def _steps(module, x, *, clip=1.0):
    """Three steps; return the norms of gradients, and the optimizer."""
    optimizer, norms = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1), []
    for _ in range(3):
        y = module(x)
        loss = (y.full_tensor() if hasattr(y, "full_tensor") else y).sub(1.3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), clip)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
    return norms, optimizer


def _assert_same(sharded, alone):
    found = sharded.state_dict()
    for name, one in alone.state_dict().items():
        torch.testing.assert_close(found[name].full_tensor(), one, msg=name)


def _worker(folder) -> None:
    """On two ranks each with half of the batch, the module is on two: parameters are those of one process."""
    api.plan = ranks.planned_here
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(4, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mine = x.chunk(2)[mesh["dp"].get_local_rank()]
    for placed in PLACED:
        torch.manual_seed(1)
        alone = modules.FeedForward().double()
        sharded = shard(alone, (mine,), mesh=mesh["tp"], placements=placed)
        fully_shard(sharded, mesh=mesh["dp"])
        expected, _ = _steps(alone, x)
        found, optimizer = _steps(sharded, mine)
        torch.testing.assert_close(found, expected)
        _assert_same(sharded, alone)

    model, state = get_state_dict(sharded, optimizer)
    checkpoint.save({"model": model, "optimizer": state}, checkpoint_id=folder)
    torch.manual_seed(5)
    other = shard(
        modules.FeedForward().double(), (x,), mesh=mesh, placements={n: ["R", *p] for n, p in COLUMNS.items()}
    )
    again = torch.optim.AdamW(other.parameters())
    model, state = get_state_dict(other, again)  # in other placements, on all ranks
    checkpoint.load({"model": model, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(other, again, model_state_dict=model, optim_state_dict=state)
    _assert_same(other, alone)
    plain = modules.FeedForward().double()
    whole = plain.state_dict()
    checkpoint.load({"model": whole}, checkpoint_id=folder)
    torch.testing.assert_close(whole, dict(alone.state_dict()))

    with pytest.raises(BadInput, match="a mesh of 2 ranks, in a job of 4"):
        shard(alone, (x,), mesh={"tp": 2})
    dist.barrier()


def test_a_sharded_module_is_trained_and_saved_as_any_module(tmp_path) -> None:
    ranks._on_ranks(_worker, 4, str(tmp_path))
