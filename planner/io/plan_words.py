"""A plan as text: its degrees, its other settings, its name in links, and the changes from one plan to another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from simulator.config.overlap_sites import NONE, tp_overlap_label, tp_overlap_slug
from simulator.config.plan import PLAIN_SCHEDULE, PLAN_FIELDS, Plan
from topology import codec

# The order of degrees in texts.
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
BESIDE_PRODUCT = {"ep"}  # degrees that lie inside the others
# Fields with texts of their own below; all others use their names.
WORDED = {
    *DEGREES, "zero_stage", "virtual_stages", "schedule", "micro_batch_size", "recompute", "recompute_per_stage",
    "sequence_parallel", "tp_overlap", "cp_method", "layers_per_stage", "reshard_after_forward", "placement",
}  # fmt: skip

# --- degrees ----------------------------------------------------------------------------------------------------------


def degrees_text(plan: Plan) -> str:
    """Return the parallel degrees as a product: `32 = dp 1 x fsdp 4 x tp 8 x pp 1`."""
    by_stage = plan.zero_stage is not None
    named = {"dp_replicate", "tp", "pp"} | (set() if by_stage else {"dp_shard"})
    factors = [
        f"{short} {degree}{_zero(plan, name)}"
        for name, short, degree in _degrees(plan)
        if name not in BESIDE_PRODUCT and (degree > 1 or name in named)
    ]
    return f"{plan.gpus} = {' x '.join(factors)}"


def short_degrees(plan: Plan) -> str:
    """Return the degrees above one: `fsdp 4 x tp 2, ep 8`."""
    above = [(name, f"{short} {degree}{_zero(plan, name)}") for name, short, degree in _degrees(plan) if degree > 1]
    factors = " x ".join(text for name, text in above if name not in BESIDE_PRODUCT)
    return ", ".join([factors or "one GPU", *(text for name, text in above if name in BESIDE_PRODUCT)])


def plan_chips(plan: Plan) -> str:
    """Return the degrees above one for people: `FSDP 4 · TP 4 · PP 4`."""
    above = [f"{short.upper()} {degree}{_zero(plan, name)}" for name, short, degree in _degrees(plan) if degree > 1]
    return " · ".join(above) or "one GPU"


def approach_text(plan: Plan) -> str:
    """Return a plan as a short phrase: `FSDP over 8 GPUs`, `FSDP over 64 with tensor parallelism over 8 on 512
    GPUs`.
    """
    away = {"optimizer": ", optimizer in host memory", "parameters": ", parameters and optimizer in host memory"}
    return _degrees_in_words(plan) + away.get(plan.offload, "")


def _degrees(plan: Plan) -> list[tuple[str, str, int]]:
    """Return (field, symbol, value) of all degrees."""
    return [(name, PLAN_FIELDS[name].short, getattr(plan, name)) for name in DEGREES]


def _zero(plan: Plan, name: str) -> str:
    return f" (ZeRO-{plan.zero_stage})" if name == "dp_replicate" and plan.zero_stage else ""


def _degrees_in_words(plan: Plan) -> str:
    names = []
    if plan.zero_stage is not None and plan.dp_replicate > 1:
        names.append(f"{f'ZeRO-{plan.zero_stage}' if plan.zero_stage else 'DDP'} over {plan.dp_replicate}")
    elif plan.dp_replicate > 1 and plan.dp_shard > 1:
        names.append(f"{plan.dp_replicate} replicas of FSDP over {plan.dp_shard}")
    elif plan.dp_replicate > 1:
        names.append(f"DDP over {plan.dp_replicate}")
    elif plan.dp_shard > 1:
        names.append(f"FSDP over {plan.dp_shard}")
    degrees = (("context", plan.cp), ("tensor", plan.tp), ("expert", plan.ep))
    names += [f"{name} parallelism over {degree}" for name, degree in degrees if degree > 1]
    names += [f"a pipeline of {plan.pp}"] if plan.pp > 1 else []
    if not names:
        return "one GPU"
    if len(names) == 1 and plan.dp_replicate in {1, plan.gpus}:
        return f"{names[0]} GPUs" if plan.pp == 1 else f"{names[0]} stages on {plan.gpus} GPUs"
    first, *others = names
    return first + (f" with {' and '.join(others)}" if others else "") + f" on {plan.gpus:,} GPUs"


# --- what it sets besides its degrees ---------------------------------------------------------------------------------


def policy_text(plan: Plan) -> str:
    """Return all settings except the degrees of the product: experts, micro batch, recompute, schedule, overlap, ..."""
    return ", ".join([*([f"ep {plan.ep}"] if plan.ep > 1 else []), *_settings(plan)])


def special_text(plan: Plan) -> str:
    """Return a plan's settings besides degrees, micro batch and recomputation, except default ones."""
    plain = {"micro_batch_size", "recompute", "recompute_per_stage", "sequence_parallel"}
    plain |= {"schedule"} if plan.schedule_name == PLAIN_SCHEDULE and plan.virtual_stages == 1 else set()
    plain |= {"reshard_after_forward"} if plan.reshard_after_forward else set()
    return ", ".join(_settings(plan, without=plain))


def plan_settings(plan: Plan) -> str:
    """Return all settings except the degrees, for readers without a legend."""
    return ", ".join(_settings(plan, spelt_out=True))


def plan_in_words(plan: Plan | Mapping[str, Any], *, without: Collection[str] = ()) -> str:
    """Return a plan, or a plan of a document, without settings that need no mention: `fsdp 4 x pp 2, micro batch 2,
    1F1B`; `without` some settings.
    """
    if not isinstance(plan, Plan):
        plan = Plan(**{name: value for name, value in plan.items() if name in PLAN_FIELDS})
    silent = {"sequence_parallel", *without} | ({"recompute"} if plan.recompute == "none" else set())
    return ", ".join([short_degrees(plan), *_settings(plan, without=silent)])


def _settings(plan: Plan, *, without: Collection[str] = (), spelt_out: bool = False) -> list[str]:
    """Return the texts of settings, field by field in their order; `without` some fields."""
    found = _setting_texts(plan, spelt_out=spelt_out)
    return [text for name, text in found.items() if text and name not in without]


def _setting_texts(plan: Plan, *, spelt_out: bool) -> dict[str, str]:
    """Return the text of each setting by field; empty for a field that the plan does not have or that need not be
    named.
    """
    stages = f" x{plan.virtual_stages}" if plan.virtual_stages > 1 else ""
    context = (plan.cp_method or "").replace("_", "-") if plan.cp > 1 else ""
    sharded = plan.reshard_after_forward is not None and plan.dp_shard * plan.cp > 1
    found = {
        "micro_batch_size": f"micro batch {plan.micro_batch_size}",
        "recompute": f"recompute {plan.recompute}",
        "sequence_parallel": "sp" if plan.sequence_parallel and plan.tp > 1 else "",
        "schedule": f"{plan.schedule_name}{stages}" if plan.pp > 1 else "",
        "tp_overlap": f"tp overlap {tp_overlap_label(plan.tp_overlap)}" if plan.tp_overlap != NONE else "",
        **{name: f"{name.replace('_', ' ')} {value}" for name, value in _chosen(plan).items()},
        "cp_method": f"cp by {context}" if context else "",
        "recompute_per_stage": _by_stage("recompute", plan.recompute_per_stage),
        "layers_per_stage": _by_stage("layers", plan.layers_per_stage),
        "reshard_after_forward": ("reshard" if plan.reshard_after_forward else "no reshard") if sharded else "",
    }
    if spelt_out:
        stages = f", {plan.virtual_stages} stages a rank" if plan.virtual_stages > 1 else ""
        if plan.tp > 1:
            found["sequence_parallel"] = "sequence parallel" if plan.sequence_parallel else "no sequence parallelism"
        if plan.pp > 1:
            found["schedule"] = f"{plan.schedule_name} schedule{stages}"
        if sharded:
            found["reshard_after_forward"] += " after forward"
    return found


def _chosen(plan: Plan) -> dict[str, Any]:
    """Return the settings without a text of their own that are not at their defaults."""
    known = {name: getattr(plan, name) for name in PLAN_FIELDS if name not in WORDED}
    return {name: value for name, value in known.items() if value != PLAN_FIELDS[name].default}


def _by_stage(what: str, values: Sequence[object]) -> str:
    return f"{what} by stage {run_length_text(values)}" if values else ""


def run_length_text(values: Sequence[object]) -> str:
    """Return a list with repetitions counted: `2 x full, 6 x none`."""
    groups = [(value, len(list(same))) for value, same in groupby(values)]
    return ", ".join(f"{count} x {value}" if count > 1 else f"{value}" for value, count in groups)


# --- in links ---------------------------------------------------------------------------------------------------------


def plan_name(plan: Plan) -> str:
    """Return a short name of a plan for URLs and menus: `fsdp256 cp2 mb1 selective-op reshard`."""
    words = [f"{short}{degree}" for _, short, degree in _degrees(plan) if degree > 1] or ["one-gpu"]
    if plan.zero_stage is not None:
        words.append(f"zero{plan.zero_stage}")
    if plan.pp > 1:
        words.append(plan.schedule_name + (f"x{plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    words += ["no-sp"] if plan.tp > 1 and not plan.sequence_parallel else []
    words += [f"mb{plan.micro_batch_size}", plan.recompute]
    if plan.reshard_after_forward is not None and plan.dp_shard * plan.cp > 1:
        words.append("reshard" if plan.reshard_after_forward else "keep")
    words += [f"{PLAN_FIELDS[name].short or name}-{value}" for name, value in _chosen(plan).items()]
    words += [f"overlap-{tp_overlap_slug(plan.tp_overlap)}"] if plan.tp_overlap != "none" else []
    if plan.layers_per_stage or plan.recompute_per_stage:
        words.append(f"own-{codec.fingerprint(plan)[:4]}")  # layers or recompute modes by stage would be too long
    return " ".join(words)


# --- one plan and another ---------------------------------------------------------------------------------------------


def changed_fields(before: Plan, after: Plan) -> list[tuple[str, str, str]]:
    """Return the fields in which two plans differ, as (field, before, after) texts. A field without a meaning in the
    second plan, such as the schedule without a pipeline, is left out.
    """
    return [
        (known.words, value_words(old), value_words(new))
        for name, known in PLAN_FIELDS.items()
        if (old := getattr(before, name)) != (new := getattr(after, name))
        and not (known.needs and getattr(after, known.needs) == 1)
    ]


def differences_text(before: Plan, after: Plan) -> str:
    """Return all settings in which the second of two plans differs, as text: `micro batch 2, no reshard after forward`;
    empty if only fields that follow from others differ.
    """
    mine, theirs = (_setting_texts(plan, spelt_out=True) for plan in (before, after))
    changed = [name for name in PLAN_FIELDS if getattr(before, name) != getattr(after, name)]
    parts = [approach_text(after)] if approach_text(before) != approach_text(after) else []
    parts += [text for name, text in theirs.items() if text and text != mine.get(name)]
    parts += [
        f"the framework's {PLAN_FIELDS[name].words}"
        if getattr(after, name) in {None, ()}
        else f"{PLAN_FIELDS[name].words} {value_words(getattr(after, name))}"
        for name in changed
        if mine.get(name) and not theirs.get(name) and name not in DEGREES and name != "offload"
    ]
    if changed == ["placement"]:
        parts.append("another order of GPUs" if after.placement else "ranks in the order of GPUs")
    return ", ".join(parts)


def listed(names: Sequence[str]) -> str:
    """Return names as prose: `a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def value_words(value: object) -> str:
    """Return the value of a plan's field as text; yes or no for switches."""
    if value is None or value == ():
        return "framework default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# --- differences of any two values ------------------------------------------------------------------------------------


def differing(one: Any, other: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the fields in which two values of one kind differ, each with both of its values in words."""
    return _differing(codec.to_builtins(one), codec.to_builtins(other), "")


def _differing(one: Any, other: Any, where: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            yield from _differing(one.get(key), other.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differing(a, b, f"{where}[{index}]")
    elif one != other:
        yield where, _entry_text(one), _entry_text(other)


def _entry_text(value: Any) -> str:
    if isinstance(value, (list, tuple, dict)):
        return f"{len(value)} entries"
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
