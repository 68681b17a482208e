"""What was requested against what took effect, read back from what ran: a flag that is ignored is found here.

Pure: from the request, what a rank recorded of its model after the last step, and its timeline. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from executor.legal import cp_method
from executor.request import Request
from simulator import trace as tr
from simulator.overlap_sites import mode_at, spoken
from simulator.trace import Trace

# Parts of kernel names, lower case, by what a plan counts on. Two for grouped products: ours by CUTLASS's type name.
FLASH = ("flash", "fmha", "cudnn_generated_fort_native_sdpa")
GROUPED = ("groupproblemshape", "grouped")
FUSED_ADAM = ("fusedadam",)
COMPILED = ("triton_",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One setting; `ok` where what took effect is what was requested.

    `certain`: read from the model itself. Names of kernels change with libraries: where they do not match, a person is
    told, but the run stands.
    """

    what: str
    requested: str
    effective: str
    ok: bool
    certain: bool = True


def read_back(
    request: Request, built: Mapping[str, Any] | None, mesh: Mapping[str, Any] | None, trace: Trace | None
) -> list[Effect]:
    """Return every setting that can be read back. What was not recorded is not claimed."""
    found = []
    if mesh is not None:
        axes = {axis: size for axis, size in mesh["axes"].items() if size > 1} or {"one rank": 1}
        wanted = {axis: getattr(request.plan, axis) for axis in mesh["axes"]}
        asked = {axis: size for axis, size in wanted.items() if size > 1} or {"one rank": 1}
        found.append(_effect("mesh", _words(asked), _words(axes), ok=bool(mesh["as_requested"])))
    if built is not None:
        found += _built(request, built)
    if trace is not None and any(trace.of(category=tr.COMPUTE)):
        found += _kernels(request, trace)
    return found


def _built(request: Request, built: Mapping[str, Any]) -> list[Effect]:
    plan, runtime = request.plan, request.runtime
    shards = plan.dp_shard * plan.cp * plan.tp
    graphs, breaks = int(built["compiled_graphs"]), int(built["graph_breaks"])
    compiled = f"{graphs} graphs, {breaks} graph breaks" if graphs else "eager"
    found = [
        _effect(
            "largest weights cut into",
            str(shards),
            str(built["most_shards"]),
            ok=built["most_shards"] == shards,
        ),
        _effect("compile", "yes" if runtime.compile else "no", compiled, ok=(graphs > 0) == runtime.compile),
        _effect(
            "parameters stored in", runtime.param_dtype, str(built["stored"]), ok=built["stored"] == runtime.param_dtype
        ),
    ]
    modes = set(plan.recompute_per_stage or (plan.recompute,)) - {"none"}
    found.append(
        _effect(
            "recompute",
            ", ".join(sorted(modes)) or "none",
            f"{built['recomputed_blocks']} of {built['blocks']} blocks on this rank",
            ok=bool(modes) or not built["recomputed_blocks"],
        )
    )
    if plan.pp > 1:
        rounds = plan.micro_batches(request.workload.global_batch_size)
        asked = f"{plan.schedule or 'the default'}, {rounds} micro batches"
        ran = f"{built['schedule']}, {built['micro_batches']} micro batches"
        found.append(_effect("pipeline", asked, ran, ok=built["micro_batches"] == rounds))
    if plan.tp > 1:
        found.append(_overlap(plan.tp_overlap, built["tp_overlap"]))
    if plan.cp > 1:
        asked = cp_method(plan, runtime)
        found.append(_effect("cp_method", asked, str(built["cp_method"]), ok=asked == built["cp_method"]))
    return found


def _overlap(asked: str, applied: Mapping[str, str]) -> Effect:
    """Return whether every site that this rank's blocks have runs in its mode."""
    ran = ", ".join(f"{site} {mode}" for site, mode in applied.items())
    if len(set(applied.values())) == 1:
        ran = next(iter(applied.values()))
    right = all(mode == mode_at(asked, site) for site, mode in applied.items())
    return _effect("tp_overlap", spoken(asked), ran or "no block on this rank", ok=right)


def _kernels(request: Request, trace: Trace) -> list[Effect]:
    """Return what the kernels' names prove."""
    names = Counter(span.name.lower() for span in trace.spans if span.category == tr.COMPUTE)

    def count(parts: tuple[str, ...]) -> int:
        return sum(n for name, n in names.items() if any(part in name for part in parts))

    narrow = request.runtime.compute_dtype in {"bfloat16", "float16"}
    wanted = [
        ("attention kernels", "flash" if narrow else "any", FLASH, narrow),
        ("optimizer kernels", "fused AdamW", FUSED_ADAM, True),
    ]
    if request.model.moe is not None and request.runtime.compute_dtype == "bfloat16":
        wanted.append(("expert kernels", "grouped", GROUPED, True))
    if request.runtime.compile:
        wanted.append(("compiled kernels", "Triton's", COMPILED, True))
    found = [
        Effect(
            what=what,
            requested=asked,
            effective=f"{count(parts)} launches",
            ok=count(parts) > 0 or not needed,
            certain=False,
        )
        for what, asked, parts, needed in wanted
    ]
    algorithms = sorted({_nccl(span.name) for span in trace.spans if "nccl" in span.name.lower()})
    if algorithms:
        found.append(_effect("NCCL", "its own choice", ", ".join(algorithms), ok=True))
    return found


def _nccl(name: str) -> str:
    """`ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)` is `AllReduce_Sum_f32_RING_LL`."""
    return name.split("(", maxsplit=1)[0].removeprefix("ncclDevKernel_").removeprefix("ncclKernel_")


def _effect(what: str, requested: str, effective: str, *, ok: bool) -> Effect:
    return Effect(what=what, requested=requested, effective=effective, ok=ok)


def _words(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())


def operator_table(trace: Trace, most: int = 40) -> list[dict[str, Any]]:
    """Return the kernels of a timeline that took longest together: name, calls, total and median seconds."""
    by_name: dict[str, list[float]] = {}
    for span in trace.spans:
        if span.category != tr.HOST:
            by_name.setdefault(span.name, []).append(span.duration_s)
    ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        {"name": name[:200], "calls": len(times), "seconds": sum(times), "median_s": median(times)}
        for name, times in ordered
    ]
