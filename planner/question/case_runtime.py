"""The runtime of a case: what a source states, what that implies, and the runtime's defaults for the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from planner.question.case_fields import flag, kind_of, refuse_unknown, section_of, type_of, unsaid, word_of, words_of
from planner.question.case_words import RUNTIME_KEYS
from planner.question.notes import (
    bf16_moments_noted,
    compile_noted,
    float8_noted,
    graph_scopes_noted,
    low_layers_noted,
    month_of,
)
from simulator.config.optimizers import canonical_optimizer
from simulator.config.overlap_sites import USERBUFFERS
from simulator.config.runtime import DEFAULT_RUNTIME, FUSED_KERNELS, LOW_PRECISION, Runtime
from simulator.config.savers import optimizer_said, savers_of_some, savers_said
from simulator.legality.frameworks import ANY, Framework, framework_of_runtime
from simulator.runtimes.called import CALLED, called
from simulator.runtimes.library import is_described, lineage, runtime_names, runtime_spec
from simulator.runtimes.stated import ADAPTER_KEYS, WHOLE_GRAPHS, resolve
from topology.codec import JsonObject
from topology.errors import BadPlan, UserError
from topology.ranges import shown

_NO_GRAPHS = ("no", "off", "false", "impl none")  # words of sources for no CUDA graphs


# The compute type of a stated recipe if the source does not name the type.
_RECIPES = {
    **dict.fromkeys(
        ("delayed", "current", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"), "float8"
    ),
    "nvfp4": "float4",
}


def resolve_runtime(stated: Mapping[str, Any]) -> tuple[Runtime, list[str]]:
    """Return the runtime that `stated` describes, completed by defaults, and the assumptions. Raises BadPlan."""
    runtime, assumed = resolve({k: (None if unsaid(v) else v) for k, v in stated.items()})
    return runtime, list(assumed)


def runtime_section(data: Mapping[str, Any], name: str, assumed: list[str]) -> JsonObject:
    """Return the runtime of a case, checked; assumptions are added to `assumed`. Raises UserError."""
    stated = section_of(data, "runtime", name)
    refuse_unknown(stated, RUNTIME_KEYS, f"case {name}: runtime")
    note = str(data.get("note") or "")
    said_graphs = stated.pop("cuda_graph", None)
    if said_graphs is True and (scopes := graph_scopes_noted(note)):
        said_graphs = scopes
        assumed.append(f"CUDA graphs of {', '.join(scopes)} (the note says so)")
    stated |= graphs_stated(said_graphs, f"case {name}: runtime.cuda_graph")
    if unsaid(stated.get("compile")) and compile_noted(note):
        stated["compile"] = True
        assumed.append("runtime.compile = True (the note says so)")
    if float8_noted(note) and stated.get("compute_dtype") not in LOW_PRECISION:
        stated["compute_dtype"] = "float8"  # a 16-bit type is that of everything but products
        assumed.append("products in float8 (the note says so)")
    if bf16_moments_noted(note) and canonical_optimizer(str(stated.get("optimizer") or "adamw")) in {"adam", "adamw"}:
        stated["optimizer"] = "adamwbf16moments"
        assumed.append("moments in bfloat16 (the note says so)")
    stated |= _fused(stated.pop("kernels", None), f"case {name}: runtime.kernels", assumed)
    if unsaid(stated.get("savers")) and (said := savers_said(note)):
        stated["noted_savers"] = said
        assumed.append(f"runtime.savers has {', '.join(said)} (the note says so)")
    if unsaid(stated.get("optimizer")) and (optimizer := optimizer_said(note)):
        stated["optimizer"] = optimizer
        assumed.append(f"runtime.optimizer = {optimizer} (the note says so)")
    maybe = [saver for saver in savers_of_some(note) if unsaid(stated.get("savers")) or saver not in stated["savers"]]
    assumed += [f"runtime.savers without {saver} (the note speaks of it, maybe for other runs)" for saver in maybe]
    stated["adapter"] = _adapter_section(stated.get("adapter"), f"case {name}: runtime.adapter")
    for key, value in stated.items():
        if unsaid(value) or key in {"adapter", "noted_savers"}:
            continue
        if key == "wide_layers":
            stated[key] = _wide_layers(value, f"case {name}: runtime.{key}")
        elif key in {"savers", "graph_scopes", "fused"}:
            stated[key] = words_of(value, f"case {name}: runtime.{key}")
        elif key in {"compile", "cuda_graph", "reentrant", "logs_each_step"}:
            flag(value, f"case {name}: runtime.{key}")
        else:
            stated[key] = word_of(value, f"case {name}: runtime.{key}")
            if key.endswith("_dtype"):
                stated[key] = type_of(value)
    fused = () if unsaid(stated.get("fused")) else stated["fused"]
    if others := {*fused} - {part for parts in FUSED_KERNELS.values() for part in parts}:
        raise BadPlan(f"case {name}: runtime.fused has {shown(min(others))}", remedy="runtime.kernels, in words")
    recipe = stated.get("low_precision_recipe")
    if not unsaid(recipe):
        if unsaid(stated.get("compute_dtype")) and recipe in _RECIPES:
            stated["compute_dtype"] = _RECIPES[recipe]
            assumed.append(f"compute in {_RECIPES[recipe]} (low_precision_recipe {recipe})")
        elif stated.get("compute_dtype") not in LOW_PRECISION:
            assumed.append(f"low_precision_recipe {recipe} changes nothing: no low precision was stated with it")
    if unsaid(stated.get("name")):
        stated["name"] = DEFAULT_RUNTIME
        assumed.append(f"runtime {DEFAULT_RUNTIME} (not stated)")
    else:
        stated |= described_runtime(stated, section_of(data, "plan", name), assumed)
    return _as_of(str(data.get("source") or ""), _of_release(stated, assumed), assumed)


def _as_of(source: str, stated: JsonObject, assumed: list[str]) -> JsonObject:
    """Return the runtime with the month of the publication that the row is from as its version, if the row states no
    release: newer software cannot have run.
    """
    dated = is_described(stated["name"]) and runtime_spec(stated["name"]).earlier
    month = month_of(source) if dated and unsaid(stated.get("version")) and unsaid(stated.get("release")) else None
    if month is None:
        return stated
    assumed.append(f"{stated['name']} as of {month} (no release is stated; its source is of that month)")
    return {**stated, "version": month}


def _of_release(stated: JsonObject, assumed: list[str]) -> JsonObject:
    """Return the runtime for the software that its release names, if that has a description of its own: a PyTorch loop
    may run its own layers or those of transformers, and other tools have recipes with Megatron-Core's layers.
    """
    words = re.split(r"[^a-z0-9]+", str(stated.get("release") or "").lower())
    pairs = [f"{first}-{second}" for first, second in pairwise(words)]
    kinds = [word for word in (*pairs, *words) if is_described(word) and stated["name"] in lineage(word)]
    if not kinds:
        return stated
    assumed.append(f"{kinds[0]} (release {stated['release']!r})")
    return {**stated, "name": kinds[0]}


# Tools that train with the loop, or a fork, of a described runtime.
_RUN_BY = {
    **dict.fromkeys(("axolotl", "llama-factory", "llamafactory", "ms-swift", "swift", "unsloth"), "transformers"),
    **dict.fromkeys(("fms-hf-tuning", "fms-acceleration", "open-r1"), "trl"),
    **dict.fromkeys(("flagscale", "megatron-swift"), "megatron-lm"),
}


def described_runtime(stated: Mapping[str, Any], plan: Mapping[str, Any], assumed: list[str]) -> JsonObject:
    """Return the name, and the version after `@`, of the described runtime that a name means. It may be the nearest
    one, which is then added to `assumed`.
    """
    name, version = called(stated["name"])
    if name != ANY.name and not is_described(name) and framework_of_runtime(name) is ANY:
        near = _RUN_BY.get(name) or _nearest(name, plan)
        assumed.append(f"runtime {shown(stated['name'])} is not described: answered as {near}, the nearest that is")
        name = near
    return {"name": name, **({"version": version} if version and unsaid(stated.get("version")) else {})}


def _nearest(name: str, plan: Mapping[str, Any]) -> str:
    """Return the described runtime with a name similar to `name`, else the usual runtime for such a plan."""
    near = get_close_matches(name, (*runtime_names(), *CALLED), n=1, cutoff=0.75)
    if near:
        return called(near[0])[0]
    inside = any((plan.get(axis) or 1) != 1 for axis in ("tp", "pp"))
    by_stage = not unsaid(plan.get("zero_stage"))
    return "megatron-lm" if inside and by_stage else "deepspeed" if by_stage else "pytorch"


def _fused(said: Any, where: str, assumed: list[str]) -> JsonObject:
    """Return the fused operators of third-party kernels, as far as described; others are added to `assumed`."""
    if unsaid(said) or word_of(said, where).lower() == "none":
        return {}
    parts = tuple(
        dict.fromkeys(part for word, fused in FUSED_KERNELS.items() if word in said.lower() for part in fused)
    )
    if "linear_loss" in parts:
        parts = tuple(part for part in parts if part != "loss")
    if not parts:
        assumed.append(f"runtime.kernels {said}: what they fuse is not described, costed without them")
    return {"fused": parts}


def _wide_layers(stated: Any, where: str) -> tuple[int, int]:
    """Return how many layers stay in 16 bits, of the first and of the last. Raises BadPlan."""
    counts = stated if isinstance(stated, (list, tuple)) else ()
    if len(counts) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in counts):
        raise BadPlan(
            f"{where} is {shown(stated)}",
            why="it must be two whole numbers: how many of the first and of the last layers stay in 16 bits",
            remedy="[0, 6]",
        )
    return counts[0], counts[1]


def noted_wide_layers(runtime: Mapping[str, Any], note: str, layers: int, assumed: list[str]) -> JsonObject:
    """Return the layers that stay in 16 bits if only the note says that others are in the stated low type."""
    found = low_layers_noted(note, {str(runtime.get(key)) for key in ("compute_dtype", "low_precision_recipe")})
    if found is None or not unsaid(runtime.get("wide_layers")) or not found[0] <= found[1] < layers:
        return {}
    wide = found[0], layers - 1 - found[1]
    assumed.append(f"runtime.wide_layers = {wide[0]}, {wide[1]} (the note says so)")
    return {"wide_layers": wide}


def _adapter_section(stated: Any, where: str) -> JsonObject:
    """Return the adapters of a case, without what it leaves open. Raises BadPlan."""
    if unsaid(stated):
        return {}
    if not isinstance(stated, dict):
        raise BadPlan(f"{where} is {kind_of(stated)}, not an object", remedy='{"kind": "lora", "rank": 16}')
    refuse_unknown(stated, ADAPTER_KEYS, where)
    return {key: value for key, value in stated.items() if not unsaid(value)}


def graphs_stated(said: Any, where: str) -> JsonObject:
    """Return a source's CUDA graphs: whether there are any, and for which parts of a layer if it lists them."""
    if isinstance(said, (list, tuple)):
        scopes = tuple(word.replace(" ", "_").lower() for word in words_of(said, where))
        return {"cuda_graph": bool(scopes), "graph_scopes": () if {*scopes} & WHOLE_GRAPHS else scopes}
    if unsaid(said):
        return {}
    return {"cuda_graph": not (said is False or str(said).lower().startswith(_NO_GRAPHS))}


def implied_runtime(runtime: JsonObject, plan: Mapping[str, Any], framework: Framework) -> tuple[JsonObject, list[str]]:
    """Set what a stated plan implies: asynchronous tensor parallelism exists in compiled models only."""
    overlap = plan.get("tp_overlap")
    overlaps = not unsaid(overlap) and overlap not in {"none", USERBUFFERS}  # TransformerEngine's need no compiler
    if overlaps and framework.overlap_needs_compile and unsaid(runtime.get("compile")):
        return {**runtime, "compile": True}, [f"compile true (tp_overlap={overlap} exists in compiled models only)"]
    return runtime, []


def refuse_compile(said: Mapping[str, Any], runtime: str) -> None:
    """Raise UserError if a flag compiles the model of a runtime that is described without torch.compile."""
    if said.get("compile") and not runtime_spec(runtime).tools.compiles:
        raise UserError(
            f"--compile changes nothing in {runtime}",
            why="it is described without torch.compile of its layers",
            remedy="leave --compile out",
        )
