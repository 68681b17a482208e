"""A plan in words: its name in links, its degrees as chips, and what else it sets."""

from __future__ import annotations

from planner.explain.tables import run_length_text
from simulator.config.overlap_sites import tp_overlap_label, tp_overlap_slug
from simulator.config.plan import Plan
from topology import codec


def plan_name(plan: Plan) -> str:
    """Return a short name of a plan for URLs and menus: `fsdp256 cp2 mb1 selective-op reshard`."""
    degrees = {
        "dp": plan.dp_replicate,
        "fsdp": plan.dp_shard,
        "cp": plan.cp,
        "tp": plan.tp,
        "pp": plan.pp,
        "ep": plan.ep,
    }
    words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1] or ["one-gpu"]
    if plan.zero_stage is not None:
        words.append(f"zero{plan.zero_stage}")
    if plan.pp > 1:
        words.append(plan.schedule_name + (f"x{plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    words += ["no-sp"] if plan.tp > 1 and not plan.sequence_parallel else []
    words += [f"mb{plan.micro_batch_size}", plan.recompute]
    if plan.reshard_after_forward is not None and plan.dp_shard * plan.cp > 1:
        words.append("reshard" if plan.reshard_after_forward else "keep")
    words += [f"offload-{plan.offload}"] if plan.offload != "none" else []
    words += [f"a2a-{plan.ep_overlap}"] if plan.ep_overlap != "none" else []
    words += [f"overlap-{tp_overlap_slug(plan.tp_overlap)}"] if plan.tp_overlap != "none" else []
    if plan.layers_per_stage or plan.recompute_per_stage or plan.capacity_factor is not None:
        words.append(f"own-{codec.fingerprint(plan)[:4]}")  # layers or recompute modes by stage would be too long
    return " ".join(words)


def plan_chips(plan: Plan) -> str:
    """Return the degrees of a plan for people: `FSDP 4 · TP 4 · PP 4`. What else it sets stands beside it, or in a tooltip."""
    zero = f" (ZeRO-{plan.zero_stage})" if plan.zero_stage else ""
    degrees = (
        ("DP", plan.dp_replicate, zero),
        ("FSDP", plan.dp_shard, ""),
        ("CP", plan.cp, ""),
        ("TP", plan.tp, ""),
        ("PP", plan.pp, ""),
        ("EP", plan.ep, ""),
    )
    return " · ".join(f"{name} {degree}{more}" for name, degree, more in degrees if degree > 1) or "one GPU"


def plan_settings(plan: Plan) -> str:
    """Return everything but the degrees: micro batch, recomputation, schedule, overlap, what is gathered when, ..."""
    parts = [f"micro batch {plan.micro_batch_size}", f"recompute {plan.recompute}"]
    if plan.tp > 1:
        parts.append("sequence parallel" if plan.sequence_parallel else "no sequence parallelism")
    if plan.pp > 1:
        chunks = f", {plan.virtual_stages} stages a rank" if plan.virtual_stages > 1 else ""
        parts.append(f"{plan.schedule_name} schedule{chunks}")
    if plan.tp_overlap != "none":
        parts.append(f"TP overlap: {tp_overlap_label(plan.tp_overlap)}")
    if plan.ep_overlap != "none":
        parts.append(f"EP overlap: {plan.ep_overlap}")
    if plan.offload != "none":
        parts.append(f"offload {plan.offload}")
    if plan.cp > 1 and plan.cp_method:
        parts.append(f"CP by {plan.cp_method.replace('_', '-')}")
    if plan.recompute_per_stage:
        parts.append(f"recompute by stage {run_length_text(plan.recompute_per_stage)}")
    if plan.layers_per_stage:
        parts.append(f"layers by stage {run_length_text(plan.layers_per_stage)}")
    if plan.reshard_after_forward is not None and plan.dp_shard * plan.cp > 1:
        parts.append("reshard after forward" if plan.reshard_after_forward else "no reshard after forward")
    return ", ".join(parts)
