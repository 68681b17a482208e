"""Convert a run with names of the command line, all on one level, to a case: how people write down their own runs.

`{"model": "llama3-8b", "cluster": "8xH100", "micro-batch": 2, "step_s": 3.1}` states the same as the sections of a
case. All unknown names are reported together, each with the name that it may stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from planner.io.inputs import read_cluster
from planner.question.case_fields import kind_of, unsaid
from simulator.config.plan import PLAN_FIELDS
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadPlan, PlannerError
from topology.ranges import shown

# Origin and history of a case: kept with it, and not used for predictions. `note` explains measurements.
ABOUT_KEYS = ("source", "note", "notes", "comment", "url", "date", "peers")
CASE_KEYS = ("id", "model", "cluster", "workload", "plan", "runtime", "measured", "outcome", *ABOUT_KEYS)
WORKLOAD_KEYS = tuple(one.name for one in fields(Workload))
# `release` and `kernels` are the source's own words, of which the runtime's other fields are read.
RUNTIME_KEYS = (*(one.name for one in fields(Runtime)), "release", "kernels")
MEASURED_KEYS = (
    "step_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "flops_are",
    "peak_memory_gib",
    "mfu",
    "memory_is",
    "memory_rank",
    "log",
)
# `recompute_modules` are modules that `recompute` may name instead of a mode
# (`planner.question.case_fields.with_modules`).
PLAN_KEYS = (*PLAN_FIELDS, "recompute_modules")
SECTIONS = {"workload": WORKLOAD_KEYS, "plan": PLAN_KEYS, "runtime": RUNTIME_KEYS}
_NAMES = frozenset({"name", "version", "task", "log"})  # ambiguous without their section


ALIKE = 4  # leading letters that are enough to suggest a name


def _words() -> dict[str, tuple[str, str]]:
    """Return the section, and the key in it, of every name in a row."""
    found = {
        key: (section, key)
        for section, keys in (*SECTIONS.items(), ("measured", MEASURED_KEYS))
        for key in keys
        if key not in _NAMES
    }
    found |= {known.parameter: ("plan", name) for name, known in PLAN_FIELDS.items() if known.flag}
    found |= {f"measured_{key}": ("measured", key) for key in MEASURED_KEYS}
    return found | {
        "global_batch": ("workload", "global_batch_size"),
        "seq": ("workload", "seq_len"),
        "framework": ("runtime", "name"),
        "runtime_version": ("runtime", "version"),
        "log": ("measured", "log"),
    }


WORDS: Mapping[str, tuple[str, str]] = _words()


def is_plan_file(data: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is a saved plan, not a case."""
    return "fingerprints" in data and "plan" in data


def in_sections(row: Mapping[str, Any], name: str) -> JsonObject:
    """Return a row as a case: words of the command line in their sections, with `gpus` of its cluster.

    Raises BadPlan with all unknown names in the row and its sections.
    """
    case: JsonObject = {}
    unknown: list[str] = []
    for key, value in row.items():
        word = str(key).lstrip("-").replace("-", "_")
        if key in CASE_KEYS and not (key == "runtime" and isinstance(value, str)):
            case[key] = dict(value) if isinstance(value, dict) else value
        elif word == "runtime":
            _put(case, "runtime", "name", value, name)
        elif word in WORDS:
            _put(case, *WORDS[word], value, name)
        elif word != "gpus":
            unknown.append(did_you_mean(str(key), (*CASE_KEYS, *WORDS, "gpus")))
    for section, known in SECTIONS.items():
        inside = case.get(section)
        if isinstance(inside, dict):
            unknown += [
                did_you_mean(f"{section}.{key}", [f"{section}.{word}" for word in known])
                for key in inside
                if key not in known
            ]
    if is_plan_file(row):
        raise BadPlan(
            "this is a plan file, not a case",
            why="planner suggest --out saved it",
            remedy="planner estimate --plan FILE",
        )
    if unknown:
        few = unknown[:12]
        raise BadPlan(
            f"case {name}: nothing reads {', '.join(few)}{' and others' if len(unknown) > len(few) else ''}",
            why="it would be ignored",
            remedy=f"known: {', '.join(CASE_KEYS)} and what they hold, or words of the command line;"
            " planner validate --example shows a row",
        )
    gpus = next((row[key] for key in row if str(key).lstrip("-") == "gpus"), None)
    return case if unsaid(gpus) else {**case, "cluster": _of_gpus(case.get("cluster"), gpus, name)}


def sectioned(row: JsonObject) -> JsonObject:
    """Return a row as a case; one with unknown names unchanged, so that `load_case` refuses it."""
    name = row.get("id")
    try:
        return in_sections(row, name if isinstance(name, str) and name else "case")
    except PlannerError:
        return row


def did_you_mean(key: str, known: Any) -> str:
    """Return an unknown key with the known ones that it may stand for: those that contain it, or the most
    similar one.
    """
    word = key.lstrip("-").replace("-", "_")
    near = sorted((one for one in known if word in one.split("_")), key=len)[:2]
    near = near or get_close_matches(word, known, n=1, cutoff=0.7)
    near = near or [one for one in known if one[:ALIKE] == word[:ALIKE]][:1]
    return shown(key) + (f" (did you mean {' or '.join(map(repr, near))}?)" if near else "")


def _put(case: JsonObject, section: str, key: str, value: Any, name: str) -> None:
    inside = case.setdefault(section, {})
    if not isinstance(inside, dict):
        raise BadPlan(f"case {name}: {section} is {kind_of(inside)}, not an object")
    if key in inside and inside[key] != value:
        raise BadPlan(f"case {name}: {section}.{key} is said twice, {shown(inside[key])} and {shown(value)}")
    inside[key] = value


def _of_gpus(cluster: Any, gpus: Any, name: str) -> Any:
    """Return a cluster by name with this number of GPUs, in the form of a cluster file."""
    if isinstance(gpus, bool) or not isinstance(gpus, int):
        raise BadPlan(f"case {name}: gpus is {shown(gpus)}", why="it must be a whole number")
    if not isinstance(cluster, str):
        raise BadPlan(f"case {name}: gpus says how many GPUs of a cluster by name, and cluster is {kind_of(cluster)}")
    return codec.to_builtins(read_cluster(cluster, gpus))
