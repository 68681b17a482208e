"""The clocks of tensor cores in a step that also does other things: the power limit of a GPU holds on average."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simulator.analytical.layer_cost import BlockCost
from simulator.columns.plan_table import Floats
from simulator.kernels.operators import WorkKind
from simulator.kernels.roofline import efficiency
from simulator.step.context import CostContext
from simulator.step.host import step_host_s

# Power that other work of a step draws, as shares of the power limit, which matrix products alone reach: kernels that
# move memory, attention, and idle time. Source: fitted, with `rested` of efficiency.toml, to 104 steps of our executor
# on one H100 and one H200, eager and compiled, their other kernels as profiles have them
# (examples/validation/kernels.md): no bias, 2 % in the median. Attention is assumed. For a GPU that does nothing but
# optimizer updates the driver read more, 520 to 590 of 700 W, and 130 to 160 W for an idle GPU with its clocks up
# (examples/profiles/h200x1.json).
MOVING = 0.5
ATTENDING = 0.8
IDLE = 0.2
# Seconds over which a GPU's power limiter averages. Source: in three runs that load data for 50 to 150 ms of a step,
# kernels ran at 1.55 to 1.6 GHz on average (fresh.jsonl: 4/21, 9/05, 9/06). That is what a pause of 5 to 30 ms
# explains; with the whole pause they would have run at 1.9 GHz.
POWER_WINDOW_S = 0.02
ROUNDS = 12
# Parts of a step in which kernels run.
BUSY = ("compute", "recompute", "copies", "contention", "optimizer", "orthogonal", "exposed_communication")

Shares = dict[WorkKind, Floats]


def kernel_shares(blocks: Mapping[str, BlockCost], layers: Mapping[str, float]) -> Shares:
    """Return the shares of a model's kernel time that matrix products and attention take; `layers` has the count of
    each block.
    """
    passes = [(count, cost) for name, count in layers.items() for cost in (blocks[name].forward, blocks[name].backward)]
    whole = sum(count * cost.compute_s for count, cost in passes)
    of_kind = {
        WorkKind.MATMUL: sum(count * cost.products_s for count, cost in passes),
        WorkKind.ATTENTION: sum(count * cost.attention_s for count, cost in passes),
    }
    return {kind: np.asarray(seconds / np.maximum(whole, 1e-12)) for kind, seconds in of_kind.items()}


def fastest(context: CostContext) -> float:
    """Return the smallest factor that `working_clocks` can return."""
    if context.calibration is not None:
        return min(1.0, context.calibration.burst)
    if context.roofline.simt or not np.any(context.table["gpus"] == 1):
        return 1.0
    return context.roofline.rested


def working_clocks(breakdown: Mapping[str, Floats], shares: Shares, context: CostContext) -> Floats:
    """Return the factor of kernel times in each step, shape (plans,), relative to a GPU that does nothing but matrix
    products.

    Power that other work leaves unused raises the clocks of products: their rate goes with the `power_exponent`-th
    power of the power they draw, up to the rate of a rested GPU (efficiency.toml, or as measured). This holds on one
    GPU. Next to collectives, products share power and SMs with them and take about as long as `sustained` says; on
    several GPUs that were measured, only idle time counts.
    """
    calibration, known = context.calibration, efficiency(context.roofline.gpu.architecture)
    rested, rows = fastest(context), len(context.table)
    if rested == 1.0:
        return np.full(rows, rested)
    # Of a long pause (in a pipeline, or to load data) only the last `POWER_WINDOW_S` raise the clocks of what follows.
    loading = np.minimum(step_host_s(context.spec.host, context), breakdown["host"])
    pauses = np.minimum(breakdown["bubble"], POWER_WINDOW_S) + np.minimum(loading, POWER_WINDOW_S)
    idle = breakdown["host"] - loading + pauses
    several = np.ones(rows)
    if calibration is not None:
        busy = sum((breakdown[name] for name in BUSY), np.zeros(rows))
        several = calibration.clocks(busy / np.maximum(busy + idle, 1e-12), known.power_exponent)
        if context.roofline.simt:
            return several
    kernels = breakdown["compute"] + breakdown["recompute"]
    products, attention = (kernels * shares[kind] for kind in (WorkKind.MATMUL, WorkKind.ATTENTION))
    moving = kernels - products - attention
    moving = moving + breakdown["copies"] + breakdown["contention"] + breakdown["optimizer"]
    spare = (1 - MOVING) * moving + (1 - ATTENDING) * attention + (1 - IDLE) * idle
    taken = np.ones(rows)
    for _ in range(ROUNDS):
        duty = taken * products / np.maximum(taken * products + spare, 1e-12)
        taken = np.maximum(duty**known.power_exponent, rested)
    one = 1.0 - shares[WorkKind.MATMUL] * (1.0 - taken)
    return np.asarray(np.where(context.table["gpus"] == 1, one, several))
