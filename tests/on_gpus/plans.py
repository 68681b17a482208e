"""Plans of every parallelism, overlap mode and way to run blocks, run as `planner apply` runs them.

On one GPU two ranks share it for the plans of two whose collectives gloo serves (`tests.executor.shared_gpu`): numbers
are checked, and times mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from executor.run import apply_many
from executor.run.apply_many import Run, read_run, run_many
from planner.question.plan_file import PlanFile, plan_file
from planner.question.question import question_of
from planner.runs.planned_run import PlannedRun, cpu_run, cuda_run
from simulator.config.adapter import Adapter
from simulator.config.model import Model
from simulator.config.overlap_sites import modes_by_site
from simulator.config.plan import COPY_ENGINE, Plan
from simulator.config.runtime import Runtime
from simulator.config.savers import ACTIVATION_OFFLOAD, CHUNKED_LOSS, OPTIMIZER_IN_BACKWARD
from simulator.config.workload import Workload
from tests.on_gpus.rows import FAILED, NO_TIME, NOT_RUN, OK, Row, compared
from tests.short_models import shortened
from topology import codec
from topology.catalog.cluster_file import load_cluster
from topology.catalog.platform import take_gpus
from topology.cluster import Cluster
from topology.errors import PlannerError
from topology.health.diagnose import diagnose

STEPS, WARM_UP, GIB = 5, 2, 2**30
NARROW = {"layers": 2, "hidden": 1024, "heads": 8, "kv_heads": 4, "head_dim": 128, "ffn": 4096, "vocab": 8192}
BUDGET_ENDED = "the budget ended"  # as the executor says of what its budget cut
SHARED_WORKER = "tests.on_gpus.shared_worker"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan to run: 4 layers of Llama 3 8B, or of Qwen3 30B-A3B with its experts. `ends` is the status to come to."""

    plan: Plan
    batch: int = 2
    seq_len: int = 4096
    compiled: bool = False
    experts: bool = False
    adapter: Adapter | None = None
    savers: tuple[str, ...] = ()
    narrow: bool = False  # parameters, gradients and moments in bfloat16
    ends: str = "finished"

    @property
    def runtime(self) -> Runtime:
        plain = Runtime(name="meshwright", compile=self.compiled, adapter=self.adapter, savers=self.savers)
        return replace(plain, param_dtype="bfloat16", reduce_dtype="bfloat16") if self.narrow else plain

    @property
    def model(self) -> Model:
        return shortened("qwen3-30b-a3b" if self.experts else "llama3-8b", 4)


LORA = Adapter(rank=16, target_modules=("all-linear",))
FROZEN = Adapter(kind="frozen", target_modules=("embed_tokens", "mlp"))
PAIR: dict[str, Any] = {"micro_batch_size": 2}
SAVED: dict[str, Any] = {"savers": (CHUNKED_LOSS, OPTIMIZER_IN_BACKWARD)}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True, **PAIR}
ALL_MODES = ("chunked", "copy_engine", "fused")
MIXED = {
    "fused and copy_engine": "attention_in=fused,attention_out=copy_engine,mlp_in=copy_engine,mlp_out=fused",
    "one site": "mlp_in=fused",
    "copy_engine, fused and chunked": "attention_in=copy_engine,mlp_in=fused,mlp_out=chunked",
}
ONE = {
    "one GPU": Case(plan=Plan(**PAIR)),
    "compiled": Case(plan=Plan(**PAIR), compiled=True),
    "operations recomputed": Case(plan=Plan(recompute="selective-op", **PAIR)),
    "blocks recomputed, compiled": Case(plan=Plan(recompute="full", **PAIR), compiled=True),
    "experts": Case(plan=Plan(**PAIR), experts=True),
    "LoRA": Case(plan=Plan(**PAIR), adapter=LORA),
    "LoRA, blocks recomputed, compiled": Case(plan=Plan(recompute="full", **PAIR), adapter=LORA, compiled=True),
    "embedding and feed-forward frozen": Case(plan=Plan(**PAIR), adapter=FROZEN),
    "loss in pieces": Case(plan=Plan(**PAIR), savers=(CHUNKED_LOSS,)),
    "activations in host memory": Case(plan=Plan(recompute="full", **PAIR), savers=(ACTIVATION_OFFLOAD,)),
    "loss in pieces, optimizer in backward": Case(plan=Plan(**PAIR), **SAVED),
    "loss in pieces, optimizer in backward, compiled": Case(plan=Plan(**PAIR), compiled=True, **SAVED),
    "memory full": Case(plan=Plan(micro_batch_size=64), batch=64, seq_len=8192, ends="out_of_memory"),
}
OVERLAPPED = {
    **{f"TP {mode}": Case(plan=Plan(tp_overlap=mode, **SP)) for mode in ALL_MODES},
    **{f"TP {name}": Case(plan=Plan(tp_overlap=text, **SP)) for name, text in MIXED.items()},
    "TP fused, operations recomputed": Case(plan=Plan(tp_overlap="fused", recompute="selective-op", **SP)),
    "TP fused, bfloat16": Case(plan=Plan(tp_overlap="fused", **SP), narrow=True),
    "TP copy_engine, blocks recomputed": Case(plan=Plan(tp_overlap="copy_engine", recompute="full", **SP)),
}
PLAIN = {
    "DDP": Case(plan=Plan(dp_replicate=2, **PAIR), batch=4),
    "FSDP": Case(plan=Plan(dp_shard=2, **PAIR), batch=4),
    "FSDP, copy engines": Case(plan=Plan(dp_shard=2, fsdp_exchange=COPY_ENGINE, **PAIR), batch=4),
    "TP, whole tokens": Case(plan=Plan(tp=2, **PAIR)),
    "TP": Case(plan=Plan(**SP)),
    "CP ring": Case(plan=Plan(cp=2, cp_method="ring", **PAIR)),
    "CP all-gather": Case(plan=Plan(cp=2, cp_method="all_gather", **PAIR)),
    "CP all-gather, copy engines": Case(
        plan=Plan(cp=2, cp_method="all_gather", fsdp_exchange=COPY_ENGINE, **PAIR),
    ),
    "CP by heads": Case(plan=Plan(cp=2, cp_method="all_to_all", **PAIR)),
    "PP 1F1B": Case(plan=Plan(pp=2, schedule="1F1B"), batch=4),
    "PP interleaved": Case(plan=Plan(pp=2, virtual_stages=2, schedule="Interleaved1F1B"), batch=4),
    "PP ZBV": Case(plan=Plan(pp=2, virtual_stages=2, schedule="ZBVZeroBubble"), batch=4),
    "EP": Case(plan=Plan(dp_shard=2, ep=2, **PAIR), batch=4, experts=True),
}
COMPILED = {
    f"{name}, compiled": replace(PLAIN[name], compiled=True)
    for name in ("DDP", "FSDP", "FSDP, copy engines", "TP", "CP all-gather", "PP 1F1B", "EP")
}
ADAPTED = {
    "FSDP, LoRA": Case(plan=Plan(dp_shard=2, **PAIR), batch=4, adapter=LORA),
    "FSDP, loss in pieces, optimizer in backward": Case(plan=Plan(dp_shard=2, **PAIR), batch=4, **SAVED),
    "DDP, loss in pieces": Case(plan=Plan(dp_replicate=2, **PAIR), batch=4, savers=(CHUNKED_LOSS,)),
}
TWO = {**OVERLAPPED, **PLAIN, **ADAPTED, **COMPILED}


def not_shared(case: Case) -> str:
    """Return why two ranks cannot share a GPU for a plan, or nothing."""
    plan, modes = case.plan, modes_by_site(case.plan.tp_overlap)
    if plan.pp > 1 or (plan.cp > 1 and plan.cp_method == "ring") or "ring" in modes:
        return "needs two GPUs: gloo sends and receives no CUDA tensors"
    return "needs two GPUs: two ranks that compile on one take a minute" if case.compiled else ""


def content_of(case: Case, cluster: Cluster) -> PlanFile:
    """Return the plan with its prediction. Raises PlannerError for a plan that is not legal there."""
    question = question_of(
        case.model,
        cluster,
        Workload(seq_len=case.seq_len, global_batch_size=case.batch),
        framework="meshwright",
        runtime=case.runtime,
    )
    return plan_file(question, case.plan, question.estimate([case.plan]).estimate(0))


def run_cases(
    cases: Mapping[str, Case], out: Path, budget_s: float, here: Cluster, tell: Callable[[Row], None]
) -> None:
    """Run plans on GPUs of their own, each with its prediction, and tell each row when it is known."""
    health = diagnose(here)

    def planned(case: Case) -> PlannedRun:
        cluster = take_gpus(here, case.plan.gpus)
        return cuda_run(content_of(case, cluster), here, health, allow_busy=True)

    _run("plans", cases, planned, out, budget_s, tell)


def run_shared(cases: Mapping[str, Case], out: Path, budget_s: float, tell: Callable[[Row], None]) -> None:
    """Run plans of two ranks that share the one GPU: a narrow model, whose numbers are checked."""
    shared = {}
    for name, case in cases.items():
        if why := not_shared(case):
            tell(Row(part="two ranks", what=name, result=NOT_RUN, said=why))
        else:
            shared[name] = case
    cluster = take_gpus(load_cluster("dgx-h100"), 2)

    def planned(case: Case) -> PlannedRun:
        narrow = Model(name="narrow", family="llama", **NARROW)
        # A vocabulary that gloo carries in seconds, by way of host memory.
        model = replace(shortened("qwen3-30b-a3b", 2), vocab=NARROW["vocab"]) if case.experts else narrow
        workload = Workload(seq_len=1024, global_batch_size=case.batch)
        question = question_of(model, cluster, workload, framework="meshwright", runtime=case.runtime)
        content = plan_file(question, case.plan, question.estimate([case.plan]).estimate(0))
        on_cpu = cpu_run(content, None)  # which asks for no machine; on the GPU after all, in the plan's types
        return replace(on_cpu, device="cuda", gpus=(0, 0), runtime=content.runtime, notes=("two ranks share a GPU",))

    apply_many.MODULE, own = SHARED_WORKER, apply_many.MODULE
    try:
        _run("two ranks", shared, planned, out, budget_s, tell)
    finally:
        apply_many.MODULE = own


def _run(
    part: str,
    cases: Mapping[str, Case],
    planned: Callable[[Case], PlannedRun],
    out: Path,
    budget_s: float,
    tell: Callable[[Row], None],
) -> None:
    runs: list[Run] = []
    names: dict[Path, str] = {}
    for number, (name, case) in enumerate(cases.items()):
        folder = out / f"{part.replace(' ', '-')}-{number:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            request = planned(case).request(steps=STEPS, budget_s=budget_s, own_table=False)
            request |= {"profile": False, "warm_up": WARM_UP, "collective_timeout_s": 40.0}
            codec.write_text(folder / "request.json", codec.to_json(request))
            runs.append(read_run(folder / "request.json", folder))
        except PlannerError as error:
            tell(Row(part=part, what=name, result=FAILED, said=str(error)))
            continue
        names[folder] = name

    def reported(run: Run, document: dict[str, Any]) -> None:
        name = names.pop(run.out)
        tell(row_of(part, name, document, cases[name].ends))

    run_many(runs, budget_s, reported)
    for name in names.values():
        tell(Row(part=part, what=name, result=NO_TIME))


def row_of(part: str, name: str, document: Mapping[str, Any], ends: str = "finished") -> Row:
    """Return the row of a run's report."""
    status, failure = document["status"], document["failure"] or {}
    said = "" if status == "finished" else f"{status}: {str(failure.get('message', ''))[-300:]}"
    cut = status == "out_of_time" or failure.get("message") == BUDGET_ENDED
    result = NO_TIME if cut else OK if status == ends else FAILED
    return Row(
        part=part,
        what=name,
        result=result,
        said=said,
        numbers=numbers(document),
        step=step(document),
        memory=memory(document),
        seconds=document["seconds"],
    )


def numbers(document: Mapping[str, Any]) -> str:
    """Return how far gradients are off, in float64 and in the plan's types, and the kernels."""
    found = []
    if exact := document["verified"]:
        found.append(f"{_shown(exact['gradient'])} ({exact['tolerance']:.1e})")
    if (types := document["verified_types"]) and types["gradients_compared"]:
        found.append(f"{types['dtype']} {_shown(types['gradient'])} ({types['allowed']:.1e})")
    kernels = [kernel["difference"] and kernel["difference"] / kernel["tolerance"] for kernel in document["kernels"]]
    if kernels:
        found.append("kernels " + ("infinite" if None in kernels else f"{max(kernels):.0%}"))
    return "; ".join(found)


def _shown(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.1e}"


def step(document: Mapping[str, Any]) -> str:
    """Return the step predicted and measured, and whether it is inside the range that was predicted."""
    measured = document["measured"]["step_s"]
    predicted = (document["predicted"] or {}).get("step_s")
    if not measured or not predicted:
        return ""
    return compared(predicted, measured["median"])


def memory(document: Mapping[str, Any]) -> str:
    """Return the peak of the rank that needs most, predicted and measured, and whether it is inside the range."""
    peaks = [rank["peak_allocated_bytes"] for rank in document["measured"]["memory_by_rank"]]
    predicted = (document["predicted"] or {}).get("memory")
    if not document["measured"]["step_s"] or not predicted or not any(peaks):
        return ""
    return compared(predicted["peak_bytes"], max(peaks), GIB)
