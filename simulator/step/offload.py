"""State kept in host memory: copies between host and GPU in a step, and updates on the CPU.

`optimizer` keeps the optimizer's state there (DeepSpeed's ZeRO-Offload, Megatron-LM's `--optimizer-cpu-offload`):
gradients are copied to the host, the CPU updates parameters there, and these are copied back. `parameters` keeps
everything there (FSDP2's `CPUOffloadPolicy`, ZeRO-3 with `offload_param`): a shard is copied to the GPU before each
gather, and its gradient back after the reduction. The CPU adds a gradient to one that is already there, and the host's
thread waits for this (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.savers import OPTIMIZER_IN_BACKWARD
from simulator.step.context import CostContext
from simulator.step.held import State, state_bytes
from simulator.step.paged import paged_width
from topology.cluster import Cluster
from topology.rates.host import HostRates, host_rates

OFFLOAD = "host copies"  # the stream that copies gradients to the host

# Share of the nominal memory bandwidth that an update on the CPU reaches. Ren et al., ZeRO-Offload, arXiv 2101.06840,
# table 4: Adam over 10 B parameters, 28 bytes each, in 2.57 s with two Xeon Platinum 8168 (256 GB/s).
HOST_SHARE = 0.43
ADD_PASSES = 3  # a gradient is added up by reading two and writing one


def offloaded(context: CostContext, kind: State) -> NDArray[np.bool_]:
    """Return for each plan whether a kind of state is in host memory."""
    table = context.table
    if kind == "gradients" and not context.spec.state.offloads_gradients:
        return np.asarray(table.offloaded["parameters"])
    return np.asarray(table.offloaded[kind])


def held_bytes(context: CostContext, kind: State) -> Floats:
    """Return the GPU bytes per parameter of a kind of state, before sharding, shape (plans,); of paged states, the part
    that is always on the GPU.
    """
    # With an optimizer in backward, a gradient is freed as soon as its parameter has been updated.
    gone = kind == "gradients" and OPTIMIZER_IN_BACKWARD in context.runtime.savers
    paged = paged_width(context.runtime) if kind == "optimizer" else 0.0
    return np.where(offloaded(context, kind) | gone, 0.0, state_bytes(context)[kind] - paged)


def host_bytes(context: CostContext, kind: State) -> Floats:
    """Return the host bytes per parameter of a kind of state, before sharding, shape (plans,)."""
    width = host_gradient_bytes(context) if kind == "gradients" else state_bytes(context)[kind]
    return np.where(offloaded(context, kind), width, 0.0)


def host_gradient_bytes(context: CostContext) -> float:
    """Return the bytes of a gradient on the host: the CPU updates float32 copies with gradients of that type, which the
    GPU makes before they move (deepspeed/runtime/zero/stage_1_and_2.py:
    async_inplace_copy_grad_to_fp32_buffer_from_gpu).
    """
    state = state_bytes(context)
    return max(state["gradients"], 4.0) if context.spec.state.master_weights else state["gradients"]


def offload_assumed(plans: Iterable[Plan], cluster: Cluster) -> tuple[str, ...]:
    """Return the sentences on what estimates assume of the host; empty if all state is on the GPUs."""
    gpus = max((plan.gpus for plan in plans if plan.offload != "none"), default=0)
    if not gpus:
        return ()
    rates = host_rates(cluster, gpus)
    memory = rates.source.removeprefix("assumed: ")
    has = "" if rates.memory_bytes is not None else " the host has the memory;"
    text = (
        f"the CPU updates at {HOST_SHARE:.0%} of the host's memory bandwidth ({memory});{has}"
        f" copies to and from it at {rates.copy_bytes_per_s / 1e9:.0f} GB/s a GPU"
    )
    return (text,)


def paged_assumed(runtime: Runtime, cluster: Cluster, gpus: int) -> tuple[str, ...]:
    """Return the sentences on what estimates assume of a paged optimizer; empty for others."""
    if not paged_width(runtime):
        return ()
    rates = host_rates(cluster, gpus)
    has = "" if rates.memory_bytes is not None else "; the host has the memory"
    text = (
        "states of the paged optimizer that have no room on the GPU together all come from the host and go back in"
        f" every step, at {rates.copy_bytes_per_s / 1e9:.0f} GB/s a GPU{has}"
    )
    return (text,)


def copy_bytes_per_s(context: CostContext) -> Floats:
    """Return the bytes/s at which each GPU copies to and from the host, shape (plans,)."""
    return _by_plan(context, lambda rates: rates.copy_bytes_per_s)


def update_bytes_per_s(context: CostContext) -> Floats:
    """Return the bytes/s at which the CPU updates for each GPU, shape (plans,)."""
    return _by_plan(context, lambda rates: HOST_SHARE * rates.memory_bytes_per_s)


def _by_plan(context: CostContext, of: Callable[[HostRates], float]) -> Floats:
    cluster = context.groups.cluster
    used = np.minimum(context.table["gpus"], cluster.gpus_per_node)
    counts, which = np.unique(used, return_inverse=True)
    return np.array([of(host_rates(cluster, int(count))) for count in counts])[which]
