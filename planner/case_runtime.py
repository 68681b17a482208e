"""The runtime of a case: what a source says of it, what that implies, and what is left at the runtime's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from planner.case_fields import flag, ignored_keys, section_of, unsaid, word_of
from planner.frameworks import Framework

if TYPE_CHECKING:
    from simulator.runtime import Runtime

_RUNTIME_KEYS = ("name", "version", "compile", "param_dtype", "compute_dtype", "reduce_dtype", "optimizer")


def resolve_runtime(stated: Mapping[str, Any]) -> tuple[Runtime, list[str]]:
    """Return the runtime that `stated` describes, the rest at its defaults, and what was assumed. Raises BadPlan."""
    from simulator.runtime_library import resolve  # noqa: PLC0415 - keeps `--help` light

    runtime, assumed = resolve({k: (None if unsaid(v) else v) for k, v in stated.items()})
    return runtime, list(assumed)


def runtime_section(data: Mapping[str, Any], name: str, assumed: list[str]) -> dict[str, Any]:
    """Return what a case says of its runtime, checked; what it leaves out goes to `assumed`. Raises UserError."""
    stated = section_of(data, "runtime", name)
    assumed += ignored_keys(stated, _RUNTIME_KEYS, f"case {name}: runtime")
    stated = {key: value for key, value in stated.items() if key in _RUNTIME_KEYS}
    for key, value in stated.items():
        if unsaid(value):
            continue
        if key == "compile":
            flag(value, f"case {name}: runtime.compile")
        else:
            word_of(value, f"case {name}: runtime.{key}")
    if unsaid(stated.get("name")):
        stated["name"] = "torchtitan"
        assumed.append("runtime torchtitan (not stated)")
    return stated


def implied_runtime(
    runtime: dict[str, Any], plan: Mapping[str, Any], framework: Framework
) -> tuple[dict[str, Any], list[str]]:
    """Fill in what a stated plan implies: asynchronous tensor parallelism exists in compiled models only."""
    overlap = plan.get("tp_overlap")
    overlaps = not unsaid(overlap) and overlap != "none"
    if overlaps and framework.overlap_needs_compile and unsaid(runtime.get("compile")):
        return {**runtime, "compile": True}, [f"compile true (tp_overlap={overlap} exists in compiled models only)"]
    return runtime, []


def version_of_source(runtime: dict[str, Any]) -> list[str]:
    """Fill in the version of a run that a source reports without one, where versions run different kernels."""
    from simulator.runtime_library import version_of_reports  # noqa: PLC0415 - keeps `--help` light

    version = version_of_reports(runtime["name"])
    if version is None or not unsaid(runtime.get("version")):
        return []
    runtime["version"] = version
    return [f"runtime.version {version} (not stated: reports without one are of early versions)"]
