"""The parts of a runtime's description: what it keeps, sends, saves and runs again, and what its host costs."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    adapter_targets: tuple[str, ...] = ()  # peft's where there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """`master_weights`: a float32 copy alongside 16-bit parameters. Gradient dtypes are `param`, `compute`, `reduce`.

    `placeholder_gradients`: where products add weight gradients up themselves, autograd is handed a tensor that nobody
    fills, one for every distinct shape of weight, kept for good. `gradient_passes_bytes` are moved once a step for
    every element of a rank's gradients before they are sharded, `owned_gradient_passes_bytes` for each that it updates.
    `gradients_freed`: no gradient is there when a step begins (`zero_grad(set_to_none=True)`), so the loss begins its
    backward pass before there are any. `whole_embedding_gradient`: where tensor-parallel ranks have cut the vocabulary,
    a rank's gradient of the embedding has all rows, to be summed over ranks. `norms_in_backward`: where gradients are
    updated with as they come, each is read once more for its norm.
    """

    master_weights: bool
    gradient_dtype: str
    unsharded_gradient_dtype: str
    placeholder_gradients: bool = False
    gradient_passes_bytes: float = 0.0
    owned_gradient_passes_bytes: float = 0.0
    gradients_freed: bool = False
    whole_embedding_gradient: bool = False
    norms_in_backward: bool = False
    update_copies: float = 0.0  # of what a rank updates, that the update makes for a moment
    offloads_gradients: bool = True  # sharded gradients go where an offloaded optimizer is


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSpec:
    """`wraps_one`: tensor- and pipeline-parallel plans are wrapped though nothing is sharded, `always` or where types
    `differ`.

    `flat_parameters`: a unit's parameters and gradients are one flat tensor (FSDP1).
    """

    copy_in_copy_out: bool
    prefetch: int
    overlap: bool
    wraps_one: Literal["never", "differ", "always"] = "never"
    flat_parameters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSpec:
    """`bucket_bytes` of gradients are reduced at once; 0 is a layer's. `every_micro_batch`: not only the last one's.

    A sharded optimizer's traffic is a layer's at once, or `bucket_elements`, or so many for each data-parallel rank,
    whatever is most. It runs behind backward passes with `sharded_overlap`, and gathers of what was updated behind the
    next forward pass unless `gathers_overlap` is off. `sums_whole`: its gradients are summed whole on every rank, which
    takes what it owns.
    """

    overlap: bool
    sharded_overlap: bool = False
    gathers_overlap: bool = True
    sums_whole: bool = False
    bucket_copy: bool
    bucket_bytes: float = 0.0
    bucket_elements: float = 0.0
    bucket_elements_per_rank: float = 0.0
    every_micro_batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSpec:
    """DeepSpeed's buffers, in elements: `buckets` contiguous ones of `bucket_elements` that gradients are copied to,
    and `update_elements` that a rank of ZeRO-3 updates at once.
    """

    bucket_elements: float
    buckets: int
    update_elements: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """`embedding_weight` and `head_weight`: how many layers the splitter counts them as. `receive_buffers`: a stage has
    one for every micro batch and direction, for good. `keeps_outputs`: what stages give lives until the step ends.
    `caches_outputs`: until its backward pass has run, logits of the last stage too. `ends_fill_stages`: layers that do
    not divide by the stages are made to by counting the head, or embedding and head, as one layer each.
    `by_arithmetic`: stages take layers until they have their share of all products, those of the head too;
    `head_weight` is then the head's products over a layer's, which follows from the model.
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
    layer, per step, per token loaded (a step waits for its data). `synchronizes`: when the host waits for the device
    after every pass of a micro batch instead of running ahead: `never`, in a `pipeline` without virtual stages, or
    `always`. With `plain_tensors` neither tensor parallelism nor selective recomputation goes through Python for every
    operator.
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
    norm_to_host: bool = False  # the host reads the norm of gradients before it launches their clipping
    data_spread: float = 0.0  # of `data_token_s` from process to process: standard deviation over median
    # Known from measurements only: what a layer's forward and backward cost more where it is sharded, replicated, cut
    # by tensor parallelism, sees a part of the sequence, has experts, exchanges their tokens, or is sharded and cut at
    # once; what dispatching a layer operator by operator costs under selective recomputation; and the host's work of a
    # step outside its layers, which runs ahead of the device where that is the slower one: of any step, and what it is
    # more (embedding, head, norms, update) where parameters are sharded, replicated or cut, or sequences are; what a
    # pass of a pipeline's stage costs more: its action in the schedule, its messages; and what running a layer again
    # costs more where FSDP wraps it.
    fsdp_layer_s: float = 0.0
    ddp_layer_s: float = 0.0
    tp_layer_s: float = 0.0
    cp_layer_s: float = 0.0
    moe_layer_s: float = 0.0
    ep_layer_s: float = 0.0
    fsdp_tp_layer_s: float = 0.0
    tp_rank_layer_s: float = 0.0  # for each tensor-parallel rank, in a stage of a pipeline; known from whole runs only
    pp_pass_s: float = 0.0
    fsdp_again_s: float = 0.0
    selective_s: float | None = None  # None: as any other recomputed region
    rest_s: float = 0.0
    fsdp_rest_s: float = 0.0
    ddp_rest_s: float = 0.0
    tp_rest_s: float = 0.0
    cp_rest_s: float = 0.0
    cut_step_s: float = 0.0  # what `step_s` is more where parameters or sequences are sharded or cut

    def dispatches(self, recompute: str) -> bool:
        """Return whether layers are recomputed operator by operator, each of them seen by a dispatch mode."""
        return recompute == "selective-op" and self.selective_s is not None

    def wrapping_s(self, recompute: str) -> float:
        """Return the host seconds that wrapping one layer for recomputation adds."""
        return self.checkpoint_s if self.selective_s is None or not self.dispatches(recompute) else self.selective_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Operators by part of the network. `head_peak`: tensors alive together where backward of the loss begins, by
    moment.

    `head_at_once`: the loss has its gradients in the forward pass, so that these are alive there.
    `head_left`: tensors of the loss's forward pass that are gone by then, and whose blocks in the allocator's pool are
    too small for what backward asks for. Both are of a loss that is not compiled, unless `compiled_head_peak` is given.
    `cut_head_peak` and `compiled_cut_head_peak` go before them where tensor-parallel ranks have cut the vocabulary.
    `metrics_after`: tensors of metrics after a micro batch's backward pass. For their sake the logits are kept until
    the next forward pass has given its own.
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
    fused_head_peaks: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of losses that others fuse
    head_at_once: bool = False
    head_left: tuple[str, ...] = ()
    metrics_after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSpec:
    """One recompute mode. `recomputes` are operator name patterns run again in the backward pass.

    With `keeps` the layer stores just those tensors; with `drops`, patterns as well, it stores everything except what
    those operators save. `layers` is the share of layers the mode applies to.
    """

    recomputes: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    layers: float = 1.0

    def runs_again(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.recomputes)

    def lets_go(self, name: str) -> bool:
        """Return whether what an operator saves is made again instead."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.drops)


MODULES = "+"  # joins the words of modules that are recomputed together into one mode


class RecomputeModes(dict[str, RecomputeSpec]):
    """The recompute modes of a runtime by name, and those that modules make together: `core_attn+moe_act`."""

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
    """What here runs a runtime, writes for it and reads what it logs; empty where nothing does.

    `layers`: whose layers the executor runs in a calibration, `trainer`: whose training step for a plan. `export`: the
    target of `planner export` that its plans are written for, `program`: whose program launchers start. `log`: the
    format of its lines; `logs_reserved`: the memory in them is what the allocator reserved. `compiles`: torch.compile
    can be switched on and off.
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
    """An older generation of the software: stated versions lower than `before`, or of a month earlier than
    `before_date`.

    `overrides` replaces parts of the description, in the same form.
    """

    before: str = ""
    before_date: str = ""
    overrides: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSpec:
    """What the recipes that come with a runtime set of runs of one kind: keys of a case's `runtime` and `plan`.

    The kind: with `experts`, on one of `gpus` and with products in one of `low_precision` (a recipe of
    `simulator.kernels.low_precision`), where these are said, with loads that are forced to be `balanced`.
    """

    experts: bool = False
    gpus: tuple[str, ...] = ()
    low_precision: tuple[str, ...] = ()
    balanced: bool = False
    runtime: JsonObject = field(default_factory=dict)
    plan: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterSpec:
    """A newer generation of the software: stated versions from `since` on, months from `since_date` on; `overrides` as
    in `EarlierSpec`.

    `loss_pieces` is into how many equal pieces a rank's sequence is cut for the loss.
    """

    since: str
    since_date: str = ""
    loss_pieces: int = 1
    overrides: JsonObject = field(default_factory=dict)
