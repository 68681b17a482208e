"""Memory of a rank: parameters and their state, the tensors that a block saves, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats
from simulator.config.model import Model
from simulator.config.optimizers import OPTIMIZERS, Optimizer
from simulator.config.runtime import Runtime
from simulator.kernels.operators import OperatorSpec, active_rows, parse_matmul, tensor_bytes
from simulator.pipeline.stages import StageLayout
from simulator.runtimes.library import head_left, head_peaks
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.context import CostContext
from topology.units import MIB

State = Literal["parameters", "gradients", "optimizer"]
CAST_EXPERTS = "cast_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of one rank before data-parallel sharding, by part of the network. Arrays of shape (plans,) or
    constants.

    Where some are frozen (`simulator.step.frozen`), the counts are in numbers of the type of products, as data-parallel
    ranks gather them; `stored` has the counts in numbers of the type that trained parameters are stored in, `trained`
    those with gradients and optimizer state.

    Where an optimizer updates hidden `matrices` differently (`simulator.step.muon`), `kept` counts all parameters in
    numbers with the state of the others, and `orthogonal_s` is the additional seconds for the matrices of each part.
    """

    dense_layer: Floats
    moe_layer: Floats
    experts: Floats  # routed experts of one MoE layer
    embedding: Floats
    head: Floats
    stored: Parameters | None = None
    trained: Parameters | None = None
    kept: Parameters | None = None
    matrices: Parameters | None = None
    orthogonal_s: Parameters | None = None

    def of(self, kind: State) -> Parameters:
        """Return the parameters that have a kind of state."""
        if kind == "optimizer" and self.kept is not None:
            return self.kept
        return (self.stored if kind == "parameters" else self.trained) or self

    def of_block(self, block: str) -> tuple[Floats, Floats]:
        """Return (all but routed experts, routed experts) of a block."""
        if block == "moe":
            return self.moe_layer, self.experts
        whole = {"dense": self.dense_layer, "embedding": self.embedding, "head": self.head}[block]
        return whole, 0.0 * self.experts

    def take(self, rows: NDArray[np.intp]) -> Parameters:
        """Return the parameters of the plans `rows`."""
        parts = {name: getattr(self, name)[rows] for name in PARTS}
        others = {name: other.take(rows) for name in OTHERS if (other := getattr(self, name)) is not None}
        return Parameters(**parts, **others)

    def of_stage(self, layout: StageLayout) -> tuple[Floats, Floats]:
        """Return (all but routed experts, routed experts) on pipeline ranks, each of shape (plans, columns)."""
        dense, moe = layout.layers
        shared = (
            dense * self.dense_layer[:, None]
            + moe * self.moe_layer[:, None]
            + layout.first * self.embedding[:, None]
            + layout.last * self.head[:, None]
        )
        return shared, moe * self.experts[:, None]


OTHERS = ("stored", "trained", "kept", "matrices", "orthogonal_s")
PARTS = tuple(f.name for f in fields(Parameters) if f.name not in OTHERS)


def whole_parameters(model: Model, context: CostContext) -> Parameters:
    """Return the model's parameters per rank: matrices divided over tensor-parallel ranks, norms and routers whole."""
    table = context.table
    tp = table["tp"]
    attention = model.attention_parameters / tp + model.block_norm_parameters
    final_norm = model.norm_parameters if model.final_norm else 0
    # A tied head still exists on the last pipeline rank when the embedding lives on another one.
    tied_copy = np.where((table["pp"] > 1) & model.tied_embeddings, model.vocab * model.hidden / tp, 0.0)
    return Parameters(
        dense_layer=attention + model.mlp_parameters(model.ffn) / tp,
        moe_layer=attention + model.moe_shared_parameters + 0 * tp,
        experts=model.expert_parameters / (table["ep"] * table["etp"]),
        embedding=model.vocab * model.hidden / tp + model.learned_positions * model.hidden,
        head=model.head_parameters / tp + final_norm + tied_copy,
    )


def tensors_bytes(
    operators: Sequence[OperatorSpec], context: CostContext, *, without: RecomputeSpec | None = None
) -> Floats:
    """Return the bytes that operators save, without those that the mode `without` recomputes."""
    total = np.zeros(len(context.table))
    for operator in operators:
        if operator.saves and not (without and without.lets_go(operator.name)):
            active = active_rows(operator, context.table)
            for tensor in operator.saves:
                total = total + active * tensor_bytes(tensor, context.sizes, context.dtype_bytes)
    return total


def saved_bytes(operators: Sequence[OperatorSpec], mode: RecomputeSpec, context: CostContext) -> Floats:
    """Return the bytes that a block wrapped in `mode` keeps per micro batch."""
    if mode.keeps:
        zero = np.zeros(len(context.table))
        total = sum((tensor_bytes(x, context.sizes, context.dtype_bytes) for x in mode.keeps), zero)
        for operator in operators:
            for tensor in mode.keeps_of.get(operator.name, ()):
                nbytes = tensor_bytes(tensor, context.sizes, context.dtype_bytes)
                total = total + active_rows(operator, context.table) * nbytes
        return total
    return tensors_bytes(operators, context, without=mode)


def state_bytes(context: CostContext) -> dict[State, float]:
    """Return bytes per parameter of each kind of state, before sharding."""
    kind, trained = context.spec.state.gradient_dtype, context.dtype_bytes("trained")
    return {
        "parameters": context.dtype_bytes("param"),
        "gradients": trained if kind == "param" else context.dtype_bytes(kind),
        "optimizer": optimizer_bytes(context, OPTIMIZERS[context.runtime.optimizer]),
    }


def optimizer_bytes(context: CostContext, chosen: Optimizer) -> float:
    """Return the bytes of state per parameter that an optimizer updates, before sharding.

    It keeps its moments in the type of the parameters it updates: the float32 copy where there is one.
    """
    trained = context.dtype_bytes("trained")
    master = 4.0 if context.spec.state.master_weights and trained < 4 else 0.0
    return chosen.state_bytes(master or trained) + master


def autocast_remembers(runtime: Runtime) -> bool:
    """Return whether 16-bit copies of weights stay until the end of a forward pass. Copies of weights with gradients do
    (torch, aten/src/ATen/autocast_mode.cpp: cached_cast), unless they are cast inside a compiled block.
    """
    return not runtime.compile and (runtime.adapter is None or not runtime.adapter.freezes_all)


def casts_experts(operators: Sequence[OperatorSpec]) -> bool:
    """Return whether a block casts its experts' weights itself (`Tensor.to`): of those autocast remembers no copies."""
    return any(operator.name == CAST_EXPERTS for operator in operators)


def head_peak_bytes(context: CostContext) -> Floats:
    """Return the bytes of the tensors alive together at the start of the loss's backward pass."""

    def largest(moments: Sequence[Sequence[str]]) -> Floats:
        peak = np.zeros(len(context.table))
        for moment in moments:
            tensors = (head_tensor_bytes(x, context) for x in moment)
            peak = np.maximum(peak, sum(tensors, np.zeros(len(context.table))))
        return peak

    whole, cut = (largest(head_peaks(context.spec.layer, context.runtime, cut=cut)) for cut in (False, True))
    return np.where(context.table["tp"] > 1, cut, whole)


def head_tensor_bytes(tensor: str, context: CostContext) -> Floats:
    """Return the bytes of a tensor of the loss. Two pieces of the logits, `2N*one`, are no more than twice the
    logits.
    """
    nbytes, (axes, _, dtype) = tensor_bytes(tensor, context.sizes, context.dtype_bytes), tensor.partition(":")
    if not axes.endswith("*one"):
        return nbytes
    return np.minimum(nbytes, tensor_bytes(f"2*t v:{dtype}", context.sizes, context.dtype_bytes))


def head_cached_bytes(context: CostContext) -> Floats:
    """Return the bytes of logits that a pipeline's last stage keeps to the end of its backward pass without need; those
    kept until the step ends are counted by `between_stages_bytes`.
    """
    pipeline = context.spec.pipeline
    kept = (context.table["pp"] > 1) & (pipeline.caches_outputs and not pipeline.keeps_outputs)
    return np.where(kept, _logits_bytes(context), 0.0)


def _logits_bytes(context: CostContext) -> Floats:
    left = head_left(context.spec.layer, context.runtime)
    tensors = (tensor_bytes(x, context.sizes, context.dtype_bytes) for x in left)
    return np.asarray(sum(tensors, np.zeros(len(context.table))))


def between_stages_bytes(
    context: CostContext, first: NDArray[np.bool_], last: NDArray[np.bool_], in_flight: Floats
) -> tuple[Floats, Floats]:
    """Return the bytes that a pipeline's ranks have in buffers of messages, besides the inputs that backward passes of
    micro batches in flight need, and of outputs that they keep to the end of the step.

    `first` and `last` mark ranks with an end of the network, `in_flight` counts micro batches in flight on a rank; all
    are of shape (plans, ranks), as are the results.
    """
    table, spec = context.table, context.spec.pipeline
    m, v = table.micro_batches[:, None], np.maximum(table["virtual_stages"], 1.0)[:, None]
    message, logits = (tensor_bytes(x, context.sizes, context.dtype_bytes)[:, None] for x in ("u h", "t v"))
    received = kept = np.zeros_like(in_flight)
    if spec.receive_buffers:
        received = message * (np.maximum((v - 1.0 * first) * m - in_flight * v, 0.0) + (v - 1.0 * last) * m)
    if spec.keeps_outputs:
        kept = m * ((v - 1.0 * last) * message + last * logits)
    piped = (table["pp"] > 1)[:, None]
    return np.where(piped, received, 0.0), np.where(piped, kept, 0.0)


def placeholder_bytes(operators: Iterable[OperatorSpec], context: CostContext) -> Floats:
    """Return the bytes of placeholder weight gradients: one for each distinct shape of weight, if the runtime
    has them.
    """
    if not context.spec.state.placeholder_gradients:
        return np.zeros(len(context.table))
    shapes = set()
    for operator in operators:
        if operator.matmul and operator.weight_gradient and operator.weight_gradient_dtype != "compute":
            left, right, out = parse_matmul(operator.matmul)
            shapes.add(" ".join(axis for axis in right if axis not in left or axis not in out))
    weights = (tensor_bytes(shape, context.sizes, context.dtype_bytes) for shape in sorted(shapes))
    return sum(weights, np.zeros(len(context.table)))


def workspace_bytes(architecture: str) -> int:
    """Return the bytes of one cuBLAS handle's workspace on a stream, which no tensor of a step has.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`: 32 MiB on Hopper and Blackwell, else 8
    MiB and 128 KiB. Forward and backward run in threads of their own, each with its handle.
    """
    return 32 * MIB if architecture.lower().startswith(("hopper", "blackwell")) else 8 * MIB + 128 * 1024
