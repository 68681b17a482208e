"""How the work is spread over ranks: the degrees, the schedule, and the one mapping from rank to coordinates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

# What is kept in host memory: nothing, the optimizer's state, or parameters and gradients as well.
OFFLOADS = ("none", "optimizer", "parameters")
# How experts' all-to-all runs beside compute: not, beside passes of another micro batch, and with gradients of weights put off
# as well (`simulator.overlap.combined`).
EP_OVERLAPS = ("none", "combined", "delay_wgrad")

# Mesh axes, slowest first: neighbours in rank share tensor-parallel groups, stages are furthest apart. This is the
# order of torchtitan's mesh and of Megatron's default tp-cp-ep-dp-pp (which lists the fastest first).
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

# The schedules of pipelines whose plans name none: of one stage a rank, and of several.
PLAIN_SCHEDULE, INTERLEAVED_SCHEDULE = "1F1B", "Interleaved1F1B"


def default_schedule(virtual_stages: int) -> str:
    """Return the schedule of a pipeline whose plan names none."""
    return INTERLEAVED_SCHEDULE if virtual_stages > 1 else PLAIN_SCHEDULE


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Degrees of parallelism, schedule and memory policy of one training run.

    `dp_replicate * dp_shard * cp * tp * pp` is the number of GPUs; `ep` divides within it. `zero_stage` is set where
    the runtime speaks of ZeRO (then `dp_replicate` is the data-parallel degree and `zero_stage` says what is sharded
    over it); otherwise sharding is `dp_shard` (FSDP2: parameters, gradients and optimizer). `recompute` is `none`,
    `selective`, `selective-op`, `full` or a runtime's own word. `placement` lists, rank by rank, the physical GPU
    (node * gpus_per_node + index); empty means rank r runs on GPU r.

    `cp_method` is how ranks see each other's keys and values: `ring`, `all_gather` or `all_to_all` (Ulysses).
    `recompute_per_stage` names a mode for each of the pp * virtual_stages stages and then goes before `recompute`.
    `offload` is what is kept in host memory (`OFFLOADS`), where the CPU updates it: see `simulator.step.offload`.
    `ep_overlap` is how the all-to-all of experts runs beside compute (`EP_OVERLAPS`).
    `tp_overlap` is one overlap mode, or one for each site of a block: see `simulator.config.overlap_sites`. With `capacity_factor` every expert computes that multiple of
    its mean load, padded or dropped; None is dropless.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    zero_stage: int | None = None
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    ep: int = 1
    virtual_stages: int = 1
    schedule: str | None = None
    micro_batch_size: int = 1
    recompute: str = "none"
    tp_overlap: str = "none"
    reshard_after_forward: bool | None = None  # None: the runtime's default
    layers_per_stage: tuple[int, ...] = ()  # empty: as even as the runtime makes it
    placement: tuple[int, ...] = ()
    cp_method: str | None = None  # None: the runtime's own
    recompute_per_stage: tuple[str, ...] = ()
    capacity_factor: float | None = None
    offload: str = "none"
    ep_overlap: str = "none"

    @property
    def gpus(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def schedule_name(self) -> str:
        """The schedule of the plan's pipeline: the one that it names, else the default."""
        return self.schedule or default_schedule(self.virtual_stages)

    def micro_batches(self, global_batch_size: int) -> int:
        """Micro batches each data-parallel rank runs per step. Raises ValueError when they do not divide."""
        per_round = self.data_parallel * self.micro_batch_size
        if global_batch_size % per_round:
            raise ValueError(
                f"global batch {global_batch_size} is not a multiple of data parallel {self.data_parallel} x micro "
                f"batch {self.micro_batch_size}"
            )
        return global_batch_size // per_round

    def with_(self, **changes: object) -> Plan:
        return replace(self, **changes)  # type: ignore[arg-type]


def rank_grid(plan: Plan) -> NDArray[np.int64]:
    """Return ranks as an array of shape (pp, dp_replicate, dp_shard, cp, tp): `MESH_AXES`, slowest axis first.

    Everything that needs to know who talks to whom indexes this array: a tensor-parallel group is a row along the
    last axis, a pipeline is a column along the first.
    """
    shape = tuple(int(getattr(plan, axis)) for axis in MESH_AXES)
    return np.arange(plan.gpus, dtype=np.int64).reshape(shape)
