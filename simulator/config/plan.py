"""A plan: degrees of parallelism, schedule and memory policy, and the one mapping from rank to mesh coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.config.plan_schema import MAX_GPUS, MAX_LAYERS, Kind, PlanField, degree, entry, fields_of

# What is kept in host memory: nothing, the optimizer's state, or parameters and gradients as well.
OFFLOADS = ("none", "optimizer", "parameters")
# How the experts' all-to-all overlaps compute: not at all, with passes of another micro batch, or also with delayed
# weight gradients (`simulator.overlap.combined`).
EP_OVERLAPS = ("none", "combined", "delay_wgrad")

# What exchanges the parameters and gradients of FSDP's blocks: NCCL, or copies to peers (`executor.overlap`).
NCCL, COPY_ENGINE = "nccl", "copy_engine"
FSDP_EXCHANGES = (NCCL, COPY_ENGINE)

# Mesh axes, slowest first: neighbours in rank share tensor-parallel groups, stages are furthest apart. This is the
# order of torchtitan's mesh and of Megatron's default tp-cp-ep-dp-pp (which lists the fastest first).
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

# The default schedules of pipelines: with one stage per rank, and with several.
PLAIN_SCHEDULE, INTERLEAVED_SCHEDULE = "1F1B", "Interleaved1F1B"


def default_schedule(virtual_stages: int) -> str:
    """Return the default schedule of a pipeline."""
    return INTERLEAVED_SCHEDULE if virtual_stages > 1 else PLAIN_SCHEDULE


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Degrees of parallelism, schedule and memory policy of one training run: the one table of a plan's fields.

    Each field has an entry (`simulator.config.plan_schema.PlanField`) from which flags, keys of cases, columns, limits
    of searches and texts follow.

    `dp_replicate * dp_shard * cp * tp * pp` is the number of GPUs; `ep` divides within it. `zero_stage` is set for
    runtimes with ZeRO (then `dp_replicate` is the data-parallel degree and `zero_stage` says what is sharded over it);
    otherwise sharding is `dp_shard` (FSDP2: parameters, gradients and optimizer). `recompute` is `none`, `selective`,
    `selective-op`, `full` or a mode of the runtime's own. `placement` lists, rank by rank, the physical GPU (node *
    gpus_per_node + index); empty means rank r runs on GPU r.

    `cp_method` is how ranks exchange keys and values: `ring`, `all_gather` or `all_to_all` (Ulysses).
    `recompute_per_stage` names a mode for each of the pp * virtual_stages stages and overrides `recompute`. `offload`
    is the state kept in host memory (`OFFLOADS`), where the CPU updates it: see `simulator.step.offload`. What the
    first `offload_layers` layers save for backward waits there, too (`simulator.step.away`). `ep_overlap`
    is how the all-to-all of experts overlaps compute (`EP_OVERLAPS`). `etp` ranks split each expert; None is the
    framework's default, which is `tp` in Megatron-LM. `fsdp_exchange` is what exchanges the parameters and gradients of
    FSDP's blocks (`FSDP_EXCHANGES`). `tp_overlap` is one overlap mode, or one for each site of a
    block: see `simulator.config.overlap_sites`. With `capacity_factor` every expert computes that multiple of its mean
    load, padded or dropped; None is dropless.
    """

    dp_replicate: int = degree(
        "data parallel (DP)",
        short="dp",
        flag="--dp-replicate",
        help="Data-parallel replicas; default: 1, or what fills the GPUs with --zero.",
        search_help="Only plans with this number of replicas.",
    )
    dp_shard: int = degree(
        "sharded data parallel (FSDP)",
        short="fsdp",
        flag="--dp-shard",
        help="FSDP shards; default: what fills the GPUs.",
        search_help="Only plans with this number of FSDP shards.",
    )
    zero_stage: int | None = entry(
        None, "ZeRO stage", least=0, most=3, flag="--zero", help="ZeRO stage over the --dp-replicate ranks."
    )
    tp: int = degree(
        "tensor parallel (TP)",
        short="tp",
        flag="--tp",
        help="Tensor-parallel degree; default: 1.",
        search_help="Only plans with this tensor-parallel degree; 8, 1,2,4 or 2-8, as for all such options.",
    )
    sequence_parallel: bool = entry(
        False,
        flag="--sequence-parallel/--no-sequence-parallel",
        help="Divide norms and residuals by tokens; default: the framework's.",
        needs="tp",
    )
    cp: int = degree(
        "context parallel (CP)",
        short="cp",
        flag="--cp",
        help="Context-parallel degree; default: 1.",
        search_help="Only plans with this context-parallel degree.",
    )
    pp: int = degree(
        "pipeline parallel (PP)",
        short="pp",
        flag="--pp",
        help="Pipeline-parallel degree; default: 1.",
        search_help="Only plans with this pipeline-parallel degree.",
    )
    ep: int = degree(
        "expert parallel (EP)",
        short="ep",
        flag="--ep",
        help="Expert-parallel degree; default: 1.",
        search_help="Only plans with this expert-parallel degree.",
    )
    etp: int | None = entry(  # None: the framework's default
        None,
        "expert tensor parallel (ETP)",
        short="etp",
        least=1,
        most=MAX_GPUS,
        flag="--etp",
        help="Tensor-parallel degree of experts; default: the framework's.",
        search_help="Only plans with this tensor-parallel degree of experts.",
        follows=("tp", "ep"),
    )
    virtual_stages: int = degree(
        "stages a rank",
        flag="--virtual-stages",
        help="Stages on each pipeline rank; default: 1.",
        search_help="Only plans with this many stages on each pipeline rank.",
        needs="pp",
    )
    schedule: str | None = entry(
        None,
        flag="--schedule",
        help="Pipeline schedule, such as 1F1B.",
        search_help="Only plans with this pipeline schedule (comma-separated).",
        needs="pp",
        follows=("pp", "virtual_stages"),
    )
    micro_batch_size: int = entry(
        1,
        least=1,
        flag="--micro-batch",
        help="Sequences in a micro batch.",
        search_help="Only plans with this micro batch, in sequences.",
    )
    recompute: str = entry(
        "none",
        flag="--recompute",
        help="Recomputation: none, selective, selective-op, full, or the runtime's own word.",
        search_help="Only plans with this recomputation (comma-separated).",
    )
    tp_overlap: str = entry(
        "none",
        "overlap of tensor parallelism",
        flag="--tp-overlap",
        help="Overlap of tensor-parallel products with collectives: none, chunked, fused, async, ...; or by site:"
        " attention_in=fused,mlp_out=chunked.",
        longest=128,
        needs="tp",
    )
    reshard_after_forward: bool | None = entry(  # None: the runtime's default
        None,
        flag="--reshard/--no-reshard",
        help="FSDP frees a block's gathered parameters after its forward pass; default: the framework's.",
    )
    # Empty: the runtime's most even split.
    layers_per_stage: tuple[int, ...] = entry(
        (),
        "layers by stage",
        most=MAX_LAYERS,
        flag="--layers-per-stage",
        help="Layers of each stage of the pipeline, in their order: 10,14,14,10; default: as even as the framework's.",
        needs="pp",
        follows=("pp", "virtual_stages"),
    )
    placement: tuple[int, ...] = entry(
        (), follows=("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "virtual_stages")
    )
    cp_method: str | None = entry(  # None: the runtime's own
        None,
        "method of context parallelism",
        flag="--cp-method",
        help="How ranks see each other's keys: ring, all_gather or all_to_all (Ulysses); default: the framework's.",
        needs="cp",
    )
    recompute_per_stage: tuple[str, ...] = entry((), follows=("pp", "virtual_stages", "recompute"))
    capacity_factor: float | None = entry(
        None,
        flag="--capacity-factor",
        help="What every expert computes, over its mean load, padded or dropped; default: all of it.",
    )
    offload: str = entry(
        "none",
        choices=OFFLOADS,
        flag="--offload",
        help="What to keep in host memory: none, optimizer, or parameters as well; default: none.",
        search_help="What to keep in host memory: none, optimizer, or parameters as well (comma-separated).",
    )
    offload_layers: int | None = entry(
        None,
        "layers with activations in host memory",
        least=1,
        most=MAX_LAYERS,
        flag="--offload-layers",
        help="How many of the first layers keep activations in host memory until their backward pass (Megatron-LM's"
        " --cpu-offloading-num-layers); default: none.",
    )
    ep_overlap: str = entry(
        "none",
        "overlap of experts' all-to-all",
        short="a2a",
        choices=EP_OVERLAPS,
        yes="combined",
        flag="--ep-overlap",
        help="Overlap of the experts' all-to-all with compute: none, combined (with another micro batch's passes),"
        " delay_wgrad.",
        search_help="Overlap of the experts' all-to-all with compute: none, combined, delay_wgrad (comma-separated).",
        needs="ep",
    )

    fsdp_exchange: str = entry(
        NCCL,
        "exchanges of FSDP",
        choices=FSDP_EXCHANGES,
        flag="--fsdp-exchange",
        help="What exchanges FSDP's parameters and gradients: nccl, or copy_engine, which takes no SMs; default: nccl.",
        search_help="What exchanges FSDP's parameters and gradients: nccl or copy_engine.",
    )

    @property
    def gpus(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def stages(self) -> int:
        """Stages of the pipeline, over all its ranks."""
        return self.pp * self.virtual_stages

    @property
    def schedule_name(self) -> str:
        """The schedule that the plan names, else the default."""
        return self.schedule or default_schedule(self.virtual_stages)

    def micro_batches(self, global_batch_size: int) -> int:
        """Micro batches each data-parallel rank runs per step. Raises ValueError when the batch does not divide."""
        per_round = self.data_parallel * self.micro_batch_size
        if global_batch_size % per_round:
            raise ValueError(
                f"global batch {global_batch_size} is not a multiple of data parallel {self.data_parallel} x micro "
                f"batch {self.micro_batch_size}"
            )
        return global_batch_size // per_round

    def with_(self, **changes: object) -> Plan:
        return replace(self, **changes)  # type: ignore[arg-type]


# Every field of a plan, by name and in the order of `Plan`.
PLAN_FIELDS: Mapping[str, PlanField] = fields_of(Plan)
# Degrees, stages per rank and the micro batch: whole numbers that every plan has, and that multiply.
SIZES = tuple(name for name, known in PLAN_FIELDS.items() if known.kind is Kind.COUNT and not known.optional)


def rank_grid(plan: Plan) -> NDArray[np.int64]:
    """Return ranks as an array of shape (pp, dp_replicate, dp_shard, cp, tp): `MESH_AXES`, slowest axis first.

    Everything that needs the members of a group indexes this array: a tensor-parallel group is a row along the last
    axis, a pipeline is a column along the first.
    """
    shape = tuple(int(getattr(plan, axis)) for axis in MESH_AXES)
    return np.arange(plan.gpus, dtype=np.int64).reshape(shape)
