"""Convert between a plan's settings of experts (degrees, capacity, dispatcher, overlap) and Megatron-LM's flags.

Source: `megatron/core/model_parallel_config.py` and `megatron/core/transformer/transformer_config.py` of megatron-core
0.19.2.
"""

from __future__ import annotations

from planner.export.frameworks.megatron_model import set_flags
from planner.export.mapping import Entry, Facts, NotModelled, Settings, Table, truth, whole
from simulator.config.runtime import MOE_DISPATCHERS
from simulator.runtimes.model_operators import FUSED_DISPATCH
from topology.errors import BadInput

_EP = "--expert-model-parallel-size"
_ETP = "--expert-tensor-parallel-size"
_CAPACITY = ("--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity")
_DISPATCH = ("--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend", "--moe-enable-deepep")
_BESIDE = ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")


def _write_experts(facts: Facts) -> Settings:
    if not facts["moe"]:
        return {}
    return set_flags(
        {
            _EP: facts["ep"],
            _ETP: facts["etp"],
            _CAPACITY[0]: facts["capacity_factor"],
            _CAPACITY[1]: facts["capacity_factor"] is not None,
        }
    )


def _read_experts(settings: Settings, facts: Facts) -> Facts:
    factor = settings.get(_CAPACITY[0])
    try:
        capacity = None if factor is None else float(str(factor))
    except ValueError:
        raise BadInput(f"{_CAPACITY[0]} is {str(factor)[:40]!r}", why="it must be a number") from None
    split = whole(settings, _ETP, facts["tp"])
    stated = facts.get("moe", _ETP in settings) and (facts["tp"] > 1 or split > 1)
    return {"ep": whole(settings, _EP, 1), "etp": split if stated else None, "capacity_factor": capacity}


def _write_dispatcher(facts: Facts) -> Settings:
    if not facts["moe"]:
        return {}
    word = facts["moe_dispatcher"] or "alltoall"
    fused = word in FUSED_DISPATCH
    return set_flags({_DISPATCH[0]: "flex" if fused else word, _DISPATCH[1]: word if fused else None})


def _read_dispatcher(settings: Settings, facts: Facts) -> Facts:
    """Read the dispatcher; "" is the default of recipes, `alltoall`."""
    word = str(settings.get(_DISPATCH[0], "allgather" if facts.get("moe") else "alltoall"))
    if word == "flex" or truth(settings, _DISPATCH[2]):
        word = str(settings.get(_DISPATCH[1], "deepep"))
    if word not in MOE_DISPATCHERS:
        raise NotModelled(f"the dispatcher {word[:40]!r} is not modelled", remedy=", ".join(MOE_DISPATCHERS))
    return {"moe_dispatcher": "" if word == "alltoall" else word}


def _write_experts_beside(facts: Facts) -> Settings:
    word = facts["ep_overlap"]
    return set_flags({_BESIDE[0]: word != "none", _BESIDE[1]: word == "delay_wgrad"})


def _read_experts_beside(settings: Settings, _: Facts) -> Facts:
    overlaps, later = (truth(settings, flag) for flag in _BESIDE)
    if later and not overlaps:
        raise BadInput(f"{_BESIDE[1]} needs {_BESIDE[0]}", why="Megatron-LM puts weight gradients off for nothing else")
    return {"ep_overlap": "none" if not overlaps else "delay_wgrad" if later else "combined"}


EXPERT_ENTRIES: Table = (
    Entry(keys=(_EP, _ETP, *_CAPACITY), write=_write_experts, read=_read_experts),
    Entry(keys=_DISPATCH, write=_write_dispatcher, read=_read_dispatcher),
    Entry(keys=_BESIDE, write=_write_experts_beside, read=_read_experts_beside),
)
