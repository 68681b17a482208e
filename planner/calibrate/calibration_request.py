"""What to measure in a calibration: the operators of plans, by the runtime's operator list, and runs of one and two
layers.

Without plans, the operators are those of typical layers: models from 1B to 70B, over tokens and tensor-parallel
degrees, ordered so that the first ones already cover all kinds. With plans, they are what the plans run and the profile
lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from planner.calibrate.overlap_request import plan_sites, site_key, typical_sites
from planner.calibrate.planned_step import PlannedStep
from simulator.calibration.kernel_samples import operators_of
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.runtimes.library import runtime_spec
from topology import codec
from topology.profile.profile import Profile

# Layers whose shapes are measured when no plan is named: (hidden, heads, key/value heads, head width, feed-forward
# width).
TYPICAL_LAYERS = (
    (4096, 32, 8, 128, 14336),
    (2048, 32, 8, 64, 8192),
    (5120, 40, 40, 128, 13824),
    (3072, 24, 8, 128, 8192),
    (8192, 64, 8, 128, 28672),
)
TOKENS = ((8192, 1), (4096, 1), (16384, 4), (2048, 1), (32768, 1))  # (tokens of a micro batch, sequences)
TENSOR = (1, 2, 4)
VOCABULARY = 128256
COPIES = tuple(2**power for power in (16, 18, 20, 22, 24, 26, 28, 30))
MAX_TENSOR_BYTES = 24 * 2**30  # of the largest operand: logits of very large batches are left out

# Compute and a collective at the same time. Sizes are those of layers that FSDP gathers: 100 MB to 1 GB.
CONTENTION = tuple(
    {"compute": compute, "shape": shape, "dtype": dtype, "op": op, "nbytes": nbytes}
    for op, nbytes in (("all_gather", 436 * 10**6), ("reduce_scatter", 872 * 10**6), ("all_reduce", 100 * 2**20))
    for compute, shape, dtype in (
        ("matmul", {"m": 8192, "n": 14336, "k": 4096}, "bfloat16"),
        ("matmul", {"m": 4096, "n": 4096, "k": 4096}, "bfloat16"),
        ("copy", {"bytes": 2**28}, "bfloat16"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """One run of the runtime calibration; `layer` is as in SPREAD."""

    layer: tuple[int, int, int, int, int]
    seq_len: int
    sequences: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    recompute: str = "none"
    compile: bool = False
    vocabulary: int = VOCABULARY


_WIDE, _SMALL, _MIDDLE = TYPICAL_LAYERS[0], TYPICAL_LAYERS[1], TYPICAL_LAYERS[3]
_HOST_BOUND = (
    512,
    8,
    4,
    64,
    1024,
)  # at 256 tokens its kernels take no longer on the device than their launch on the host


def _host_bound_run(**more: Any) -> LayerRun:
    return LayerRun(layer=_HOST_BOUND, seq_len=256, vocabulary=1024, **more)


def _large_run(**more: Any) -> LayerRun:
    """Return a run of a wide layer with a small vocabulary, so that little but the layer takes time."""
    return LayerRun(layer=_WIDE, seq_len=8192, vocabulary=4096, **more)


# A degree of 2 stands for all GPUs, up to MAX_RANKS, but for two GPUs along each of two axes.
RUNTIME_RUNS = (
    # Whatever is asked, layers of a kind that was not run are the description's guess: one narrow run of each comes first, which
    # takes seconds, then wide ones, which show the device.
    _large_run(dp_shard=2),
    _host_bound_run(dp_shard=2),
    _host_bound_run(),
    _host_bound_run(tp=2),
    _host_bound_run(dp_shard=2, tp=2),
    _host_bound_run(dp_shard=2, recompute="full"),
    _host_bound_run(dp_shard=2, recompute="selective-op"),
    _host_bound_run(cp=2),
    _large_run(tp=2),
    LayerRun(layer=_SMALL, seq_len=4096, sequences=4),
    LayerRun(layer=_WIDE, seq_len=8192, dp_shard=2),
    _host_bound_run(dp_shard=2, compile=True),
    _host_bound_run(tp=2, compile=True),
    _host_bound_run(dp_replicate=2),
    _large_run(dp_shard=2, recompute="selective-op"),
    LayerRun(layer=_WIDE, seq_len=4096, dp_shard=2),
    LayerRun(layer=_SMALL, seq_len=4096, sequences=4, dp_shard=2),
    LayerRun(layer=_SMALL, seq_len=4096, sequences=4, dp_replicate=2),
    LayerRun(layer=_WIDE, seq_len=16384, cp=2, recompute="full", vocabulary=4096),
    _large_run(dp_shard=2, compile=True),
    _large_run(dp_shard=2, recompute="full"),
    LayerRun(layer=_WIDE, seq_len=8192, dp_shard=2, compile=True),
    LayerRun(layer=_MIDDLE, seq_len=4096, sequences=2, dp_shard=2),
    LayerRun(layer=_WIDE, seq_len=8192, tp=2),
    LayerRun(layer=_WIDE, seq_len=8192),
    _large_run(),
    LayerRun(layer=_SMALL, seq_len=4096, sequences=4, compile=True),
    _large_run(compile=True),
    _host_bound_run(recompute="selective-op"),
    _host_bound_run(compile=True),
)
MAX_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the executor is to measure, the most valuable first in each list."""

    operators: tuple[dict[str, Any], ...] = ()
    contention: tuple[dict[str, Any], ...] = ()
    layers: tuple[dict[str, Any], ...] = ()
    overlap: tuple[dict[str, Any], ...] = ()
    collectives: bool = False

    @property
    def empty(self) -> bool:
        return self == Request()


def machine_request(*, gpus: int, collectives: bool = True) -> Request:
    """Return measurements that need several GPUs: collectives, their contention with kernels, and overlap modes."""
    return Request(
        contention=CONTENTION if gpus > 1 else (), overlap=typical_sites(gpus), collectives=collectives and gpus > 1
    )


def typical_request() -> Request:
    """Return the operators that a calibration without plans measures."""
    operators = [*_interleaved(_typical_operators()), *_copies()]
    # Copies and the optimizer come first, so that they are measured with any budget.
    first = [one for one in operators if one["kind"] == "move" and one["name"] in {"copy", "adamw", "clip"}]
    rest = [one for one in operators if one not in first]
    return Request(operators=tuple(_unique([*first, *rest])))


def exact_request(questions: Sequence[PlannedStep], *, gpus: int, layers: bool = True) -> Request:
    """Return the operators and overlap sites of the plans, and runs of one and two layers of each that fits on `gpus`."""
    operators = [one for question in questions for one in plan_operators(question)]
    runs = [layer_request(question, gpus) for question in questions] if layers else []
    return Request(
        operators=tuple(_unique(operators)),
        layers=tuple(_unique(run for run in runs if run is not None)),
        overlap=plan_sites(questions, gpus),
    )


def runtime_request(name: str, *, gpus: int, version: str | None = None) -> Request:
    """Return the runs of one and two layers from which a runtime's own costs follow.

    They have several widths; the narrowest is so small that the time is the host's.
    """
    found = []
    many = max(2, 1 << (min(gpus, MAX_RANKS).bit_length() - 1))
    known = runtime_spec(name).recompute
    for run in RUNTIME_RUNS:
        if run.recompute not in known:
            continue
        axes = [axis for axis in ("dp_replicate", "dp_shard", "tp", "cp") if getattr(run, axis) > 1]
        degrees: dict[str, Any] = dict.fromkeys(axes, many if len(axes) == 1 else 2)
        plan = Plan(
            **degrees,
            sequence_parallel=run.tp > 1,
            micro_batch_size=run.sequences,
            recompute=run.recompute,
        )
        if plan.gpus > gpus:
            continue
        model = _one_layer(run.layer, run.vocabulary)
        workload = Workload(seq_len=run.seq_len, global_batch_size=plan.data_parallel * run.sequences)
        runtime = Runtime(
            name=name,
            version=version,
            compile=run.compile,
            param_dtype="bfloat16" if axes == ["tp"] else "float32",
            reduce_dtype="float32",
        )
        question = PlannedStep(model=model, plan=plan, workload=workload, runtime=runtime)
        request = layer_request(question, gpus)
        if request is not None:
            found.append(request)
    return Request(layers=tuple(_unique(found)))


def _one_layer(shape: tuple[int, int, int, int, int], vocabulary: int) -> Model:
    """Return a model of one layer; `shape` is (hidden, heads, key/value heads, head width, feed-forward width)."""
    hidden, heads, kv_heads, head_dim, ffn = shape
    return Model(
        name=f"layer of width {hidden}",
        family="llama",
        layers=1,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocabulary,
    )


def merge_requests(*requests: Request) -> Request:
    """Return the union of several requests, in order."""
    lists: dict[str, Any] = {
        field.name: tuple(_unique(one for request in requests for one in getattr(request, field.name)))
        for field in fields(Request)
        if field.name != "collectives"
    }
    return Request(**lists, collectives=any(request.collectives for request in requests))


def missing_from(request: Request, profile: Profile | None) -> Request:
    """Return the part of `request` of which the profile has no valid sample."""
    if profile is None:
        return request
    known = {sample.key for sample in profile.operators if not sample.invalid and sample.regime == "sustained"}
    pairs = {sample.key for sample in profile.contention if not sample.invalid}
    sites = {sample.key for sample in profile.overlap if not sample.invalid}
    ran = [
        (sample.model, sample.plan, sample.workload, sample.runtime) for sample in profile.layers if not sample.invalid
    ]

    def have_layer(one: dict[str, Any]) -> bool:
        same = [
            model
            for model, plan, workload, runtime in ran
            if (plan, workload, runtime) == (one["plan"], one["workload"], one["runtime"])
            and {k: v for k, v in model.items() if k != "layers"}
            == {k: v for k, v in one["model"].items() if k != "layers"}
        ]
        return len(same) >= len(one.get("counts", (1, 2)))

    return replace(
        request,
        operators=tuple(one for one in request.operators if _operator_key(one) not in known),
        contention=tuple(one for one in request.contention if not any(_same_pair(one, key) for key in pairs)),
        layers=tuple(one for one in request.layers if not have_layer(one)),
        overlap=tuple(one for one in request.overlap if site_key(one) not in sites),
        collectives=request.collectives and not profile.collectives,
    )


def plan_operators(question: PlannedStep) -> list[dict[str, Any]]:
    """Return the compute operators that one rank of the plan runs in a step, by the description of its runtime."""
    return operators_of(question.model, question.plan, question.workload, question.runtime)


def layer_request(question: PlannedStep, gpus: int) -> dict[str, Any] | None:
    """Return the run of one and two layers that is closest to the plan on `gpus` GPUs; None if there is none.

    Pipeline parallelism is dropped, as it does not change a layer; then data parallelism is reduced, and only then
    context and tensor parallelism.
    """
    if question.model.moe is not None and question.runtime.name == "torchtitan":
        return None
    plan = single_layer_plan(question.plan, gpus)
    if plan is None:
        return None
    workload = replace(question.workload, global_batch_size=plan.data_parallel * plan.micro_batch_size)
    runtime = question.runtime
    if plan.dp_shard * plan.cp == 1 and plan.tp > 1:
        # Mixed precision comes with FSDP; without it a tensor-parallel model computes in its storage dtype.
        runtime = replace(runtime, param_dtype=runtime.compute_dtype)
    return {
        "ranks": plan.gpus,
        "model": codec.to_builtins(replace(question.model, layers=1)),
        "plan": codec.to_builtins(plan),
        "workload": codec.to_builtins(workload),
        "runtime": codec.to_builtins(runtime),
    }


def single_layer_plan(plan: Plan, gpus: int) -> Plan | None:
    """Return the plan without pipeline parallelism, reduced to `gpus` ranks; None if it cannot be."""
    single = replace(
        plan,
        pp=1,
        virtual_stages=1,
        schedule=None,
        layers_per_stage=(),
        recompute_per_stage=(),
        placement=(),
        ep=1,
        # A pipelined plan computes in the dtype of FSDP's mixed precision only if something is sharded.
        dp_shard=max(plan.dp_shard, 2) if plan.pp > 1 and gpus > plan.tp * plan.cp else plan.dp_shard,
    )
    for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
        while single.gpus > gpus and getattr(single, axis) % 2 == 0:
            single = replace(single, **{axis: getattr(single, axis) // 2})
    return single if single.gpus <= gpus else None


# --- typical layers -------------------------------------------------------------------------------------------------


def _typical_operators() -> Iterator[list[dict[str, Any]]]:
    """Yield the operators of one typical layer after another, the most common sizes first."""
    for tensor in TENSOR:
        for tokens, sequences in TOKENS:
            for shape in TYPICAL_LAYERS:
                model = _one_layer(shape, VOCABULARY)
                question = PlannedStep(
                    model=model,
                    plan=Plan(tp=tensor, dp_shard=2, sequence_parallel=tensor > 1, micro_batch_size=sequences),
                    workload=Workload(seq_len=tokens // sequences, global_batch_size=2 * sequences),
                    # Without FSDP, as here with tensor parallelism, parameters are stored in the compute dtype.
                    runtime=Runtime(name="torchtitan", param_dtype="bfloat16" if tensor > 1 else "float32"),
                )
                yield [one for one in plan_operators(question) if _largest_bytes(one) <= MAX_TENSOR_BYTES]


def _interleaved(layers: Iterable[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for operators in layers:
        yield from operators


def _copies() -> Iterator[dict[str, Any]]:
    for nbytes in reversed(COPIES):
        yield {
            "kind": "move",
            "name": "copy",
            "shape": {"bytes": nbytes},
            "dtype": "bfloat16",
            "direction": "forward",
            "runtime": "",
        }


def _largest_bytes(one: dict[str, Any]) -> float:
    shape = one["shape"]
    if one["kind"] == "matmul":
        return float(2 * max(shape["m"] * shape["n"], shape["n"] * shape["k"], shape["m"] * shape["k"]))
    if one["name"] == "cross_entropy":
        return float(16 * shape["t"] * shape["v"])  # it keeps four float32 copies
    return 0.0


def _unique(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({codec.fingerprint(one): one for one in found}.values())


def _operator_key(one: dict[str, Any]) -> tuple[Any, ...]:
    shape = tuple(sorted(one["shape"].items()))
    return one["kind"], one["name"], shape, one["dtype"], one["direction"], one.get("runtime", ""), "sustained"


def _same_pair(one: dict[str, Any], key: tuple[Any, ...]) -> bool:
    compute, shape, dtype, op, _, nbytes = key
    wanted = one["compute"], tuple(sorted(one["shape"].items())), one["dtype"], one["op"], one["nbytes"]
    return wanted == (compute, shape, dtype, op, nbytes)


def shrink(request: Request) -> Request:
    """Return a few tiny measurements of each kind, to exercise the code path without a GPU."""

    def shrunk(one: dict[str, Any]) -> dict[str, Any]:
        shape = {axis: max(2, min(size, 64)) for axis, size in one["shape"].items()}
        if "q" in shape:
            shape |= {
                "q": 64,
                "kv": 32,
                **({"d": 16} if "d" in shape else {}),
                **({"ranks": 2} if "ranks" in shape else {}),
            }
        if one.get("kind") == "attention":
            shape = {"b": 1, "a": 4, "kv": 2, "s": 16, "S": 16, "d": 16}
        return {**one, "shape": shape}

    first = {(one["kind"], one["name"], one["direction"]): shrunk(one) for one in reversed(request.operators)}
    pairs = tuple({**shrunk(one), "dtype": "float32", "nbytes": 4096} for one in request.contention[:1])
    tiny = {"ranks": 2, "rows": 16, "depth": 8, "dtype": "float32"}
    sites = {one["operation"]: {**one, **tiny, "columns": [8] * len(one["columns"])} for one in request.overlap[:2]}
    return replace(
        request,
        operators=tuple(first.values()),
        contention=pairs,
        layers=(),
        overlap=tuple(sites.values()),
    )
