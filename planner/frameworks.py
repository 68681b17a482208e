"""What each training framework can express, as data. The rules in `planner.rules` read it; nothing else decides.

Sources, checked against these versions: torchtitan 0.3.0 (`torchtitan/distributed/parallel_dims.py`,
`pipeline_parallel.py`), torch 2.11 (`torch/distributed/pipelining/schedules.py`), Megatron-LM
(`megatron/training/arguments.py`, `megatron/core/transformer/transformer_config.py`), DeepSpeed 0.19.8
(`deepspeed/runtime/pipe/engine.py`, `runtime/engine.py`, deepspeed.ai/tutorials/autotp-training), llm-foundry (its FSDP section).
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from topology.errors import UserError


class KvHeads(StrEnum):
    """What happens when the tensor-parallel degree does not divide the key/value heads."""

    DIVIDE = "divide"  # refused
    REPLICATE = "replicate"  # heads are copied; the degree must be a multiple of their number
    SLOW = "slow"  # accepted, but attention stops scaling


class ExpertGrid(StrEnum):
    """Which ranks expert parallelism is folded into."""

    SHARD_CONTEXT_TENSOR = "shard-context-tensor"  # dp_shard * cp * tp
    WORLD = "world"  # world / (etp * pp)
    DATA = "data"  # the data-parallel ranks
    STAGE = "stage"  # anything inside one pipeline stage
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline schedule. `stages` are the stages a rank holds: least and most (0: no limit)."""

    name: str
    least_stages: int
    most_stages: int
    splits_backward: bool = False  # separates input and weight gradients, which torch.compile'd stages cannot


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="1F1B", least_stages=1, most_stages=1),
        Schedule(name="GPipe", least_stages=1, most_stages=1),
        Schedule(name="Interleaved1F1B", least_stages=2, most_stages=0),
        Schedule(name="LoopedBFS", least_stages=2, most_stages=0),
        Schedule(name="InterleavedZeroBubble", least_stages=2, most_stages=0, splits_backward=True),
        Schedule(name="ZBVZeroBubble", least_stages=2, most_stages=2, splits_backward=True),
        Schedule(name="DualPipeV", least_stages=2, most_stages=2, splits_backward=True),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One training framework. Empty `zero_stages` means that it shards by a degree (FSDP2), not by a ZeRO stage."""

    name: str
    title: str
    kv_heads: KvHeads = KvHeads.REPLICATE
    expert_grid: ExpertGrid = ExpertGrid.STAGE
    axes: frozenset[str] = frozenset({"tp", "cp", "pp", "ep"})  # what may exceed one
    zero_stages: tuple[int, ...] = ()
    searched_zero_stages: tuple[int, ...] = ()  # empty: all of them
    shard_degree: bool = True  # dp_shard may exceed one without a ZeRO stage
    fills: str = "dp_shard"  # the data-parallel degree that takes the GPUs nobody claimed
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    overlaps: tuple[str, ...] = ()  # modes of overlap of tensor-parallel collectives beside "none"
    overlap_by_site: bool = False  # each communication of a layer may have its own
    cp_methods: tuple[str, ...] = ()  # ways of context parallelism; empty: the runtime's own
    torch_pipelining: bool = False  # runs torch.distributed.pipelining, with its checks
    recomputes: tuple[str, ...] = ("none", "selective", "selective-op", "full")
    any_recompute: bool = False  # other words are the runtime's own
    sequence_parallel: bool = True
    sequence_parallel_default: bool = True  # on with tensor parallelism unless switched off
    lists_layers: bool = False  # layers can be spelled out stage by stage
    lists_recompute: bool = False  # and so can recomputation
    uneven_stages: bool = True  # may put different numbers of layers on stages without being told
    pads_vocabulary: bool = False
    ulysses: bool = False  # context parallelism splits heads
    zero_pipeline: bool = True  # ZeRO-2 and 3 work together with pipeline parallelism
    zero_tensor: bool = True  # ZeRO-3 works together with tensor parallelism
    ddp_alone: bool = False  # plain replication refuses company
    overlap_needs_compile: bool = False
    overlap_needs_eager: bool = False

    def default_recompute(self) -> str:
        return "selective" if self.name == "torchtitan" else "none"


TORCHTITAN = Framework(
    name="torchtitan",
    title="torchtitan 0.3",
    kv_heads=KvHeads.DIVIDE,
    expert_grid=ExpertGrid.SHARD_CONTEXT_TENSOR,
    overlaps=("async",),  # parallelism.enable_async_tensor_parallel
    cp_methods=(
        "all_gather",
        "ring",
    ),  # context_parallel_rotate_method allgather and alltoall, which passes shards round
    lists_layers=True,  # pipeline_parallel_module_fqns_per_model_part
    torch_pipelining=True,
    ddp_alone=True,
    overlap_needs_compile=True,
)
PYTORCH = Framework(
    name="pytorch",
    title="PyTorch (FSDP2, DTensor, pipelining)",
    kv_heads=KvHeads.DIVIDE,
    expert_grid=ExpertGrid.SHARD_CONTEXT_TENSOR,
    overlaps=("async",),
    cp_methods=("all_gather", "ring"),
    lists_layers=True,
    lists_recompute=True,
    torch_pipelining=True,
    recomputes=("none", "full"),
    overlap_needs_compile=True,
)
MESHWRIGHT = Framework(
    name="meshwright",
    title="meshwright's executor",
    kv_heads=KvHeads.DIVIDE,
    expert_grid=ExpertGrid.SHARD_CONTEXT_TENSOR,
    overlaps=("chunked", "ring", "copy_engine", "fused", "async"),  # executor/overlap
    overlap_by_site=True,
    cp_methods=("all_gather", "ring", "all_to_all"),
    lists_layers=True,
    lists_recompute=True,
    torch_pipelining=True,
    recomputes=("none", "full"),
    overlap_needs_eager=True,
)
MEGATRON = Framework(
    name="megatron-lm",
    title="Megatron-LM",
    fills="dp_replicate",
    kv_heads=KvHeads.REPLICATE,
    expert_grid=ExpertGrid.WORLD,
    zero_stages=(0, 1, 2, 3),
    searched_zero_stages=(0, 1),  # 2 and 3 mean another implementation (Megatron-FSDP), asked for by name
    schedules=("1F1B", "Interleaved1F1B"),
    overlaps=("ring",),  # --tp-comm-overlap: userbuffers pass shards round, the products beside them in pieces
    cp_methods=("ring", "all_gather", "all_to_all"),  # --cp-comm-type p2p, allgather, a2a
    lists_layers=True,  # --pipeline-model-parallel-layout
    recomputes=("none", "selective", "full"),
    sequence_parallel_default=False,
    uneven_stages=False,
    pads_vocabulary=True,
)
DEEPSPEED = Framework(
    name="deepspeed",
    title="DeepSpeed",
    fills="dp_replicate",
    kv_heads=KvHeads.SLOW,
    expert_grid=ExpertGrid.DATA,
    zero_stages=(0, 1, 2, 3),
    shard_degree=False,
    schedules=("1F1B",),
    recomputes=("none", "full"),
    sequence_parallel=False,
    sequence_parallel_default=False,
    ulysses=True,
    cp_methods=("all_to_all",),
    zero_pipeline=False,
    zero_tensor=False,
)
MEGATRON_DEEPSPEED = Framework(
    name="megatron-deepspeed",
    title="Megatron-DeepSpeed",
    fills="dp_replicate",
    kv_heads=KvHeads.SLOW,
    expert_grid=ExpertGrid.DATA,
    zero_stages=(0, 1, 2, 3),
    shard_degree=False,
    schedules=("1F1B",),
    recomputes=("none", "selective", "full"),
    sequence_parallel_default=False,
    pads_vocabulary=True,
    ulysses=True,
    cp_methods=("all_to_all",),
    zero_pipeline=False,
)
LLM_FOUNDRY = Framework(
    name="llm-foundry",
    title="llm-foundry",
    expert_grid=ExpertGrid.NONE,
    axes=frozenset(),
    zero_stages=(0, 2, 3),
    schedules=(),
    recomputes=("none", "full"),
    sequence_parallel=False,
    sequence_parallel_default=False,
)
ANY = Framework(
    name="any",
    title="any framework",
    recomputes=("none", "full"),
    any_recompute=True,
    lists_layers=True,
    lists_recompute=True,
    overlaps=("ring", "async", "fused"),
    cp_methods=("ring", "all_gather", "all_to_all"),
    zero_stages=(0, 1, 2, 3),
)

FRAMEWORKS = {
    framework.name: framework
    for framework in (TORCHTITAN, MEGATRON, DEEPSPEED, MEGATRON_DEEPSPEED, LLM_FOUNDRY, PYTORCH, MESHWRIGHT, ANY)
}
_ALIASES = {
    "titan": "torchtitan",
    "megatron": "megatron-lm",
    "megatron-core": "megatron-lm",
    "megatron-bridge": "megatron-lm",
    "nemo": "megatron-lm",
    "composer": "llm-foundry",
    "fsdp": "pytorch",
    "fsdp2": "pytorch",
    "torch": "pytorch",
    "accelerate": "pytorch",
}


def framework_named(name: str) -> Framework:
    """Return the framework a person asked for, `name` or `name@version`. Raises UserError with near names."""
    bare = name.partition("@")[0].strip().lower()
    bare = _ALIASES.get(bare, bare)
    if bare in FRAMEWORKS:
        return FRAMEWORKS[bare]
    near = get_close_matches(bare, [*FRAMEWORKS, *_ALIASES], n=3)
    raise UserError(
        f"unknown framework {name!r}",
        why=f"rules exist for {', '.join(FRAMEWORKS)}",
        remedy=f"did you mean {' or '.join(near)}?" if near else "use --framework any for the rules all share",
    )


def framework_of_runtime(name: str) -> Framework:
    """Return the framework whose rules a runtime follows; a runtime nobody described follows those all share."""
    bare = name.partition("@")[0].strip().lower()
    return FRAMEWORKS.get(_ALIASES.get(bare, bare), ANY)
