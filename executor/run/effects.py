"""Compare requested settings with those that took effect in a run, to find ignored settings.

Inputs are the request, the facts that a rank recorded about its model after the last step, and its trace. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from executor.launch.legal import cp_method
from executor.launch.request import Request
from executor.parallel.facts import MeshFacts, ModelFacts
from simulator.config.overlap_sites import mode_at, tp_overlap_label
from simulator.config.plan import NCCL
from simulator.program import trace as tr
from simulator.program.trace import Trace

# Parts of kernel names, in lower case. CUTLASS's grouped matmul is recognised by its problem-shape type.
FLASH = ("flash", "fmha", "cudnn_generated_fort_native_sdpa")
GROUPED = ("groupproblemshape", "grouped")
FUSED_ADAM = ("fusedadam",)
COMPILED = ("triton_",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One setting; `ok` if the effective value is the requested one, `certain` if it was read from the model itself.

    Kernel names change with library versions, so a mismatch there is reported but does not fail the run.
    """

    what: str
    requested: str
    effective: str
    ok: bool
    certain: bool = True


def read_back(request: Request, facts: ModelFacts | None, mesh: MeshFacts | None, trace: Trace | None) -> list[Effect]:
    """Return every setting that can be read back; settings that were not recorded are left out."""
    found = []
    if mesh is not None:
        axes = {axis: size for axis, size in mesh.axes.items() if size > 1} or {"one rank": 1}
        wanted = {axis: getattr(request.plan, axis) for axis in mesh.axes}
        requested = {axis: size for axis, size in wanted.items() if size > 1} or {"one rank": 1}
        found.append(_effect("mesh", _words(requested), _words(axes), ok=mesh.as_requested))
    if facts is not None:
        found += _model_effects(request, facts)
    if trace is not None and any(trace.of(category=tr.COMPUTE)):
        found += _kernel_effects(request, trace)
    return found


def _model_effects(request: Request, facts: ModelFacts) -> Iterator[Effect]:
    plan, runtime = request.plan, request.runtime
    shards = plan.dp_shard * plan.cp * plan.tp
    graphs, breaks = facts.compiled_graphs, facts.graph_breaks
    compiled = f"{graphs} graphs, {breaks} graph breaks" if graphs else "eager"
    yield from [
        _effect(
            "largest weights cut into",
            str(shards),
            str(facts.most_shards),
            ok=facts.most_shards == shards,
        ),
        _effect("compile", "yes" if runtime.compile else "no", compiled, ok=(graphs > 0) == runtime.compile),
        _effect("parameters stored in", runtime.param_dtype, facts.stored, ok=facts.stored == runtime.param_dtype),
    ]
    modes = set(plan.recompute_per_stage or (plan.recompute,)) - {"none"}
    yield _effect(
        "recompute",
        ", ".join(sorted(modes)) or "none",
        f"{facts.recomputed_blocks} of {facts.blocks} blocks on this rank",
        ok=bool(modes) or not facts.recomputed_blocks,
    )
    if plan.pp > 1:
        rounds = plan.micro_batches(request.workload.global_batch_size)
        requested = f"{plan.schedule or 'the default'}, {rounds} micro batches"
        ran = f"{facts.schedule}, {facts.micro_batches} micro batches"
        yield _effect("pipeline", requested, ran, ok=facts.micro_batches == rounds)
    if plan.tp > 1:
        yield _overlap(plan.tp_overlap, facts.tp_overlap)
    if plan.cp > 1:
        requested = cp_method(plan, runtime)
        yield _effect("cp_method", requested, facts.cp_method, ok=requested == facts.cp_method)
    if plan.fsdp_exchange != NCCL:
        ok = plan.fsdp_exchange == facts.fsdp_exchange
        yield _effect("FSDP's exchanges", plan.fsdp_exchange, facts.fsdp_exchange or "none", ok=ok)


def _overlap(requested: str, applied: Mapping[str, str]) -> Effect:
    """Return whether every overlap site of this rank's blocks runs in its mode."""
    ran = ", ".join(f"{site} {mode}" for site, mode in applied.items())
    if len(set(applied.values())) == 1:
        ran = next(iter(applied.values()))
    right = all(mode == mode_at(requested, site) for site, mode in applied.items())
    return _effect("tp_overlap", tp_overlap_label(requested), ran or "no block on this rank", ok=right)


def _kernel_effects(request: Request, trace: Trace) -> list[Effect]:
    """Return the settings that can be recognised by kernel names."""
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
            requested=requested,
            effective=f"{count(parts)} launches",
            ok=count(parts) > 0 or not needed,
            certain=False,
        )
        for what, requested, parts, needed in wanted
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


MOST_OPERATORS = 40


def _words(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())


def operator_table(trace: Trace) -> list[dict[str, str | int | float]]:
    """Return the kernels with the largest total time: name, calls, total and median seconds."""
    by_name: dict[str, list[float]] = {}
    for span in trace.spans:
        if span.category != tr.HOST:
            by_name.setdefault(span.name, []).append(span.duration_s)
    ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:MOST_OPERATORS]
    return [
        {"name": name[:200], "calls": len(times), "seconds": sum(times), "median_s": median(times)}
        for name, times in ordered
    ]
