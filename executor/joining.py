"""How a process joins the ranks with the meshes of a plan, and joins anew where another plan needs other meshes.

A communicator keeps the buffers of every connection that it ever opened, outside of torch's allocator: gigabytes after
a few plans, and on few GPUs all axes use the group of all ranks. So before a plan of other meshes all groups are
destroyed and the same ranks join again, and it finds the memory that a new process would. Plans of equal meshes keep
theirs: joining takes a second on GPUs.

What torch remembers of groups outlives them, and is kept from meeting their successors:
- The launcher's store still has the keys of the joining before: each joining has a prefix of its own.
- Symmetric memory refuses to learn a group's name twice (`set_group_info`), with other ranks above all, and the count
  that names groups starts again when all are destroyed (`destroy_process_group`): each joining counts from its own start.
  Groups that are split off are named by their ranks instead; what is remembered of those is true of their successors.
- DTensor remembers the results of operators with their meshes, in every thread, and takes meshes of equal shape for one
  (`LocalLRUCache`, `DeviceMesh.__eq__`): forgotten here in the two threads that compute.
NCCL's flight recorder writes after a timeout only for the first groups of a process (`HeartbeatMonitor`, uid 0); after
that the heartbeats alone tell who was late.
"""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from executor import symmetric
from executor.meshes import Meshes, build_meshes
from simulator.plan import MESH_AXES, Plan

NAMES = 10**6  # of groups in one joining, at most: as many digits each, so the group of all ranks sorts first


@dataclass(slots=True)
class _Place:
    """Where this process stands: how often it has joined, over which store, and with which meshes."""

    joinings: int = 0
    store: dist.Store | None = None
    key: tuple[int, ...] | None = None
    meshes: Meshes | None = None


_place = _Place()


def join(plan: Plan, device: torch.device, timeout_s: float) -> int:
    """Join all ranks for a plan, leaving the groups of one with other meshes; return how often this process has joined.

    Collective: all ranks make the same calls. The store and the first collectives wait for `timeout_s`.
    """
    if dist.is_initialized() and _place.key not in {None, _key(plan)}:
        leave(device)
    if not dist.is_initialized():
        _initialize(device, timedelta(seconds=timeout_s))
    return _place.joinings


def meshes_of(plan: Plan, device_type: str) -> Meshes:
    """Return the meshes of a plan that was joined for; those of an earlier one where they are the same. Collective."""
    if _place.meshes is None:
        _place.key, _place.meshes = _key(plan), build_meshes(plan, device_type)
    return _place.meshes


def leave(device: torch.device) -> None:
    """Destroy all groups, with their communicators' memory. Collective, and only while all ranks are well."""
    symmetric.release()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()  # nobody destroys what another still uses
    _place.key = _place.meshes = None
    dist.destroy_process_group()
    _forget_meshes(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def memory_beside(device: torch.device) -> int:
    """Return the bytes of a GPU in use that torch's allocator does not hold: contexts, communicators, other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _key(plan: Plan) -> tuple[int, ...]:
    return (*(getattr(plan, axis) for axis in MESH_AXES), plan.ep)


def _initialize(device: torch.device, timeout: timedelta) -> None:
    if _place.store is None:  # one client of the launcher's store is enough for all joinings
        _place.store = next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
    store = dist.PrefixStore(f"joining{_place.joinings}", _place.store)
    store.set_timeout(timeout)
    dist.distributed_c10d._world.group_count = _place.joinings * NAMES  # noqa: SLF001 - names are counted nowhere else
    _place.joinings += 1
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        device_id=device if cuda else None,
    )


def _forget_meshes(device: torch.device) -> None:
    """Forget results with meshes: here, and in the thread of autograd that works for this GPU."""
    _clear_sharding_prop_cache()
    _Backward.apply(torch.zeros((), device=device, requires_grad=True)).backward()
    known = sys.modules.get("torch.distributed._symmetric_memory")
    if known is not None:
        known._group_name_to_workspace_tensor.clear()  # noqa: SLF001 - memory of torch's own modes, by name of group


class _Backward(torch.autograd.Function):
    """Does nothing forward; its backward pass runs where those of the model run."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        _clear_sharding_prop_cache()
        return grad
