"""Rules of what exchanges FSDP's parameters and gradients (`Plan.fsdp_exchange`)."""

# ruff: noqa: ARG005 - every predicate and sentence has the same signature, whether or not it reads all of it

from __future__ import annotations

import numpy as np

from simulator.columns.plan_columns import PlanColumns
from simulator.config.plan import NCCL
from simulator.legality.rule import Mask, Rule, RuleFacts, batch_rule, one_of

# Degrees with which copy engines were not tried: other groups, and other orders of gathers, than FSDP alone has.
UNTRIED = ("dp_replicate", "tp", "pp", "ep")


def _other(c: PlanColumns) -> Mask:
    return np.asarray(c.fsdp_exchange != NCCL)


def _untried(c: PlanColumns) -> Mask:
    return np.asarray(np.logical_or.reduce([getattr(c, name) > 1 for name in UNTRIED]))


EXCHANGE_RULES: list[Rule] = [
    batch_rule(
        "fsdp-exchange",
        lambda c, q: _other(c) & ~one_of(c.fsdp_exchange, q.framework.fsdp_exchanges),
        lambda p, q: (
            f"fsdp_exchange {p.fsdp_exchange}: {q.framework.title} has {', '.join((NCCL, *q.framework.fsdp_exchanges))}"
        ),
    ),
    batch_rule(
        "fsdp-exchange-sharding",
        lambda c, q: _other(c) & (c.dp_shard * c.cp == 1),
        lambda p, q: f"fsdp_exchange {p.fsdp_exchange} needs dp_shard x cp > 1: there is nothing to exchange",
    ),
    batch_rule(
        "fsdp-exchange-degrees",
        lambda c, q: _other(c) & _untried(c),
        lambda p, q: (
            f"fsdp_exchange {p.fsdp_exchange} was tried with dp_shard and cp alone, not with "
            f"{', '.join(f'{name} {degree}' for name in UNTRIED if (degree := getattr(p, name)) > 1)}; {NCCL} can"
        ),
    ),
    batch_rule(
        "fsdp-exchange-peers",
        lambda c, q: _other(c) & (np.asarray(c.gpus > _peers(q)) | (not q.nvlink)),
        lambda p, q: (
            f"fsdp_exchange {p.fsdp_exchange} on {p.gpus} GPUs"
            + (f", {q.gpus_per_node} to a node" if q.nvlink else " without NVLink")
            + ": its copies go between GPUs of one node over NVLink"
        ),
    ),
    batch_rule(
        "fsdp-exchange-adapter",
        lambda c, q: _other(c),
        lambda p, q: f"fsdp_exchange {p.fsdp_exchange} was tried with all parameters trained; {NCCL} runs others",
        applies=lambda q: q.runtime is not None and q.runtime.adapter is not None,
    ),
]


def _peers(q: RuleFacts) -> float:
    """Return how many GPUs a node has; infinite where that is not known."""
    return q.gpus_per_node or float("inf")
