"""Read single fields of a case strictly: the right type and range, or an error that names the place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from simulator.config.adapter import TYPES_BY_WORD
from simulator.config.overlap_sites import canonical
from simulator.config.plan_schema import MAX_COUNT, Kind, PlanField
from simulator.legality.frameworks import Framework
from simulator.pipeline.schedules.registry import SCHEDULES
from simulator.runtimes.called import RECOMPUTE_SYNONYMS
from simulator.runtimes.parts import MODULES
from topology.codec import JsonObject
from topology.errors import BadPlan
from topology.ranges import shown

_SCHEDULES = {word.lower(): kind.name for kind in SCHEDULES.values() for word in (kind.name, *kind.also_called)}


def unsaid(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in {"", "unknown"})


def stated_value(section: Mapping[str, Any], key: str) -> Any:
    value = section.get(key)
    return None if unsaid(value) else value


def section_of(data: Mapping[str, Any], key: str, name: str) -> JsonObject:
    value = data.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadPlan(f"case {name}: {key} is {kind_of(value)}, not an object")
    return dict(value)


def refuse_unknown(data: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = [key for key in data if key not in known]
    if unknown:
        near = get_close_matches(str(unknown[0]), known, n=1)
        raise BadPlan(
            f"{where} has {'an unknown key' if len(unknown) == 1 else 'unknown keys'}:"
            f" {', '.join(map(shown, unknown[:8]))}",
            why="nothing reads it, and it would be ignored",
            remedy=f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}",
        )


def whole_number(value: Any, where: str, *, least: int = 1, most: int = MAX_COUNT) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        what = f"{where} is missing" if value is None else f"{where} is {shown(value)}"
        raise BadPlan(what, why=f"it must be a whole number from {least} to {most}")
    return value


def whole_numbers(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise BadPlan(f"{where} is {kind_of(value)}, not a list of whole numbers")
    return tuple(whole_number(item, f"{where}[{index}]", least=0) for index, item in enumerate(value))


def flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise BadPlan(f"{where} is {shown(value)}", why="it must be true or false")
    return value


def word_of(value: Any, where: str, *, longest: int = 64) -> str:
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise BadPlan(f"{where} is {shown(value)}", why="it must be one short word")
    return value


def type_of(word: str | None) -> str | None:
    """Return the type of numbers that a word means: `bf16` is bfloat16. What is no short name stays as it is."""
    return None if word is None else TYPES_BY_WORD.get(word.strip().lower(), word)


def words_of(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise BadPlan(f"{where} is {kind_of(value)}, not a list of words")
    return tuple(word_of(item, f"{where}[{index}]") for index, item in enumerate(value))


def positive(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MAX_COUNT:
        raise BadPlan(f"{where} is {shown(value)}", why="it must be a number above zero")
    return float(value)


def kind_of(value: Any) -> str:
    names: dict[type, str] = {type(None): "missing", dict: "an object", list: "a list", str: "a string", bool: "a flag"}
    return names.get(type(value), "a number")


def schedule_named(word: str) -> str:
    """Return our name for a schedule, whatever its capitals and hyphens; unknown words unchanged."""
    return _SCHEDULES.get(word.lower().replace("-", "").replace("_", ""), word)


# Our spelling of words that sources spell in several ways.
SPELLED: dict[str, Callable[[str], str]] = {
    "schedule": schedule_named,
    "recompute": lambda word: RECOMPUTE_SYNONYMS.get(word.lower(), word),
    "tp_overlap": canonical,
}


def with_modules(stated: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], list[str]]:
    """Return a plan's fields with the modules of `recompute_modules` as its recompute mode, and the assumptions.

    `selective` recomputes these modules; `full` ignores them, and `none` contradicts them.
    """
    given = stated_value(stated, "recompute_modules")
    rest = {name: value for name, value in stated.items() if name != "recompute_modules"}
    modules = () if given is None else words_of(given, f"{where}.recompute_modules")
    mode = stated_value(rest, "recompute")
    if not modules:
        return rest, []
    if mode == "none":
        raise BadPlan(f"{where}.recompute_modules with recompute none", why="nothing is recomputed", remedy="selective")
    if mode not in (None, "selective"):
        return rest, [f"recompute_modules {', '.join(modules)} change nothing: recompute {mode} takes whole layers"]
    return {**rest, "recompute": MODULES.join(modules)}, []


def plan_value(known: PlanField, value: Any, where: str) -> Any:
    """Return a plan's field as a case states it. Raises BadPlan for another type or a value out of range."""
    match known.kind:
        case Kind.COUNT:
            return whole_number(value, where, least=known.least, most=known.most)
        case Kind.NUMBER:
            return positive(value, where)
        case Kind.SWITCH:
            return flag(value, where)
        case Kind.COUNTS if isinstance(value, str):  # from a flag: 10,14,14,10
            words = [word.strip() for word in value.split(",")]
            return whole_numbers([int(w) if w.isascii() and w.isdecimal() and len(w) < 10 else w for w in words], where)
        case Kind.COUNTS:
            return whole_numbers(value, where)
        case Kind.WORDS:
            return words_of(value, where)
        case Kind.WORD if known.yes and not isinstance(value, str):
            return known.yes if flag(value, where) else known.default
    word = word_of(value, where, longest=known.longest)
    if known.yes and (word := word.lower()) not in known.choices:
        raise BadPlan(f"{where} is {word[:40]!r}", why=f"known: true, false, {', '.join(known.choices)}")
    return SPELLED[known.name](word) if known.name in SPELLED else word


def _product(stated: Mapping[str, Any]) -> int:
    product = 1
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp"):
        degree = stated.get(axis)
        product *= degree if isinstance(degree, int) and degree > 0 else 1  # others are refused when they are read
    return product


def gpus_of(stated: Mapping[str, Any], available: int) -> int:
    """Return the number of GPUs that the degrees require: their product, if data parallelism is stated or the product
    exceeds the cluster.
    """
    product = _product(stated)
    return product if {"dp_replicate", "dp_shard"} & set(stated) or product > available else available


def fill_gpus(stated: JsonObject, framework: Framework, gpus: int) -> list[str]:
    """Set an open data-parallel degree so that `gpus` are used, and return the assumption.

    If no whole degree does it, nothing is set, and the world-size rule reports that.
    """
    stage = stated.get("zero_stage")
    by_stage = stage == 0 or (bool(framework.zero_stages) and not unsaid(stage))
    filled = "dp_replicate" if by_stage else framework.fills
    degree, rest = divmod(gpus, _product(stated))
    if rest or degree <= 1 or not unsaid(stated.get(filled)):
        return []
    if filled == "dp_replicate" and not unsaid(stated.get("dp_shard")):
        return []
    stated[filled] = degree
    return [f"{filled} {degree} (fills {gpus} GPUs)"]


def replicas_of_stage_0(stated: JsonObject, framework: Framework) -> list[str]:
    """State the replicas that ZeRO stage 0 means, and return the assumption: it shards nothing."""
    if stated.get("zero_stage") != 0:
        return []
    if not framework.zero_stages and stated.get("cp", 1) == 1:
        del stated["zero_stage"]
    shards = stated.get("dp_shard", 1)
    if shards == 1:
        return []
    stated |= {"dp_replicate": stated.get("dp_replicate", 1) * shards, "dp_shard": 1}
    return [f"dp_shard {shards} are replicas: ZeRO stage 0 shards nothing"]


def stage_of_replicas(values: JsonObject, framework: Framework) -> list[str]:
    """State that runtimes which start from replicas keep them over context-parallel ranks, too."""
    sharded = values.get("dp_shard", 1) > 1 or values.get("cp", 1) == 1
    if framework.fills != "dp_replicate" or sharded or "zero_stage" in values:
        return []
    values["zero_stage"] = 0
    return [f"zero_stage 0 ({framework.title}'s default)"]


def stage_of_fsdp(values: JsonObject, framework: Framework, where: str) -> list[str]:
    """Replace ZeRO stage 2 by what FSDP has for it: it keeps what it gathered, until the backward pass has used it.

    Raises BadPlan where the plan states the opposite. torch.distributed.fsdp: `ShardingStrategy.SHARD_GRAD_OP`, and
    `reshard_after_forward` of `fully_shard`.
    """
    sharded = values.get("dp_shard", 1) * values.get("cp", 1) > 1
    if framework.zero_stages or framework.fsdp_by_degree_only or values.get("zero_stage") != 2 or not sharded:
        return []
    if values.get("reshard_after_forward"):
        raise BadPlan(
            f"{where}: ZeRO stage 2 with reshard_after_forward",
            why=f"{framework.title} shards with FSDP, whose stage 2 keeps gathered parameters after the forward pass",
            remedy="state one of them",
        )
    del values["zero_stage"]
    values["reshard_after_forward"] = False
    return ["ZeRO stage 2 is FSDP without reshard after forward, whose gradients and optimizer are sharded likewise"]


def case_id(data: Mapping[str, Any]) -> str:
    """Return a case's id, or `case` where it has none."""
    name = data.get("id")
    return name if isinstance(name, str) and name else "case"
