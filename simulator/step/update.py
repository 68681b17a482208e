"""The end of a step: the norm of all gradients, clipping, and the optimizer."""

from __future__ import annotations

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.config.optimizers import OPTIMIZERS
from simulator.config.runtime import DTYPE_BYTES, Runtime
from simulator.config.savers import OPTIMIZER_IN_BACKWARD
from simulator.kernels.low_precision import recipe_of
from simulator.kernels.roofline import UPDATE_BYTES, Roofline
from simulator.runtimes.adapted import trained_dtype
from simulator.runtimes.library import spec_for
from simulator.step.context import CostContext

# Axes over which the gradient norm is summed, and the bytes of each sum.
NORM_AXES = ("dp", "tp", "pipeline")
NORM_BYTES = 4.0
# Launches before the device can continue after the host has read the norm: the kernel that scales gradients.
UPDATE_LAUNCHES = 1.0

# Bytes a fused optimizer moves per parameter it owns in float32: it reads parameter and gradient, writes the parameter,
# and reads and writes every moment. AdamW has two. Clipping reads gradients for the norm, then reads and writes them to
# scale.
PLAIN_BYTES, MOMENT_BYTES = 12.0, 8.0
ADAM_BYTES = PLAIN_BYTES + 2 * MOMENT_BYTES
CLIP_BYTES = UPDATE_BYTES - ADAM_BYTES
NORM_READ_BYTES = CLIP_BYTES / 3
# Tensors of the parameters' type that AdamW reads and writes kernel by kernel, beyond the seven of one fused kernel
# (torch/optim/adam.py, `_multi_tensor_adam`: decay 2, lerp_ 3, mul_ 2, addcmul_ 3, sqrt 2, div_ 2, add_ 2, addcdiv_ 4).
FOREACH_PASSES = 13.0

# A 16-bit copy of updated float32 weights: reads them, writes half as much.
COPY_BYTES = 6.0


def update_bytes(
    runtime: Runtime,
    owned: Floats | float,
    held: Floats | float,
    matrices: Floats | float = 0.0,
    micro_batches: Floats | float = 1.0,
    quantised: Floats | float = 0.0,
) -> Floats | float:
    """Return the bytes that the end of a step moves: clipping and updating the `owned` parameters of a rank after
    sharding, hidden `matrices` among them, and the runtime's passes over the gradients of the `held` parameters before
    sharding. Parameters count as float32, whatever type they are stored in. What each of the `micro_batches` moves to
    cast the `quantised` weights among those held counts here, too.
    """
    state, optimizer = spec_for(runtime).state, OPTIMIZERS[runtime.optimizer]
    wide = float(DTYPE_BYTES[updated_dtype(runtime)])
    moved = optimizer.moved(wide)
    clipped = CLIP_BYTES if state.clips else 0.0
    if OPTIMIZER_IN_BACKWARD in runtime.savers:  # gradients never exist all together, so they are not clipped
        clipped = NORM_READ_BYTES if state.norms_in_backward else 0.0
    per_owned = PLAIN_BYTES + moved * MOMENT_BYTES / 2 + clipped
    per_owned += state.owned_gradient_passes_bytes + (COPY_BYTES if state.master_weights else 0.0)
    more = (optimizer.matrices.moved(wide) - moved) * MOMENT_BYTES / 2 if optimizer.matrices is not None else 0.0
    passes = state.gradient_passes * DTYPE_BYTES[runtime.reduce_dtype]
    low = spec_for(runtime).low_precision
    casts = weight_cast_bytes(runtime) * (micro_batches if low is not None and low.every_pass else 1.0)
    return matrices * more + owned * per_owned + held * passes + quantised * casts


def norm_s(context: CostContext) -> Floats:
    """Return the seconds in which ranks sum the norm of gradients, shape (plans,)."""
    sums = (context.groups.time_s("all_reduce", axis, NORM_BYTES) for axis in NORM_AXES)
    return sum(sums, np.zeros(len(context.table)))


def updates_units(runtime: Runtime) -> bool:
    """Return whether each unit is updated during the backward pass, when its gradients are there; matrices that are
    orthogonalised together and updates that wait for the host come at the end.
    """
    optimizer = OPTIMIZERS[runtime.optimizer]
    return OPTIMIZER_IN_BACKWARD in runtime.savers and optimizer.matrices is None and not optimizer.tensor_s


def host_update_bytes(runtime: Runtime, owned: Floats | float) -> Floats | float:
    """Return the bytes of its own memory that a host moves for clipping and updating `owned` parameters."""
    return update_bytes(runtime, owned, 0.0) * (DTYPE_BYTES[updated_dtype(runtime)] / DTYPE_BYTES["float32"])


def update_rate(runtime: Runtime, roofline: Roofline) -> float:
    """Return the rate for the bytes that `update_bytes` counts: bytes over the seconds of memory traffic plus those of
    an optimizer whose arithmetic takes longer, or which runs a kernel for each of its operators.
    """
    rate, optimizer = roofline.update_bytes_per_s(updated_dtype(runtime)), OPTIMIZERS[runtime.optimizer]
    copies = update_copies(runtime)
    if optimizer.per_sm_s is None and not copies:
        return rate
    wide = float(DTYPE_BYTES[updated_dtype(runtime)])
    whole = float(update_bytes(runtime, 1.0, 0.0))
    own_s = (own := PLAIN_BYTES + optimizer.moved(wide) * MOMENT_BYTES / 2) / rate
    if optimizer.per_sm_s is not None:
        own_s = max(own_s, 1.0 / (optimizer.per_sm_s * roofline.gpu.sm_count))
    own_s += copies * FOREACH_PASSES * wide / roofline.listed_bytes_per_s
    return whole / ((whole - own) / rate + own_s)


def update_copies(runtime: Runtime) -> float:
    """Return the temporary copies of what a rank updates that an update makes: only torch's own optimizers run a kernel
    for each of their operators; bitsandbytes updates in one, and Muon's temporaries exist for one matrix at a time.
    """
    chosen = OPTIMIZERS[runtime.optimizer]
    foreach = chosen.states == (None, None) and not chosen.paged and chosen.matrices is None
    return spec_for(runtime).state.update_copies if foreach else 0.0


def weight_cast_bytes(runtime: Runtime) -> float:
    """Return the bytes moved to quantise a weight for both directions of products. A weight gathered in the low type
    already has one direction; the other is a transposition.
    """
    recipe, low = recipe_of(runtime), spec_for(runtime).low_precision
    if recipe is None or low is None:
        return 0.0
    read = recipe.element_bytes if low.gathers_weights else 2.0 * low.reads(runtime.low_precision_recipe, recipe)
    return read + recipe.element_bytes * (1.0 if low.gathers_weights else 2.0)


def updated_dtype(runtime: Runtime) -> str:
    """Return the type of the parameters that the optimizer updates: that of the float32 copy if there is one."""
    spec = spec_for(runtime)
    return "float32" if spec.state.master_weights else trained_dtype(runtime, wide_adapters=spec.wide_adapters)
