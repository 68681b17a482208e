"""The parts of a runtime's description: state, communication, saved and recomputed tensors, and host costs."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from simulator.kernels.operators import OperatorSpec
from topology.codec import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeDefaults:
    param_dtype: str
    compute_dtype: str
    reduce_dtype: str
    optimizer: str
    compile: bool
    savers: tuple[str, ...] = ()
    adapter_targets: tuple[str, ...] = ()  # peft's defaults, if it has none of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """`master_weights`: a float32 copy in addition to 16-bit parameters. Gradient dtypes are `param`, `compute`,
    `reduce`.

    `placeholder_gradients`: products add weight gradients to buffers themselves, and autograd gets an unfilled tensor,
    one for every distinct shape of weight, which is never freed. `gradient_passes`: how often a step reads or writes a
    rank's gradients before sharding, in the type of the reduction; `owned_gradient_passes_bytes` are moved for each
    element that the rank updates. `whole_embedding_gradient`: where tensor-parallel ranks divide the vocabulary, a
    rank's gradient of the embedding still has all rows, to be summed over ranks. `wide_sums`: types of parameters whose
    gradients are added, after every micro batch, to float32 sums that every rank has of all and that are reduced.
    `norms_in_backward`: where gradients update parameters one by one, each is read once more for its norm. `clips`:
    gradients are clipped by their norm. `flattens_elements`: gradients for a sharded optimizer are flattened after the
    last backward pass, so many elements at once to reduce them and then all that the rank updates.
    """

    master_weights: bool
    gradient_dtype: str
    unsharded_gradient_dtype: str
    placeholder_gradients: bool = False
    gradient_passes: float = 0.0
    owned_gradient_passes_bytes: float = 0.0
    whole_embedding_gradient: bool = False
    wide_sums: tuple[str, ...] = ()
    norms_in_backward: bool = False
    clips: bool = True
    flattens_elements: float = 0.0
    update_copies: float = 0.0  # temporary copies of what a rank updates, made by an update of a kernel an operator
    offloads_gradients: bool = True  # sharded gradients are kept where an offloaded optimizer is


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSpec:
    """`wraps_one`: tensor- and pipeline-parallel plans are wrapped even if nothing is sharded, `always`, where types
    `differ`, or where types differ or there are stages, replicas or whole experts too (`grouped`). `casts_own`: for
    tensor parallelism alone, eager layers are cast without it.

    `flat_parameters`: a unit's parameters and gradients are one flat tensor (FSDP1). `root_ends`: embedding and
    head are what the root unit of FSDP2 has, which stays gathered, and whose gradients are reduced, when a backward
    pass ends.
    """

    copy_in_copy_out: bool
    prefetch: int
    overlap: bool
    wraps_one: Literal["never", "differ", "grouped", "always"] = "never"
    casts_own: bool = False
    flat_parameters: bool = False
    root_ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSpec:
    """`bucket_bytes` of gradients are reduced at once; 0: those of a layer. `every_micro_batch`: after every micro
    batch, not only after the last.

    A sharded optimizer exchanges at once the largest of a layer, `bucket_elements`, and the elements stated per
    data-parallel rank. With `sharded_overlap` this runs during backward passes, and updated parameters are gathered
    during the next forward pass unless `gathers_overlap` is off. `sums_whole`: gradients are summed whole on every
    rank, which then takes its shard. `broadcasts`: a rank owns whole tensors, and updated ones go out in a broadcast
    for each rank that owns some, one after the other, where others gather.
    """

    overlap: bool
    sharded_overlap: bool = False
    gathers_overlap: bool = True
    sums_whole: bool = False
    broadcasts: bool = False
    bucket_copy: bool
    bucket_bytes: float = 0.0
    bucket_elements: float = 0.0
    bucket_elements_per_rank: float = 0.0
    every_micro_batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSpec:
    """DeepSpeed's buffers, in elements: `buckets` contiguous buffers of `bucket_elements` for gradients, and the
    `update_elements` that a rank of ZeRO-3 updates at once.
    """

    bucket_elements: float
    buckets: int
    update_elements: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """`embedding_weight` and `head_weight`: as how many layers the splitter counts them. `receive_buffers`: a stage has
    a permanent buffer for every micro batch and direction. `keeps_outputs`: outputs of stages are kept until the step
    ends. `caches_outputs`: outputs, the last stage's logits included, are kept until their backward pass has run.
    `ends_fill_stages`: if layers do not divide by the stages, the head, or embedding and head, count as one layer each.
    `by_arithmetic`: stages take layers until they have their share of all products, the head's included; `head_weight`
    is then the head's products over a layer's, from the model.
    """

    embedding_weight: float
    head_weight: float
    p2p_overlap: bool
    scatter_p2p: bool
    receive_buffers: bool = False
    keeps_outputs: bool = False
    caches_outputs: bool = False
    ends_fill_stages: bool = False
    by_arithmetic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """Host seconds: per kernel launch, per operator on DTensors, per collective, per layer and pass, per recomputed
    layer, per step, per token loaded. A step waits for its data; with `loads_ahead` they are loaded while the device
    still works, unless every step is logged. `synchronizes`: when the host waits for the device after every pass of a
    micro batch instead of running ahead: `never`, in a `pipeline` without virtual stages, or `always`. With
    `keeps_memory` malloc keeps the memory of lists that are written again and again. With `plain_tensors` neither
    tensor parallelism nor selective recomputation goes through Python for every operator.
    """

    launch_s: float
    backward_launch_s: float
    dtensor_launch_s: float
    collective_s: float
    forward_layer_s: float
    backward_layer_s: float
    checkpoint_s: float
    step_s: float
    synchronizes: Literal["never", "micro_batch", "pipeline", "always"] = "never"
    plain_tensors: bool = False
    data_token_s: float = 0.0
    loads_ahead: bool = False
    keeps_memory: bool = False
    norm_to_host: bool = False  # the host reads the norm of gradients before it launches the clipping
    data_spread: float = 0.0  # spread of `data_token_s` between processes: standard deviation over median
    # Known from measurements only. `*_layer_s`: added to a layer's forward and backward pass if it is sharded,
    # replicated, divided by tensor or context parallelism, has experts, exchanges their tokens, or is both sharded and
    # divided. `selective_s`: dispatching a layer operator by operator under selective recomputation. `rest_s`: the
    # host's work in a step outside its layers, which runs ahead of a slower device; `*_rest_s`: added to it (embedding,
    # head, norms, update) if parameters are sharded, replicated or divided, or sequences are. `pp_pass_s`: added to a
    # pass of a pipeline stage for its action and messages. `fsdp_again_s`: added to recomputing a layer that FSDP
    # wraps.
    fsdp_layer_s: float = 0.0
    ddp_layer_s: float = 0.0
    tp_layer_s: float = 0.0
    cp_layer_s: float = 0.0
    moe_layer_s: float = 0.0
    ep_layer_s: float = 0.0
    fsdp_tp_layer_s: float = 0.0
    tp_rank_layer_s: float = 0.0  # per tensor-parallel rank, in a pipeline stage; from whole runs only
    pp_pass_s: float = 0.0
    fsdp_again_s: float = 0.0
    selective_s: float | None = None  # None: like any other recomputed region
    rest_s: float = 0.0
    fsdp_rest_s: float = 0.0
    ddp_rest_s: float = 0.0
    tp_rest_s: float = 0.0
    cp_rest_s: float = 0.0
    cut_step_s: float = 0.0  # added to `step_s` if parameters or sequences are sharded or divided
    cast_launches: float = 1.0  # the host's time to launch a cast of autocast, a bare operator, over that of a launch
    hop_launches: float = 0.0  # launches that sending or receiving a part of a ring is worth
    # Launches that a parameter is worth when it is updated after the backward pass (norm, clipping, optimizer), and
    # when its gradient is added to that of earlier micro batches.
    update_launches: float = 0.0
    accumulate_launches: float = 0.0

    def dispatches(self, recompute: str) -> bool:
        """Return whether layers are recomputed operator by operator through a dispatch mode."""
        return recompute == "selective-op" and self.selective_s is not None

    def wrapping_s(self, recompute: str) -> float:
        """Return the host seconds that wrapping one layer for recomputation adds."""
        return self.checkpoint_s if self.selective_s is None or not self.dispatches(recompute) else self.selective_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Operators by part of the network. `head_peak`: tensors alive together at the start of the loss's backward pass,
    by moment.

    `head_at_once`: the loss computes its gradients in the forward pass, where these tensors are then alive.
    `head_left`: tensors of the loss's forward pass that are freed by then, and whose blocks in the allocator's pool are
    too small for the backward pass. Both apply to a loss that is not compiled, unless `compiled_head_peak` is given.
    `cut_head_peak` and `compiled_cut_head_peak` replace them where tensor-parallel ranks divide the vocabulary.
    `metrics_after`: tensors of metrics after a micro batch's backward pass; for these the logits are kept until the
    next forward pass has computed its own.
    """

    attention: tuple[OperatorSpec, ...]
    latent_attention: tuple[OperatorSpec, ...]
    mlp: tuple[OperatorSpec, ...]
    moe: tuple[OperatorSpec, ...]
    embedding: tuple[OperatorSpec, ...]
    head: tuple[OperatorSpec, ...]
    head_peak: tuple[tuple[str, ...], ...]
    cut_head_peak: tuple[tuple[str, ...], ...] = ()
    compiled_head_peak: tuple[tuple[str, ...], ...] = ()  # empty: the loss is not compiled
    compiled_cut_head_peak: tuple[tuple[str, ...], ...] = ()
    fused_head_peaks: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of losses in third-party kernels
    head_at_once: bool = False
    head_left: tuple[str, ...] = ()
    metrics_after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSpec:
    """One recompute mode. `recomputes` are operator name patterns run again in the backward pass.

    With `keeps` the layer saves only those tensors, and in `keeps_of` those of the operators that it has; with `drops`,
    also patterns, it saves everything except what those operators save. `layers` is the share of layers the mode
    applies to.
    """

    recomputes: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    keeps_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    drops: tuple[str, ...] = ()
    layers: float = 1.0

    def runs_again(self, name: str) -> bool:
        return _matches(name, self.recomputes)

    def lets_go(self, name: str) -> bool:
        """Return whether the tensors that an operator saves are recomputed instead."""
        return _matches(name, self.drops)


@lru_cache(maxsize=1 << 12)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


MODULES = "+"  # joins the names of modules that are recomputed together


class RecomputeModes(dict[str, RecomputeSpec]):
    """The recompute modes of a runtime by name, including those that several modules make together:
    `core_attn+moe_act`.
    """

    def __init__(self, modes: Mapping[str, RecomputeSpec], modules: Mapping[str, RecomputeSpec]) -> None:
        super().__init__(modes)
        self._modules = dict(modules)

    def __missing__(self, word: str) -> RecomputeSpec:
        parts = [self._modules[part] for part in word.split(MODULES)]
        return RecomputeSpec(
            recomputes=tuple(name for part in parts for name in part.recomputes),
            drops=tuple(name for part in parts for name in part.drops),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsSpec:
    """Our tools for a runtime; a field is empty where there is none.

    `layers` and `trainer`: the runtime whose layers the executor runs in a calibration, and whose training step it runs
    for a plan. `export`: the target of `planner export` for its plans; `program`: what launchers start. `log`: the
    format of its log lines; `logs_reserved`: their memory is the allocator's reserved bytes. `compiles`: it is
    described with its layers compiled by torch.compile, too.
    """

    layers: Literal["", "own", "torchtitan"] = ""
    trainer: Literal["", "own", "torchtitan"] = ""
    export: str = "torchrun"
    program: Literal["", "torchtitan", "megatron", "deepspeed"] = ""
    log: str = ""
    logs_reserved: bool = False
    compiles: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierSpec:
    """An older generation of the software: stated versions below `before`, or of a month before `before_date`.

    `overrides` replaces parts of the description of the next newer generation, in the same form.
    """

    before: str = ""
    before_date: str = ""
    overrides: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSpec:
    """Settings of a runtime's own recipes for runs of one kind: keys of a case's `runtime` and `plan`.

    A kind is given by `experts`, `gpus`, `low_precision` (recipes of `simulator.kernels.low_precision`, `any` or
    `none`), `balanced` loads of experts, models of `least_layers` or more, and `sharded` parameters of a model without
    experts in one stage that recomputes nothing; what is not given matches any run.
    """

    experts: bool = False
    sharded: bool = False
    gpus: tuple[str, ...] = ()
    low_precision: tuple[str, ...] = ()
    balanced: bool = False
    least_layers: int = 0
    runtime: JsonObject = field(default_factory=dict)
    plan: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterSpec:
    """A newer generation of the software: stated versions from `since` on, or months from `since_date` on; `overrides`
    as in `EarlierSpec`.

    The loss divides a rank's sequence into `loss_pieces` equal pieces.
    """

    since: str
    since_date: str = ""
    loss_pieces: int = 1
    overrides: JsonObject = field(default_factory=dict)
