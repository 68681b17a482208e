"""The size of a run's checkpoint, and for how long writing it stops the run."""

from __future__ import annotations

import numpy as np

from simulator.analytical.estimates import calibrated_operators, cost_context
from simulator.analytical.scenario import Scenario
from simulator.columns.plan_table import plan_table
from simulator.config.plan import Plan
from simulator.step.frozen import local_parameters
from simulator.step.held import PARTS, state_bytes
from topology.rates.host import host_rates


def checkpoint_bytes(scenario: Scenario) -> float:
    """Return the bytes of a checkpoint: trained parameters and their optimizer state."""
    table = plan_table([Plan()], scenario.workload)
    context = cost_context(scenario, table, calibrated_operators(scenario))
    model, held = scenario.model, local_parameters(scenario.model, context)
    layers = {"dense_layer": model.dense_layers, "moe_layer": model.moe_layers, "experts": model.moe_layers}
    trained, kept = (
        sum(layers.get(part, 1) * float(np.ravel(getattr(held.of(kind), part))[0]) for part in PARTS)
        for kind in ("gradients", "optimizer")
    )
    state = state_bytes(context)
    return trained * state["parameters"] + kept * state["optimizer"]


def copy_s(scenario: Scenario, nbytes: float, gpus: int) -> float:
    """Return the seconds in which every GPU has copied its part of a checkpoint to host memory."""
    rates = host_rates(scenario.cluster, min(gpus, scenario.cluster.gpus_per_node))
    return nbytes / gpus / rates.copy_bytes_per_s
