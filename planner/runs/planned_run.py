"""Make the run for `planner apply`, and check that this machine is the one the plan was made for.

Pure functions of a plan file and of the probed machine. The executor reads the request as JSON; the planner never
imports the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.question.plan_file import PlanFile, fingerprint
from simulator.config.hf_config import load_model
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import TF32, Runtime
from simulator.config.workload import Workload
from topology import codec
from topology.cluster import Cluster, GpuKind
from topology.codec import JsonObject
from topology.errors import BadPlan, Infeasible, PlannerError, Stale
from topology.health.diagnose import Health
from topology.units import in_gib

# Without a plan: a model that runs on any laptop, with FSDP and tensor parallelism.
DEFAULT_MODEL = "tiny-llama"
DEFAULT_SEQ_LEN = 256
DEFAULT_BATCH, DEFAULT_MICRO_BATCH = 8, 2
BYTES_PER_PARAMETER_ON_CPU = 16  # float32 parameter, gradient and AdamW's two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run to be started. `notes` list differences from the plan file; `gpus` is empty on a CPU."""

    plan: Plan
    model: Model
    workload: Workload
    runtime: Runtime
    device: str
    gpus: tuple[int, ...] = ()
    peak_flops: float | None = None
    peak_flops_source: str = ""
    predicted: JsonObject | None = None
    fingerprints: dict[str, str] | None = None
    cluster: Cluster | None = None  # the one that the prediction is for
    notes: tuple[str, ...] = ()

    def request(self, *, steps: int, budget_s: float, own_table: bool) -> JsonObject:
        """Return the executor's request as plain data. Timeouts are a quarter of the budget, between 5 and 60 s."""
        timeout_s = min(60.0, max(5.0, 0.25 * budget_s))
        return {
            "schema_version": 1,
            **codec.to_builtins(self),
            "steps": steps,
            "warm_up": 3 if self.device == "cuda" else 1,
            "seed": 0,
            "own_table": own_table,
            "start_timeout_s": timeout_s,
            "collective_timeout_s": timeout_s,
        }


def default_run(cpus: int) -> PlannedRun:
    """Return the built-in run: tiny-llama on two gloo processes, or on four where there are as many CPUs."""
    return _built_in(2 if cpus >= 4 else 1, batch=DEFAULT_BATCH)


def default_job(nodes: int) -> PlannedRun:
    """Return the built-in run of several nodes: tensor parallelism over two processes of a node, FSDP over nodes."""
    return _built_in(nodes, batch=DEFAULT_MICRO_BATCH * nodes)


def _built_in(dp_shard: int, *, batch: int) -> PlannedRun:
    return PlannedRun(
        plan=Plan(dp_shard=dp_shard, tp=2, sequence_parallel=True, micro_batch_size=DEFAULT_MICRO_BATCH),
        model=load_model(DEFAULT_MODEL),
        workload=Workload(seq_len=DEFAULT_SEQ_LEN, global_batch_size=batch),
        runtime=Runtime(param_dtype="float32", compute_dtype="float32"),
        device="cpu",
        notes=("no plan given: the built-in one for a CPU",),
    )


def cpu_run(content: PlanFile, free_bytes: int | None) -> PlannedRun:
    """Return the run of a plan file on gloo processes, where its results can be checked but not its times.

    Raises Infeasible (exit 3) when parameters and optimizer do not fit into `free_bytes`; None is unknown.
    """
    copies = content.plan.gpus / _shards(content.plan)
    needed = content.model.parameters * BYTES_PER_PARAMETER_ON_CPU * copies
    unknown = f"this system does not say how much memory is free; the run needs about {in_gib(needed)}"
    if free_bytes is not None and needed > free_bytes:
        raise Infeasible(
            f"{content.model.name} on {content.plan.gpus} processes needs {in_gib(needed, 0)} of memory",
            why=f"{in_gib(free_bytes, 0)} are free, and all ranks share them on a CPU",
            remedy="run it on the planned GPUs, or plan for a smaller model",
        )
    wide = replace(
        content.runtime, param_dtype="float32", compute_dtype="float32", reduce_dtype="float32", compile=False
    )
    return PlannedRun(
        plan=replace(content.plan, placement=()),
        model=content.model,
        workload=content.workload,
        runtime=wide,
        device="cpu",
        fingerprints=content.fingerprints,
        notes=(
            "on a CPU: results are checked; times are not compared, as they say nothing about the planned machine",
            "in float32 and eager, without the placement",
            *((unknown,) if free_bytes is None else ()),
        ),
    )


def _shards(plan: Plan) -> int:
    """Return the number of ranks over which one copy of parameters and optimizer is sharded."""
    return plan.dp_shard * plan.cp * plan.tp * plan.pp


def cuda_run(content: PlanFile, here: Cluster, health: Health, *, allow_busy: bool) -> PlannedRun:
    """Return the run of a plan file on this machine's GPUs. Raises Stale or PlannerError (both exit 1)."""
    require_machine(content, here)
    require_healthy(health, allow_busy=allow_busy)
    return replace(
        _on_gpus(content, here.slowest_kind),
        gpus=cuda_numbers(content.plan, here),
        fingerprints={**content.fingerprints, "machine": fingerprint(here)},
        notes=other_driver(content.cluster, here),
    )


def _on_gpus(content: PlanFile, kind: GpuKind) -> PlannedRun:
    compute = content.runtime.compute_dtype
    return PlannedRun(
        plan=content.plan,
        model=content.model,
        workload=content.workload,
        runtime=content.runtime,
        device="cuda",
        peak_flops=kind.peak_flops.get("tfloat32" if compute == TF32 else compute),
        peak_flops_source=f"datasheet, {kind.title}, dense {compute}",
        predicted=codec.to_builtins(content.estimate),
        cluster=content.cluster,
        fingerprints=content.fingerprints,
    )


def other_driver(planned: Cluster, here: Cluster) -> tuple[str, ...]:
    """Return a note if the driver was changed since the planned machine was probed."""
    then, now = ([item.what for item in machine.findings if item.code == "driver"] for machine in (planned, here))
    if not then or not now or then == now:
        return ()
    return (
        (
            f"the plan was made under {', '.join(then)}, this machine has {', '.join(now)}:"
            " kernels and collectives may take other times than predicted; planner calibrate, then plan again"
        ),
    )


def require_machine(content: PlanFile, here: Cluster) -> None:
    """Raise Stale with the differences when the plan was made for another machine than `here`.

    Equal fingerprints are the same machine. A plan made for a catalogue cluster has another fingerprint than the probed
    machine, so the number and model of the GPUs are compared.
    """
    planned = content.cluster
    if fingerprint(planned) == content.fingerprints["cluster"] == fingerprint(here):
        return
    differences = []
    if here.gpu_count < content.plan.gpus:
        differences.append(f"{content.plan.gpus} GPUs planned, {here.gpu_count} here")
    if planned.node_count > 1 and content.plan.gpus > planned.gpus_per_node:
        differences.append(f"planned for {planned.node_count} nodes; apply starts ranks on one")
    kinds = sorted({gpu.kind for group in here.groups for gpu in group.node.gpus})
    wanted = sorted({gpu.kind for group in planned.groups for gpu in group.node.gpus})
    if kinds and kinds != wanted:
        differences.append(f"planned for {', '.join(wanted)}, here is {', '.join(kinds)}")
    if differences:
        raise Stale(
            "the plan was made for another machine",
            why="; ".join(differences),
            remedy="plan again: planner probe --out here.json, then planner suggest --cluster here.json"
            if here.gpu_count
            else "run it where those GPUs are; --device cpu checks the results of a small model here",
        )


def require_healthy(health: Health, *, allow_busy: bool) -> None:
    """Raise PlannerError (exit 1) when a fault of the machine would affect the run."""
    if health.healthy:
        return
    bad = [item for item in health.items if item.severity != "info" and not (allow_busy and item.code == "busy")]
    if not bad:
        return
    raise PlannerError(
        "this machine is not healthy, so nothing was started",
        why="; ".join(f"{item.what} ({item.why})" if item.why else item.what for item in bad[:4]),
        remedy="planner doctor says what each means"
        + ("; --allow-busy to run although others use the GPUs" if any(item.code == "busy" for item in bad) else ""),
    )


def cuda_numbers(plan: Plan, here: Cluster) -> tuple[int, ...]:
    """Return the CUDA device number of each rank: the position of its GPU among those a CUDA program sees.

    Raises BadPlan when the placement names a GPU that is not visible.
    """
    order = [gpu.index for gpu in here.groups[0].node.gpus]
    placement: Sequence[int] = plan.placement or order[: plan.gpus]
    missing = sorted(set(placement) - set(order))
    if missing:
        raise BadPlan(
            f"the plan places ranks on GPU {', '.join(map(str, missing))}, visible are {', '.join(map(str, order))}",
            remedy="plan again, or change CUDA_VISIBLE_DEVICES",
        )
    return tuple(order.index(index) for index in placement)


def job_run(content: PlanFile) -> PlannedRun:
    """Return the run of a plan file on other machines through a scheduler; each node checks its GPUs when it starts.

    Raises BadPlan when the plan has a placement of ranks on GPUs, since the scheduler assigns them.
    """
    if content.plan.placement not in {(), tuple(range(content.plan.gpus))}:
        raise BadPlan(
            "the plan places ranks on particular GPUs, which a scheduler would not honour",
            remedy="run it with --launcher local, or plan for a machine whose GPUs are alike",
        )
    return replace(_on_gpus(content, content.cluster.slowest_kind), plan=replace(content.plan, placement=()))
