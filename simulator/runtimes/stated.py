"""The runtime that a source states, with its adapters and frozen weights: what it leaves open has the runtime's
defaults, or the usual recipe's, and is listed as assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from simulator.config.adapter import (
    ALL_LINEAR,
    DORA,
    FROZEN,
    IA3,
    LORA,
    MODULES,
    MOST_RANK,
    Adapter,
    adapter_kind,
    base_type,
)
from simulator.config.optimizers import OPTIMIZERS, canonical_optimizer
from simulator.config.runtime import COMPUTE_ONLY, DTYPE_BYTES, LOW_PRECISION, MOE_DISPATCHERS, Runtime
from simulator.config.savers import canonical_savers
from simulator.kernels.low_precision import USUAL, recipes
from simulator.runtimes.library import DATED, RuntimeSpec, runtime_spec, spec_for
from topology.codec import JsonObject
from topology.errors import BadPlan

# Months in which torch cut the branch of a release: its builds `2.N.0a0` are of the weeks before (pytorch/pytorch,
# RELEASE.md: Release cadence table).
TORCH_BRANCHES = {
    "2.4": "2024-06",
    "2.5": "2024-09",
    "2.6": "2024-12",
    "2.7": "2025-03",
    "2.8": "2025-06",
    "2.9": "2025-09",
    "2.10": "2025-12",
    "2.11": "2026-02",
    "2.12": "2026-04",
    "2.13": "2026-06",
    "2.14": "2026-08",
    "2.15": "2026-10",
}
# Scopes of CUDA graphs that contain whole layers or more.
WHOLE_GRAPHS = frozenset({"full_iteration", "full_iteration_inference", "full"})


def resolve(stated: JsonObject) -> tuple[Runtime, tuple[str, ...]]:
    """Return the runtime that a case states, completed with the runtime's defaults, and a list of these assumptions."""
    name = str(stated.get("name") or "pytorch")
    spec = runtime_spec(name)
    chosen: JsonObject = {}
    assumed = []
    for key in ("param_dtype", "compute_dtype", "reduce_dtype", "optimizer", "compile"):
        value = stated.get(key)
        if value is None or value == "unknown":
            value = getattr(spec.defaults, key)
            stored = stated.get("compute_dtype")
            if (
                key == "param_dtype"
                and spec.state.master_weights
                and stored in DTYPE_BYTES
                and stored not in LOW_PRECISION
            ):
                value = stored
            if key == "reduce_dtype" and spec.state.wide_sums and chosen["param_dtype"] not in spec.state.wide_sums:
                value = chosen["param_dtype"]
            assumed.append(f"runtime.{key} = {value} ({spec.names[0]} default)")
        if key == "compile" and value and not spec.tools.compiles:
            assumed.append(f"runtime.compile: {spec.names[0]} is not described with torch.compile, costed without it")
            value = False
        if key == "optimizer":
            value = canonical_optimizer(str(value))
            if value in OPTIMIZERS and OPTIMIZERS[value].matrices is not None:
                assumed.append(
                    f"{value}: AdamW updates embeddings, head, norms and biases; of momentum that is cut over ranks"
                    " torch.optim.Muon gathers or sums parts in every iteration, in bfloat16"
                )
        if key.endswith("dtype") and value not in DTYPE_BYTES and value not in COMPUTE_ONLY:
            raise BadPlan(
                f"runtime.{key} {value!r} is unknown",
                why=f"known: {', '.join({**DTYPE_BYTES, **dict.fromkeys(COMPUTE_ONLY, 0)})}",
                remedy="bfloat16, as most runs have it",
            )
        chosen[key] = value
    if chosen["compute_dtype"] in LOW_PRECISION:
        recipe, why = _recipe(stated.get("low_precision_recipe"), chosen["compute_dtype"], spec)
        chosen["low_precision_recipe"] = recipe
        chosen["wide_layers"] = tuple(stated.get("wide_layers") or (0, 0))
        assumed += why
        if any(chosen["wide_layers"]):
            assumed.append("parameters of layers in 16 bits are stored and gathered as those of the others")
    elif any(stated.get("wide_layers") or ()):
        assumed.append("runtime.wide_layers changes nothing: all products are in 16 bits or more")
    chosen["cuda_graph"] = bool(stated.get("cuda_graph"))
    chosen["reentrant"] = stated.get("reentrant")
    chosen["logs_each_step"] = bool(stated.get("logs_each_step"))
    if chosen["logs_each_step"] and not (spec.host.loads_ahead and spec.host.data_token_s):
        assumed.append(f"runtime.logs_each_step changes nothing: {spec.names[0]} is not known to load data ahead")
    chosen["adapter"], of_adapter = resolve_adapter(
        stated.get("adapter") or {}, usual=spec.defaults.adapter_targets, whose=spec.names[0]
    )
    assumed += of_adapter
    chosen["graph_scopes"] = tuple(stated.get("graph_scopes") or ())
    chosen["expert_products"] = str(stated.get("expert_products") or "")
    chosen["fused"] = tuple(stated.get("fused") or ())
    chosen["moe_dispatcher"] = dispatcher = str(stated.get("moe_dispatcher") or "")
    if dispatcher in MOE_DISPATCHERS and dispatcher not in spec.dispatchers:
        assumed.append(f"runtime.moe_dispatcher {dispatcher}: costed as {spec.dispatchers[0]} ({name}'s description)")
    if chosen["graph_scopes"] and (unknown := [s for s in chosen["graph_scopes"] if s not in spec.graph_scopes]):
        assumed.append(f"runtime.cuda_graph {', '.join(unknown)}: not described, launched kernel by kernel")
    version, release = stated.get("version"), stated.get("release")
    if release and not version and spec.earlier:
        version = _numbered(str(release), spec.names) or _dated(str(release))
        if version is None and (version := _built(str(release))):
            assumed.append(f"runtime.version = {version} (the month of the build of torch in {release!r})")
        elif version is None:
            assumed.append(f"runtime.version not stated, and release {release!r} is no month: {spec.names[0]} of today")
    runtime = Runtime(name=name, version=str(version) if version else None, **chosen)
    savers = stated.get("savers")
    if savers is None and (savers := spec_for(runtime).defaults.savers):
        assumed.append(f"runtime.savers = {', '.join(savers)} ({spec.names[0]} default)")
    return runtime.with_savers(canonical_savers([*(savers or ()), *(stated.get("noted_savers") or ())])), tuple(assumed)


def _numbered(release: str, names: tuple[str, ...]) -> str | None:
    """Return the number that a release gives the runtime, among other software: `torchtitan 0.2.1, torch 2.9`."""
    found = re.search(rf"\b({'|'.join(map(re.escape, names))})[ =v]+(\d+(\.\d+)+)", release.lower())
    return found.group(2) if found else None


def _dated(release: str) -> str | None:
    """Return the month that a release names: the release itself, or the latest month of the year that it names."""
    if DATED.match(release):
        return release
    months, years = re.findall(r"\b20\d\d-[01]\d\b", release), re.findall(r"\b20\d\d\b(?!-)", release)
    return months[0] if len(months) == 1 else f"{years[0]}-12" if len(years) == 1 and not months else None


def _built(release: str) -> str | None:
    """Return the month of the build of torch that a release names, where that is not a release of torch itself: of a
    nightly one its date, else the latest that it can be.
    """
    nightly = re.search(r"\btorch[ =v]+[\d.]+dev(20\d\d)([01]\d)\d\d", release.lower())
    before = re.search(r"\btorch[ =v]+(\d\.\d+)\.0a0", release.lower())
    return "-".join(nightly.groups()) if nightly else TORCH_BRANCHES.get(before.group(1)) if before else None


def _recipe(stated: Any, dtype: str, spec: RuntimeSpec) -> tuple[str, list[str]]:
    """Return the recipe of products in a low type, and a list of assumptions. Raises BadPlan for a recipe of another
    type.
    """
    known = [
        name for name, recipe in {**recipes(), "tensorwise": recipes()["current"]}.items() if recipe.dtype == dtype
    ]
    if stated in (None, "", "unknown"):
        usual = spec.low_precision.recipe if spec.low_precision else ""
        name = usual if usual in known else USUAL[dtype]
        return name, [f"runtime.low_precision_recipe = {name}"]
    if stated not in known and (near := next((name for name in known if str(stated).startswith(f"{name}_")), None)):
        return near, [f"runtime.low_precision_recipe {stated}: costed as {near}"]  # a kind of it
    if stated not in known:
        raise BadPlan(f"runtime.low_precision_recipe {stated!r} is none of {dtype}", why=f"known: {', '.join(known)}")
    return str(stated), []


ADAPTER_KEYS = ("kind", "rank", "target_modules", "base_weights", "dropout")
# Defaults: the rank of peft's LoraConfig and of torchtune's recipes; queries and values, which the paper of LoRA adapts
# (section 4.2), are peft's default for Llama-like models.
USUAL_RANK = 8
USUAL_TARGETS = ("q_proj", "v_proj")


def resolve_adapter(
    stated: JsonObject, *, usual: tuple[str, ...] = (), whose: str = ""
) -> tuple[Adapter | None, list[str]]:
    """Return the adapter that `stated` describes (None without one) and a list of assumptions. `usual` are the modules
    in the recipes of `whose` software, or peft's if it has none.

    Raises BadPlan, naming the key.
    """
    if not any(value not in (None, "", "unknown") for value in stated.values()):
        return None, []
    assumed: list[str] = []
    kind, implied = adapter_kind(str(stated.get("kind") or LORA))
    said = stated.get("base_weights")
    base = base_type(str(said)) if said else implied
    if not usual:
        usual, whose = USUAL_TARGETS, "peft"
    targets = _targets(stated.get("target_modules"), kind, usual)
    if targets is usual:
        assumed.append(f"runtime.adapter.target_modules = {', '.join(usual)} ({whose}'s default)")
    rank = stated.get("rank") if kind in {LORA, DORA} else 1
    if rank is None:
        rank = USUAL_RANK
        assumed.append(f"runtime.adapter.rank = {rank} (peft's and torchtune's default)")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank <= MOST_RANK:
        raise BadPlan(f"runtime.adapter.rank is {str(rank)[:40]!r}", why=f"it is a whole number from 1 to {MOST_RANK}")
    dropout = stated.get("dropout") or 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise BadPlan(f"runtime.adapter.dropout is {str(dropout)[:40]!r}", why="it is a share: from 0 up to 1")
    adapter = Adapter(
        kind=kind,
        rank=rank if kind in {LORA, DORA} else 0,
        target_modules=targets,
        base_weights=base,
        dropout=float(dropout),
    )
    return adapter, assumed


def _targets(stated: Any, kind: str, usual: tuple[str, ...]) -> tuple[str, ...]:
    words = [stated] if isinstance(stated, str) else list(stated) if isinstance(stated, Iterable) else []
    if not all(isinstance(word, str) and word.isprintable() and 0 < len(word) <= 128 for word in words):
        raise BadPlan(
            "runtime.adapter.target_modules is no list of names", remedy='["q_proj", "v_proj"], or "all-linear"'
        )
    if kind == FROZEN:
        if not words:
            raise BadPlan("runtime.adapter freezes nothing", remedy='name modules in target_modules: ["embed_tokens"]')
        return tuple(words)
    if not words and kind == IA3:
        return ("k_proj", "v_proj", "down_proj")  # the paper's, section 3.3
    if not words:
        return usual
    names = tuple(dict.fromkeys(_known(word) for word in words))
    return (ALL_LINEAR,) if ALL_LINEAR in names else names


def _known(word: str) -> str:
    """Return the name of a module; `all linear` becomes our name for it. Raises BadPlan for one that no model has."""
    plain = word.lower().replace("_", "-").replace(" ", "-")
    if plain in {ALL_LINEAR, "all"}:
        return ALL_LINEAR
    name = word.rpartition(".")[2]
    if name.lower() not in MODULES:
        raise BadPlan(
            f"adapter.target_modules {word[:40]!r} is no matrix of a layer",
            why=f"known: {', '.join(MODULES)}, {ALL_LINEAR}",
        )
    return name
