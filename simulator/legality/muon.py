"""Muon: the runtimes that have the modelled implementation (`simulator.step.muon`), and what is known of the others.

Sources: torch/optim/_muon.py (torch 2.9 and later); Megatron-LM, core/optimizer/layer_wise_optimizer.py and
muon.py (`--optimizer muon`, `--muon-tp-mode`); DeepSpeed pull requests 7919, 8438 and 8442; torchtitan pull request
3719; NeMo AutoModel, components/optim/optimizer.py (MuonConfig, of microsoft/dion); transformers pull request 39541.
"""

# ruff: noqa: ARG005 - every predicate and sentence has the same signature, whether or not it reads all of it

from __future__ import annotations

import numpy as np

from simulator.config.optimizers import OPTIMIZERS
from simulator.legality.rule import Rule, RuleFacts, rule
from simulator.runtimes.library import runtime_spec

MODELLED = frozenset({"pytorch"})
WHY_NOT = {
    "torchtitan": "torchtitan 0.3 has no Muon (pull request 3719 proposes one)",
    "transformers": "transformers' Trainer has no Muon of its own (pull request 39541 proposes one), and those that"
    " others give it have no cost here",
    "meshwright": "our executor has AdamW alone",
    "megatron-lm": "Megatron-LM's Muon gives every data-parallel rank whole matrices and orthogonalises the parts that"
    " tensor parallelism cuts (--optimizer muon, --muon-tp-mode blockwise): how evenly has no cost here",
    "deepspeed": "DeepSpeed's Muon gathers by ZeRO's flat groups, and below ZeRO-1 does not orthogonalise at all (its"
    " pull request 8442): it has no cost here",
    "nemo-automodel": "NeMo AutoModel's Muon (microsoft/dion) spreads matrices over ranks by all-to-all, which has no"
    " cost here",
}


def _runtime(q: RuleFacts) -> str:
    return runtime_spec(q.runtime.name).names[0] if q.runtime is not None else ""


def _orthogonalises(q: RuleFacts) -> bool:
    return q.runtime is not None and (one := OPTIMIZERS.get(q.runtime.optimizer)) is not None and bool(one.matrices)


MUON_RULES: tuple[Rule, ...] = (
    rule(
        "muon",
        lambda c, q: np.ones(len(c), dtype=np.bool_),
        lambda p, q: (
            f"{WHY_NOT.get(_runtime(q), f'{_runtime(q)} has no Muon that is known here')}:"
            f" ask for {', '.join(sorted(MODELLED))}, or for AdamW"
        ),
        applies=lambda q: _orthogonalises(q) and _runtime(q) not in MODELLED,
    ),
    rule(
        "muon-tensor",
        lambda c, q: (c.tp > 1) & (c.dp_shard * c.cp > 1),
        lambda p, q: (
            f"Muon of matrices that both tp {p.tp} and {p.dp_shard * p.cp} shards cut is not modelled: replicate, or"
            " leave one of them"
        ),
        applies=_orthogonalises,
    ),
    rule(
        "muon-state",
        lambda c, q: (c.offload != "none") | ((c.zero_stage > 0) & (c.zero_stage < 3)),
        lambda p, q: (
            "Muon with an optimizer in host memory is not modelled: offload none"
            if p.offload != "none"
            else f"Muon with ZeRO-{p.zero_stage} is not modelled: shard fully, or replicate"
        ),
        applies=_orthogonalises,
    ),
)
