"""The clocks of tensor cores in a step that also does other things: the power limit of a GPU holds on average.

All that is counted here is known before a step is walked, so that bounds, account and simulation run kernels at the
same clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from simulator.analytical.layer_cost import BlockCost
from simulator.columns.plan_table import Floats
from simulator.config.model import Model
from simulator.kernels.efficiency import efficiency
from simulator.kernels.power_draw import ATTENDING, IDLE, MOVING, POWER_WINDOW_S, SENDING, drawn
from simulator.runtimes.model_operators import WIDE, layer_code
from simulator.step.context import CostContext
from simulator.step.held import Parameters
from simulator.step.host import layer_host_s, slowest, step_host_s
from simulator.step.update import update_bytes, update_rate

# Standard deviation of clocks at the same power, over their mean: one GPU of each of fifteen hosts (kernels.md).
CLOCK_SPREAD = 0.015
ROUNDS = 12
SPARSE = ("moe", WIDE["moe"])
TINY = 1e-12


def fastest(context: CostContext) -> float:
    """Return the smallest factor that clocks can have."""
    if context.roofline.simt:
        return 1.0
    return context.roofline.rested if context.calibration is None else min(1.0, context.calibration.burst)


def working_clocks(
    model: Model, blocks: Mapping[str, BlockCost], parameters: Parameters, context: CostContext
) -> Floats:
    """Return the factor of kernel times in each step, shape (plans,), relative to a GPU that does nothing but matrix
    products.

    Power that other work leaves unused raises the clocks of products: their rate goes with the `power_exponent`-th
    power of the power they draw, up to the rate of a rested GPU (efficiency.toml, or as measured). Ranks wait for the
    slowest GPU. Counted are kernels and the collectives between them, the update, and the host's own work, of which
    only the last `POWER_WINDOW_S` raise the clocks of what follows. Not counted is what only the walk of a step shows:
    waits for other ranks, for parameters and for a host that is late.
    """
    rested = fastest(context)
    if rested == 1.0:
        return np.ones(len(context.table))
    table, exponent = context.table, efficiency(context.roofline.gpu.architecture).power_exponent
    kernels, products, clocked, attention, sent = (
        table.micro_batches * seconds for seconds in _of_last_rank(model, blocks, context)
    )
    paused = np.minimum(step_host_s(context.spec.host, context), POWER_WINDOW_S)
    moving = kernels - products - attention + _update_s(model, parameters, context)
    spare = sum(
        (1.0 - drawn(share, context.roofline)) * seconds
        for share, seconds in ((MOVING, moving), (ATTENDING, attention), (SENDING, sent), (IDLE, paused))
    )
    taken, slower = np.ones(len(table)), slowest(table["gpus"], CLOCK_SPREAD)
    # A collective that cannot run here takes infinitely long, and inf / inf is nan.
    with np.errstate(invalid="ignore"):
        for _ in range(ROUNDS):
            duty = taken * products / np.maximum(taken * products + spare, TINY)
            taken = np.maximum(duty**exponent, rested)
        taken = np.maximum(np.nan_to_num(taken, nan=rested) * slower, rested)
    return np.asarray(1.0 - clocked / np.maximum(kernels, TINY) * (1.0 - taken))


def _of_last_rank(model: Model, blocks: Mapping[str, BlockCost], context: CostContext) -> Floats:
    """Return the seconds of all kernels, of products, of what goes with the clocks and of attention among them, and of
    the collectives between them, of one micro batch forward and backward without recomputation, shape (5, plans); on
    the last rank of a pipeline, which has the head and so waits least.

    Collectives count as far as the device, not the host, decides how long a pass takes.
    """
    pp, layers = context.table["pp"], Counter(layer_code(model, context.runtime, n) for n in range(model.layers))
    held = {code: count / pp for code, count in layers.items()} | {"embedding": 1.0 * (pp == 1), "head": 1.0}
    total, nothing = np.zeros((5, len(pp))), np.zeros(len(pp))
    for name, number in held.items():
        python_s, block = (nothing, nothing), blocks[name]
        if name in layers:
            python_s = layer_host_s(context.spec, context.table, sparse=name in SPARSE)
        for cost, more_s in zip((block.forward, block.backward), python_s, strict=True):
            sent = np.clip(cost.device_s - cost.host_s - more_s, 0.0, cost.exposed_s)
            parts = cost.compute_s, cost.products_s, cost.clocked_s, cost.attention_s, sent
            total += number * np.stack(np.broadcast_arrays(*parts))
    return total


def _update_s(model: Model, parameters: Parameters, context: CostContext) -> Floats:
    """Return the seconds in which that rank's GPU updates parameters."""
    table, trained, runtime = context.table, parameters.of("gradients"), context.runtime
    sparse = sum(kind.sparse for kind in model.layer_kinds)
    layers = (model.layers - sparse) * trained.dense_layer + sparse * trained.moe_layer
    shared = layers / table["pp"] + trained.head + np.where(table["pp"] == 1, trained.embedding, 0.0)
    experts = sparse * trained.experts / table["pp"]
    owned = shared / table.state_shard["optimizer"] + experts / table.expert_shard["optimizer"]
    owned = np.where(table.offloaded["optimizer"], 0.0, owned)
    moved = update_bytes(runtime, owned, shared + experts, micro_batches=table.micro_batches)
    return np.asarray(moved / update_rate(runtime, context.roofline))
