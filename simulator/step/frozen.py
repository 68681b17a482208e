"""A rank's parameters where some are frozen: counts of those gathered, stored, and trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats
from simulator.config.adapter import BASE_BYTES, Adapter
from simulator.config.model import Model
from simulator.kernels.operators import OperatorSpec, active_rows, product
from simulator.runtimes.adapted import frozen_projections
from simulator.runtimes.model_operators import operators_for
from simulator.step.context import CostContext
from simulator.step.held import PARTS, Parameters, whole_parameters
from simulator.step.muon import with_matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrices:
    """Elements of the matrices of a layer, without or of routed experts: adapters, frozen ones, and packed ones among
    these.
    """

    adapters: Floats
    frozen: Floats
    packed: Floats


def local_parameters(model: Model, context: CostContext) -> Parameters:
    """Return the parameters per rank, with counts of those trained and of stored numbers."""
    whole, adapter = whole_parameters(model, context), context.runtime.adapter
    if adapter is None:
        return with_matrices(whole, model, context)
    operators = operators_for(model, context.runtime)
    none = np.zeros(len(context.table))
    nothing = _Matrices(adapters=none, frozen=none, packed=none)
    of = {
        "dense_layer": _matrices(operators.dense_layer, context, routed=False),
        "moe_layer": _matrices(operators.moe_layer, context, routed=False),
        "experts": _matrices(operators.moe_layer, context, routed=True),
        "embedding": nothing,
        "head": nothing,
    }
    still = _frozen_elsewhere(model, adapter, whole)
    packed, param, compute, own_type = (context.dtype_bytes(kind) for kind in ("packed", "param", "compute", "trained"))
    wide = param if adapter.packed or not adapter.base_weights else BASE_BYTES[adapter.base_weights]
    used: dict[str, Floats] = {}
    stored: dict[str, Floats] = {}
    trained: dict[str, Floats] = {}
    for part in PARTS:
        here, total = of[part], getattr(whole, part) + none
        frozen = total if adapter.freezes_all else here.frozen + still[part]
        trained[part] = total - frozen + here.adapters
        used[part] = total - here.packed + here.packed * packed / compute + here.adapters
        stored[part] = ((frozen - here.packed) * wide + here.packed * packed) / param + trained[part] * own_type / param
    found, kept, own = (Parameters(**each) for each in (used, stored, trained))  # type: ignore[arg-type]  # its parts
    return replace(found, stored=kept, trained=own)


def frozen_units_keep_inputs(context: CostContext) -> NDArray[np.bool_]:
    """Return for every plan whether frozen layers keep their inputs, and the gradients of these, until a backward pass
    ends.

    FSDP1 attaches the resharding of a frozen unit to the autograd nodes that accumulate the gradients of its inputs,
    and keeps these nodes until a backward pass ends (torch/distributed/fsdp/_runtime_utils.py,
    `_register_post_backward_reshard_only_hook`). A reentrant checkpoint detaches those inputs, so the nodes hold them
    and their gradients. Layers are frozen units where adapters are units of their own (peft/utils/other.py,
    `fsdp_auto_wrap_policy`).
    """
    adapter, spec = context.runtime.adapter, context.spec
    apart = adapter is not None and adapter.freezes_all
    return context.table.fully_sharded & (apart and spec.fsdp.flat_parameters and spec.recompute_stops == "reentrant")


def trained_flops_per_token(model: Model, adapter: Adapter | None, seq_len: int) -> float:
    """Return the FLOPs of a token's step without recomputation: three times those of its forward pass, less the weight
    gradients of frozen matrices. Adapters are not counted, since they are not part of the model.
    """
    whole = 3.0 * model.forward_flops_per_token(seq_len)
    if adapter is None:
        return whole
    if adapter.freezes_all:
        return whole - 2.0 * model.matmul_parameters()
    frozen, h = frozen_projections(model, adapter), model.hidden
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    of_layer = {
        "q": h * q,
        "k": h * kv,
        "v": h * kv,
        "o": q * h,
        **dict.fromkeys(("gate", "up", "down"), h * model.ffn),
    }
    dense = sum(size for name, size in of_layer.items() if name in frozen)
    head = model.vocab * h if "head" in frozen else 0
    return whole - 2.0 * (model.layers * dense + head)


def _matrices(operators: Sequence[OperatorSpec], context: CostContext, *, routed: bool) -> _Matrices:
    adapters, frozen, packed = (np.zeros(len(context.table)) for _ in range(3))
    for operator in operators:
        if not operator.weight or ("e" in operator.weight) is not routed:
            continue
        elements = active_rows(operator, context.table) * product(operator.weight, context.sizes)
        if operator.adapter:
            adapters = adapters + elements
        elif not operator.weight_gradient:
            frozen = frozen + elements
            packed = packed + elements * operator.packed
    return _Matrices(adapters=adapters, frozen=frozen, packed=packed)


def _frozen_elsewhere(model: Model, adapter: Adapter, whole: Parameters) -> dict[str, Floats | float]:
    """Return the frozen parameters outside the matrices of layers, by part of the model."""
    frozen = frozen_projections(model, adapter)
    norms = model.block_norm_parameters if "norms" in frozen else 0
    final = model.norm_parameters if model.final_norm else 0
    tied = model.tied_embeddings and "embedding" not in frozen
    head = (whole.head - final) if "head" in frozen and not tied else 0.0
    return {
        "dense_layer": norms,
        "moe_layer": norms,
        "experts": 0.0,
        "embedding": whole.embedding if "embedding" in frozen else 0.0,
        "head": head + (final if "final_norm" in frozen else 0),
    }
