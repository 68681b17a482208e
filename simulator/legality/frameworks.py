"""The capabilities of each training framework, as data. Only the rules in `simulator.legality.rules` decide by it.

Sources, checked against these versions: torchtitan 0.3.0 (`torchtitan/distributed/parallel_dims.py`,
`pipeline_parallel.py`), torch 2.11 (`torch/distributed/pipelining/schedules.py`), Megatron-LM
(`megatron/training/arguments.py`, `megatron/core/transformer/transformer_config.py`), DeepSpeed 0.19.8
(`deepspeed/runtime/pipe/engine.py`, `runtime/engine.py`, `runtime/zero/offload_config.py`,
deepspeed.ai/tutorials/autotp-training), llm-foundry (its FSDP section), Megatron-Core's developer guide (optimizer CPU
offload).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from functools import cache

from simulator.columns.plan_table import CP_METHODS
from simulator.config.adapter import KINDS, PACKED
from simulator.config.model import Model
from simulator.config.overlap_sites import MODES, NONE, USERBUFFERS
from simulator.config.plan import COPY_ENGINE
from simulator.config.runtime import LOW_PRECISION, TF32
from simulator.pipeline.schedules.registry import SCHEDULES, schedules_that
from simulator.runtimes.called import CALLED, called
from simulator.runtimes.library import RuntimeSpec, are_modules, is_described, runtime_names, runtime_spec
from simulator.runtimes.parts import MODULES, ToolsSpec
from topology.errors import BadPlan, UserError


class KvHeads(StrEnum):
    """What the framework does when the tensor-parallel degree does not divide the key/value heads."""

    DIVIDE = "divide"  # refused
    REPLICATE = "replicate"  # copies heads; the degree must be a multiple of their number
    SLOW = "slow"  # accepts it, but attention gains nothing from more ranks than key/value heads


class ExpertGrid(StrEnum):
    """The ranks that expert parallelism may use."""

    SHARD_CONTEXT_TENSOR = "shard-context-tensor"  # dp_shard * cp * tp
    WORLD = "world"  # world / (etp * pp)
    DATA = "data"  # the data-parallel ranks
    STAGE = "stage"  # anything inside one pipeline stage
    NONE = "none"


# Parts of a model that a framework's own model code cannot express; without them a run would train another model. In
# words that follow "has no".
FEATURES: dict[str, Callable[[Model], bool]] = {
    "biases in latent attention": lambda m: m.latent is not None and m.qkv_bias,
    "learned positions": lambda m: m.learned_positions > 0,
    "layer norms or norms with biases": lambda m: m.norm != "rmsnorm" or m.norm_bias,
    "more or fewer than two norms in a layer": lambda m: m.norms_per_layer != 2,
    "network without a final norm": lambda m: not m.final_norm,
    "feed-forward without a gate": lambda m: not m.gated_mlp,
    "query norm over all heads": lambda m: m.qk_norm and m.qk_norm_wide,
    "biases other than on q, k and v": lambda m: m.attention_out_bias or m.mlp_bias or m.head_bias,
    "attention without rotary positions": lambda m: not m.rotary,
    "parallel residuals": lambda m: m.parallel_residual,
    "biases on experts": lambda m: m.moe is not None and m.moe.expert_bias,
}

LEANER = ("none", "selective", "selective-op", "full")  # each value keeps less in memory than the one before
TORCH_SCHEDULES = schedules_that(lambda kind: kind.in_torch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One training framework. Empty `zero_stages` means that it shards by a degree (FSDP2), not by a ZeRO stage."""

    name: str
    title: str
    costed_as: str = ""  # the runtime that runs its plans, if it is not one itself
    kv_heads: KvHeads = KvHeads.REPLICATE
    expert_grid: ExpertGrid = ExpertGrid.STAGE
    sequential_experts: bool = False  # experts under tensor parallelism need sequence parallelism
    splits_experts: bool = False  # a plan may state how many ranks split experts (`etp`)
    axes: frozenset[str] = frozenset({"tp", "cp", "pp", "ep"})  # degrees that may exceed one
    zero_stages: tuple[int, ...] = ()
    searched_zero_stages: tuple[int, ...] = ()  # empty: all of them
    shard_degree: bool = True  # dp_shard may exceed one without a ZeRO stage
    fills: str = "dp_shard"  # the data-parallel degree that takes all remaining GPUs
    schedules: tuple[str, ...] = TORCH_SCHEDULES
    overlaps: tuple[str, ...] = ()  # modes of overlap of tensor-parallel collectives besides "none"
    overlap_by_site: bool = False  # each communication of a layer may have its own
    ep_overlaps: tuple[str, ...] = ()  # modes of the experts' all-to-all besides "none"; the last hides most
    ep_overlap_versions: tuple[str, ...] = ()  # versions that have these; empty: all
    fsdp_exchanges: tuple[str, ...] = ()  # what exchanges FSDP's parameters and gradients besides NCCL
    cp_methods: tuple[str, ...] = ()  # methods of context parallelism; empty: the runtime's own
    torch_pipelining: bool = False  # uses torch.distributed.pipelining, with its checks
    undescribed_recomputes: tuple[str, ...] = ()  # its recompute modes, if `simulator.runtimes` does not describe it
    any_recompute: bool = False  # other recompute words are passed on to the runtime
    default_recompute: str = "none"  # the recompute mode of a run that states none
    fsdp_needs: str = ""  # the option that turns dp_shard, or a ZeRO stage above 1, into FSDP
    interleaves_by_rank: bool = False  # interleaved schedules require a multiple of pp micro batches
    sequence_over_tensor: bool = False  # a sequence must divide by 2 x cp x tp, with or without sequence parallelism
    sequence_parallel: bool = True
    sequence_parallel_default: bool = True  # on with tensor parallelism unless switched off
    lists_layers: bool = False  # layers can be stated for each stage
    lists_recompute: bool = False  # recomputation can be stated for each stage
    uneven_stages: bool = True  # may put different numbers of layers on stages by default
    pads_vocabulary: bool = False
    ulysses: bool = False  # context parallelism splits heads
    repeats_keys: bool = False  # even over more ranks than there are key/value heads
    zero_pipeline: bool = True  # supports ZeRO-2 and 3 with pipeline parallelism
    one_axis: bool = False  # allows one of tp, cp and ep, and pipelines with tp only
    ddp_alone: bool = False  # plain replication (dp_replicate alone) excludes tp and pp
    overlap_needs_compile: bool = False
    overlap_needs_eager: bool = False
    parameter_offload: bool = False  # parameters, gradients and optimizer state may be kept in host memory
    optimizer_offload_stages: tuple[int, ...] = ()  # ZeRO stages with which the optimizer state alone may be
    offloads_layers: bool = False  # activations of a number of layers may be kept in host memory
    wraps_one_rank: bool = True  # uses FSDP even if it shards over one rank
    empty_stages: bool = False  # a stage may hold no layer, or the embedding or the head alone
    adapters: tuple[str, ...] = ()  # kinds of adapters that it trains (`simulator.config.adapter.KINDS`)
    adapter_dropout: bool = True
    adapters_whole: bool = (
        False  # trains them only if tensor parallelism divides no matrix and layers are neither sparse nor latent
    )
    base_as_stored: bool = False  # frozen weights have the type of stored parameters
    packed_bases: tuple[str, ...] = ()  # types below 16 bits that it supports for frozen weights
    sharded_bases: tuple[str, ...] = ()  # such types that it shards over data-parallel ranks
    dtypes: tuple[str, ...] = ()  # empty: any
    # The following is known of the executor only; for other frameworks nothing is refused because of it.
    networks_without: frozenset[str] = frozenset()  # keys of `FEATURES`
    cp_dtypes: tuple[str, ...] = ()  # types of attention under context parallelism; empty: any
    optimizers: tuple[str, ...] = ()  # empty: any
    fsdp_by_degree_only: bool = False  # a ZeRO stage does not imply FSDP
    uneven_widths: bool = False  # divides a width or vocabulary that tp does not divide into unequal parts
    tied_pipeline: bool = True  # tied embedding and head may be on different stages
    whole_expert_groups: bool = False  # experts are on whole tensor-parallel groups: ep is a multiple of tp
    drops_tokens: bool = True  # experts may have a capacity
    own_kernels_only: bool = False  # has only its own dispatchers, products of experts and fused kernels
    skews_experts: bool = True  # can be asked for a given imbalance of experts
    latent_cp_methods: tuple[str, ...] = ()  # methods supported with latent attention; empty: all
    window_cp_methods: tuple[str, ...] = ()  # methods supported with sliding windows; empty: all
    norm_recomputed_unsharded: bool = True  # recomputes operators around query-head norms under tp without FSDP
    why_unpacked: str = ""  # why it has no packed frozen weights
    cuts_with_savers: bool = True  # supports its memory savers with tensor parallelism
    compiles_away: bool = True  # supports activation offload with compiled layers
    compiled_context_tensor: bool = True  # supports compiled blocks with both context and tensor parallelism

    @property
    def runtime_name(self) -> str:
        """The runtime that runs its plans."""
        return self.costed_as or self.name

    @property
    def tools(self) -> ToolsSpec:
        """Our tools for its plans: what runs them, the target of exports, and the format of logs."""
        return ToolsSpec() if self.costed_as else runtime_spec(self.name).tools

    @property
    def offloads(self) -> tuple[str, ...]:
        """The values of `offload` that it supports."""
        known = {"none": True, "optimizer": self.optimizer_offload_stages, "parameters": self.parameter_offload}
        return tuple(word for word, has in known.items() if has)

    @property
    def recomputes(self) -> tuple[str, ...]:
        """The recompute modes in its description; the last one keeps least in memory."""
        if self.undescribed_recomputes:
            return self.undescribed_recomputes
        return tuple(word for word in LEANER if word in runtime_spec(self.name).recompute)

    def recomputes_as(self, word: str) -> bool:
        """Return whether it supports a recompute word: a mode, or modules that are recomputed together."""
        return word in self.recomputes or (not self.undescribed_recomputes and are_modules(word, self._described))

    @property
    def modules_text(self) -> str:
        """How the modules that it can recompute are written."""
        modules = () if self.undescribed_recomputes else tuple(self._described.recompute_modules)
        return f", or modules joined by {MODULES}: {', '.join(modules)}" if modules else ""

    @property
    def _described(self) -> RuntimeSpec:
        return runtime_spec(self.name)


TORCHTITAN = Framework(
    name="torchtitan",
    title="torchtitan 0.3",
    norm_recomputed_unsharded=False,
    kv_heads=KvHeads.DIVIDE,
    expert_grid=ExpertGrid.SHARD_CONTEXT_TENSOR,
    overlaps=("async",),  # parallelism.enable_async_tensor_parallel
    ep_overlaps=("combined",),  # parallelism.pipeline_parallel_expert_parallel_overlap
    ep_overlap_versions=("0.2",),
    cp_methods=(
        "all_gather",
        "ring",
    ),  # context_parallel_rotate_method allgather and alltoall; the latter passes shards round a ring
    dtypes=("float32", TF32, "bfloat16", *LOW_PRECISION),  # training.mixed_precision_param; no scaling of the loss
    cp_dtypes=("bfloat16",),  # shards keys of fused 16-bit attention; 0.2.2 fails in its first step with float32
    lists_layers=True,  # pipeline_parallel_module_fqns_per_model_part
    # Pipeline_parallel.py: generate_llm_fqn_per_model_part counts embedding and output as a layer each
    empty_stages=True,
    torch_pipelining=True,
    ddp_alone=True,
    overlap_needs_compile=True,
    default_recompute="selective",
    sequence_over_tensor=True,
    parameter_offload=True,  # training.enable_cpu_offload: FSDP2's CPUOffloadPolicy
    wraps_one_rank=False,
    adapters=("lora",),
    adapter_dropout=False,
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
    empty_stages=True,
    torch_pipelining=True,
    overlap_needs_compile=True,
    parameter_offload=True,
    adapters=KINDS,
    packed_bases=PACKED,
    sharded_bases=("nf4", "gptq"),
)
MESHWRIGHT = Framework(
    name="meshwright",
    title="meshwright's executor",
    kv_heads=KvHeads.DIVIDE,
    expert_grid=ExpertGrid.SHARD_CONTEXT_TENSOR,
    overlaps=tuple(mode for mode in MODES if mode != NONE),
    overlap_by_site=True,
    fsdp_exchanges=(COPY_ENGINE,),  # executor/overlap/fsdp_exchange.py
    cp_methods=CP_METHODS,
    schedules=tuple(SCHEDULES),
    lists_layers=True,
    lists_recompute=True,
    torch_pipelining=True,
    overlap_needs_eager=True,
    networks_without=frozenset(FEATURES),
    dtypes=("float64", "float32", "tf32", "bfloat16", "float16"),
    optimizers=("adamw",),
    fsdp_by_degree_only=True,
    uneven_widths=True,
    adapters=("lora", "frozen"),
    adapter_dropout=False,
    adapters_whole=True,
    base_as_stored=True,
    empty_stages=True,
    tied_pipeline=False,
    whole_expert_groups=True,
    drops_tokens=False,
    skews_experts=False,
    own_kernels_only=True,
    latent_cp_methods=("all_to_all",),  # in a ring, values must be as wide as keys
    window_cp_methods=("all_to_all",),  # attention to the parts of a ring has no windows
    # torch 2.13: "derivative for aten::_weight_int4pack_mm_for_cpu is not implemented", nor for the CUDA one.
    why_unpacked="torch's int4 products have no derivative, NF4 is torchao's and bitsandbytes': ask for pytorch",
    cuts_with_savers=False,
    compiles_away=False,
    compiled_context_tensor=False,  # torch 2.13's partitioner fails on some blocks
)
MEGATRON = Framework(
    name="megatron-lm",
    title="Megatron-LM",
    fills="dp_replicate",
    kv_heads=KvHeads.REPLICATE,
    expert_grid=ExpertGrid.WORLD,
    sequential_experts=True,  # megatron/core/transformer/moe/moe_layer.py: MoELayer.forward
    splits_experts=True,  # --expert-tensor-parallel-size
    zero_stages=(0, 1, 2, 3),
    searched_zero_stages=(0, 1),  # 2 and 3 mean another implementation (Megatron-FSDP), asked for by name
    schedules=("1F1B", "Interleaved1F1B"),
    overlaps=(USERBUFFERS,),  # --tp-comm-overlap
    ep_overlaps=("combined", "delay_wgrad"),  # --overlap-moe-expert-parallel-comm, --delay-wgrad-compute
    cp_methods=CP_METHODS,  # --cp-comm-type p2p, allgather, a2a
    lists_layers=True,  # --pipeline-model-parallel-layout
    fsdp_needs="--use-megatron-fsdp (or --use-torch-fsdp2)",
    interleaves_by_rank=True,
    sequence_parallel_default=False,
    uneven_stages=False,
    pads_vocabulary=True,
    # --cpu-offloading-num-layers, for fewer than all, without pipelines or recomputation (transformer_config.py)
    offloads_layers=True,
    optimizer_offload_stages=(1,),  # --optimizer-cpu-offload, with the precision-aware distributed optimizer
    adapters=("lora", "dora"),  # by Megatron-Bridge
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
    undescribed_recomputes=("none", "full"),
    sequence_parallel=False,
    sequence_parallel_default=False,
    ulysses=True,
    repeats_keys=True,  # deepspeed/runtime/sequence_parallel/ulysses_sp.py: kv_replication_factor
    cp_methods=("all_to_all",),
    zero_pipeline=False,
    parameter_offload=True,  # offload_param, with ZeRO-3
    optimizer_offload_stages=(1, 2, 3),  # offload_optimizer
    # AutoTP has groups of its own, Ulysses a mesh of data and sequence ranks that must fill the world, and AutoEP is
    # compatible with neither (module_inject/auto_ep_folding.py, and Transformers' plans for experts). Besides data and
    # pipeline ranks, a PipelineModule's topology has ranks only for layers that are tensor-parallel by themselves.
    one_axis=True,
    adapters=KINDS,  # by peft
    packed_bases=("nf4", "gptq"),
    sharded_bases=("nf4",),
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
    undescribed_recomputes=("none", "selective", "full"),
    sequence_parallel_default=False,
    pads_vocabulary=True,
    ulysses=True,
    cp_methods=("all_to_all",),
    zero_pipeline=False,
    parameter_offload=True,
    optimizer_offload_stages=(1, 2, 3),
)
LLM_FOUNDRY = Framework(
    name="llm-foundry",
    title="llm-foundry",
    expert_grid=ExpertGrid.NONE,
    axes=frozenset(),
    zero_stages=(0, 2, 3),
    schedules=(),
    sequence_parallel=False,
    sequence_parallel_default=False,
    adapters=("lora",),
)
ANY = Framework(
    name="any",
    title="any framework",
    costed_as="pytorch",
    undescribed_recomputes=("none", "full"),
    any_recompute=True,
    lists_layers=True,
    lists_recompute=True,
    overlaps=("chunked", "async", "fused"),
    ep_overlaps=("combined", "delay_wgrad"),
    fsdp_exchanges=(COPY_ENGINE,),
    cp_methods=CP_METHODS,
    zero_stages=(0, 1, 2, 3),
    parameter_offload=True,
    optimizer_offload_stages=(1, 2, 3),
    adapters=KINDS,
    packed_bases=PACKED,
    sharded_bases=PACKED,
)

FRAMEWORKS = {
    framework.name: framework
    for framework in (TORCHTITAN, MEGATRON, DEEPSPEED, MEGATRON_DEEPSPEED, LLM_FOUNDRY, PYTORCH, MESHWRIGHT, ANY)
}


def framework_named(name: str) -> Framework:
    """Return the framework a person asked for, `name` or `name@version`. Raises UserError with near names."""
    bare = called(name)[0]
    found = FRAMEWORKS.get(bare) or _of_description(bare)
    if found is not None:
        return found
    near = get_close_matches(bare, dict.fromkeys((*FRAMEWORKS, *runtime_names(), *CALLED)), n=3)
    raise UserError(
        f"unknown framework {name!r}",
        why=f"rules exist for {', '.join(FRAMEWORKS)}",
        remedy=f"did you mean {' or '.join(near)}?" if near else "use --framework any for the rules all share",
    )


def framework_of_runtime(name: str) -> Framework:
    """Return the framework whose rules apply to a runtime; for a runtime without a description, rules that all
    share.
    """
    bare = called(name)[0]
    return FRAMEWORKS.get(bare) or _of_description(bare) or ANY


@cache
def _of_description(name: str) -> Framework | None:
    """Return the framework of a runtime that has a description only: it accepts what the similar runtime's does."""
    if not is_described(name):
        return None
    spec = runtime_spec(name)
    rules = FRAMEWORKS.get(spec.rules or spec.like or spec.names[0])
    if rules is None or rules is ANY or rules.name == spec.names[0]:
        return None if rules is ANY else rules
    return replace(rules, name=spec.names[0], title=spec.names[0])


def features(model: Model) -> tuple[str, ...]:
    """Return the names of the `FEATURES` that a model has."""
    return tuple(name for name, has in FEATURES.items() if has(model))


def torchtitan_family(model: Model) -> str:
    """Return which of torchtitan's models can express this one: `llama3` or `qwen3`. Raises BadPlan if none can."""
    plain = model.gated_mlp and model.latent is None and not model.qkv_bias and not model.sliding_layers
    if plain and model.moe is None and not model.qk_norm and model.head_dim * model.heads == model.hidden:
        if not model.tied_embeddings:
            return "llama3"
        why = "its Llama has an embedding and a head of their own, and this model ties them"
    elif plain and model.qk_norm and (model.moe is None or (model.moe.shared_ffn == 0 and model.dense_layers == 0)):
        return "qwen3"
    else:
        why = "only its Llama and its Qwen 3 are run here"
    raise BadPlan(
        f"no model of torchtitan has the network of {model.name}",
        why=why,
        remedy="--command runs a torchtitan of your own; --framework meshwright runs it here",
    )
