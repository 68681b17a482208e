"""One training step as a Program: micro batches through the stages, data-parallel traffic around them, the optimizer.

Reads like the loop it stands for. A pipeline rank runs its schedule's actions in order; an action runs the units of its
stage (embedding, layers, head) forward, or backward in reverse; each unit is gathered before use and its gradients are
sent on their way after. Buffers are allocated as the host goes, as a caching allocator sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simulator.closed_form import ADAM_BYTES, CLIP_BYTES
from simulator.collectives import CollectiveModel
from simulator.costs import Cost
from simulator.group_times import GroupTimes
from simulator.layer_cost import CostContext, block_cost
from simulator.lowering.block_code import (
    BlockCode,
    Detail,
    KernelKey,
    KernelStep,
    Step,
    TransferSeconds,
    block_code,
    costs_of,
    merged,
    write,
)
from simulator.lowering.machine_costs import MachineCosts
from simulator.lowering.sharded_data import DataTraffic, DataWriter, Unit
from simulator.memory import keeps_gathered, local_parameters
from simulator.model import Model
from simulator.operators import tensor_bytes
from simulator.pipeline import pipeline_program
from simulator.plan import Plan
from simulator.plan_table import axis_sizes, plan_table
from simulator.program import CodeWriter, Groups, Program
from simulator.roofline import Roofline
from simulator.runtime import DTYPE_BYTES, Runtime
from simulator.runtime_library import ModelOperators, canonical_recompute, operators_for
from simulator.schedule_tables import build_schedule
from simulator.schedules import Action, Kind, Schedule
from simulator.stages import stage_layers
from simulator.workload import Workload
from topology.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A step ready to run: `simulate(lowered.program, lowered.costs)`."""

    program: Program
    costs: MachineCosts
    schedule: Schedule


def lower_training(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    plan: Plan,
    runtime: Runtime,
    *,
    detail: Detail = Detail.LAYER,
) -> Lowered:
    """Return the program of one training step. Raises BadPlan for a schedule or recompute word that does not exist."""
    return _Lowering(model, cluster, workload, plan, runtime, detail).lower()


class _Lowering:
    def __init__(
        self, model: Model, cluster: Cluster, workload: Workload, plan: Plan, runtime: Runtime, detail: Detail
    ) -> None:
        self.model, self.cluster, self.workload, self.runtime, self.detail = model, cluster, workload, runtime, detail
        self.plan = replace(plan, recompute=canonical_recompute(plan.recompute, runtime))
        self.operators: ModelOperators = operators_for(model, runtime)
        self.spec = self.operators.spec
        table = plan_table([self.plan], workload)
        collectives = CollectiveModel(cluster)
        self.context = CostContext(
            table=table,
            sizes=axis_sizes(model, workload, table),
            roofline=Roofline(
                gpu=cluster.slowest_kind,
                dtype=runtime.compute_dtype,
                attention_kernel=self.spec.attention_kernel,
            ),
            groups=GroupTimes(cluster, table, collectives),
            runtime=runtime,
            spec=self.spec,
        )
        self.parameters = local_parameters(model, self.context)
        self.kernels: dict[KernelKey, tuple[Cost, float]] = {}
        self.transfer_s = TransferSeconds(self.context)
        self.schedule = build_schedule(
            self.plan.schedule or "1F1B",
            ranks=self.plan.pp,
            micro_batches=self.plan.micro_batches(workload.global_batch_size),
            stages_per_rank=self.plan.virtual_stages,
        )
        self.blocks = self._blocks()
        self.stages = self._stages()

    def lower(self) -> Lowered:
        writers: dict[int, DataWriter] = {}

        def body(code: CodeWriter, action: Action, rank: int) -> None:
            if rank not in writers:
                writers[rank] = self._begin(code, rank)
            for leaf in action.leaves:
                self._action(code, writers[rank], leaf)

        per_rank = self.plan.gpus // self.plan.pp
        program = pipeline_program(
            self.schedule,
            body,
            message_bytes=self._message_bytes(),
            groups=self._groups(),
            ranks_of=lambda rank: range(rank * per_rank, (rank + 1) * per_rank),
            early_receives=self.spec.pipeline.p2p_overlap,
            finish=lambda code, rank: self._end(code, writers[rank], rank),
        )
        costs = MachineCosts(
            cluster=self.cluster,
            collectives=self.context.groups.collectives,
            kernels=self.kernels,
            collective_host_s=self.spec.host.collective_s,
            placement=self.plan.placement,
            families={name: self.context.groups.shape(name) for name in FAMILIES},
        )
        return Lowered(program=program, costs=costs, schedule=self.schedule)

    # --- the parts of a step ------------------------------------------------------------------------------------

    def _begin(self, code: CodeWriter, rank: int) -> DataWriter:
        """What is there before the first micro batch: parameters, optimizer state, and the step's own host work."""
        units = self._units(rank)
        table = self.context.table
        spec, bytes_of = self.spec.state, self.context.dtype_bytes
        master = 4.0 if spec.master_weights and bytes_of("param") < 4 else 0.0
        moments = 2.0 * (4.0 if master else bytes_of("param")) if self.runtime.optimizer != "sgd" else 0.0

        def held(kind: str, width: float) -> int:
            shard, expert = float(table.state_shard[kind][0]), float(table.expert_shard[kind][0])
            return round(sum(u.shared / shard + u.experts / expert for u in units) * width)

        code.host_work("step", self.spec.host.step_s)
        code.alloc("parameters", held("parameters", bytes_of("param")), "parameters", filled=True)
        code.alloc("optimizer", held("optimizer", moments + master), "optimizer", filled=True)
        traffic = self._traffic()
        if not traffic.gradients_appear:
            code.alloc("gradients", held("gradients", bytes_of(spec.gradient_dtype)), "gradients", filled=True)
        return DataWriter(code=code, traffic=traffic, kernels=self.kernels)

    def _action(self, code: CodeWriter, data: DataWriter, action: Action) -> None:
        units = self.stages[action.stage]
        last = action.micro_batch == self.schedule.micro_batches - 1
        if action.kind is Kind.FORWARD:
            for position, (unit, block) in enumerate(units):
                following = units[position + 1][0] if position + 1 < len(units) else None
                data.before(unit, following)
                self._allocate(code, block, unit, action)
                self._write(code, block, "forward")
                if position + 1 < len(units):  # the last unit is needed again at once
                    data.after(unit, last_use=False)
            return
        for position in reversed(range(len(units))):
            unit, block = units[position]
            if action.kind is Kind.WEIGHT_GRAD:
                self._write(code, block, "weight")
            else:
                following = units[position - 1][0] if position else None
                reducing = action.kind is Kind.BACKWARD and data.reduces(last_micro_batch=last)
                data.before(unit, following, reducing=reducing)
                if block.again_bytes:
                    code.alloc(f"again {unit.name} {action.micro_batch}", block.again_bytes, "loss_and_recompute")
                self._write(code, block, "backward" if action.kind is Kind.BACKWARD else "input")
                if block.again_bytes:
                    code.free(f"again {unit.name} {action.micro_batch}")
            if action.kind is not Kind.INPUT_GRAD:
                if block.saved_bytes:
                    code.free(f"saved {unit.name} {action.micro_batch}")
                data.after(unit, last_use=last)
                if data.reduces(last_micro_batch=last):
                    data.reduce(unit)

    def _end(self, code: CodeWriter, data: DataWriter, rank: int) -> None:
        units = self._units(rank)
        data.finish(units)
        shard = float(self.context.table.state_shard["optimizer"][0])
        expert = float(self.context.table.expert_shard["optimizer"][0])
        owned = sum(u.shared / shard + u.experts / expert for u in units)
        moved = owned * (ADAM_BYTES + CLIP_BYTES + (2.0 if self.spec.state.master_weights else 0.0))
        rate = self.context.roofline.memory_bytes_per_s
        self._launch(
            code, KernelStep(key=("optimizer", (round(owned),), "float32"), cost=Cost(seconds=moved / rate), host_s=0.0)
        )
        data.redistribute(units)

    # --- writing ------------------------------------------------------------------------------------------------

    def _write(self, code: CodeWriter, block: BlockCode, which: str) -> None:
        steps = self._steps(block, which)
        for step in steps:
            kernel = costs_of(step)
            if kernel is not None:
                self.kernels[kernel.key] = (kernel.cost, kernel.host_s)
        write(code, steps)

    def _steps(self, block: BlockCode, which: str) -> list[Step]:
        match which:
            case "forward":
                wanted: list[Step] = list(block.forward)
            case "backward":
                wanted = list(block.backward)
            case "weight":
                wanted = [s for s in block.backward if isinstance(s, KernelStep) and s.weight]
            case _:
                wanted = [s for s in block.backward if not (isinstance(s, KernelStep) and s.weight)]
        return merged(wanted, f"{block.name} {which}", self.detail, self.transfer_s)

    def _launch(self, code: CodeWriter, step: KernelStep) -> None:
        self.kernels[step.key] = (step.cost, step.host_s)
        code.launch(*step.key)

    def _allocate(self, code: CodeWriter, block: BlockCode, unit: Unit, action: Action) -> None:
        if block.saved_bytes:
            code.alloc(f"saved {unit.name} {action.micro_batch}", block.saved_bytes, "activations")

    # --- what stages are made of --------------------------------------------------------------------------------

    def _blocks(self) -> dict[str, BlockCode]:
        host = self.spec.host
        parts = {
            "dense": (self.operators.dense_layer, True),
            "embedding": (self.operators.embedding, False),
            "head": (self.operators.head, False),
        }
        if self.model.moe:
            parts["moe"] = (self.operators.moe_layer, True)
        blocks = {}
        for name, (operators, wrapped) in parts.items():
            cost = block_cost(operators, self.context, wrapped=wrapped)
            saved = float(cost.saved_bytes[0])
            if name == "head":
                peak = sum(
                    float(tensor_bytes(x, self.context.sizes, self.context.dtype_bytes).flat[0])
                    for x in self.spec.layer.head_peak
                )
                saved = max(saved, peak)
            blocks[name] = block_code(
                name,
                operators,
                self.context,
                saved_bytes=round(saved),
                everything_bytes=round(float(cost.everything_bytes[0])),
                wrapped=wrapped,
                host_forward_s=host.forward_layer_s if wrapped else 0.0,
                host_backward_s=host.backward_layer_s if wrapped else 0.0,
            )
        return blocks

    def _stages(self) -> list[list[tuple[Unit, BlockCode]]]:
        """Return the units of every stage in forward order."""
        p = self.parameters
        counts = stage_layers(self.model.layers, self.plan, self.spec.pipeline)
        leading = self.model.dense_layers if self.model.moe else self.model.layers
        stages: list[list[tuple[Unit, BlockCode]]] = []
        layer = 0
        for stage, count in enumerate(counts):
            units: list[tuple[Unit, BlockCode]] = []
            if stage == 0:
                units.append(
                    (Unit(name="embedding", shared=float(np.asarray(p.embedding).flat[0])), self.blocks["embedding"])
                )
            for _ in range(count):
                if layer < leading:
                    unit, block = Unit(name=f"layer {layer}", shared=float(p.dense_layer.flat[0])), self.blocks["dense"]
                else:
                    unit = Unit(
                        name=f"layer {layer}", shared=float(p.moe_layer.flat[0]), experts=float(p.experts.flat[0])
                    )
                    block = self.blocks["moe"]
                units.append((unit, block))
                layer += 1
            if stage == len(counts) - 1:
                units.append((Unit(name="head", shared=float(np.asarray(p.head).flat[0])), self.blocks["head"]))
            stages.append(_collapsed(units, stage) if self.detail is Detail.STAGE else units)
        return stages

    def _units(self, rank: int) -> list[Unit]:
        return [unit for stage in self.schedule.stages_of(rank) for unit, _ in self.stages[stage]]

    def _traffic(self) -> DataTraffic:
        table, spec = self.context.table, self.spec
        full = bool(table.state_shard["parameters"][0] > 1)

        def ranks(axis: str) -> int:
            return int(np.asarray(self.context.groups.extent(axis)[0]).flat[0])

        return DataTraffic(
            fully_sharded=full,
            keeps_gathered=keeps_gathered(self.plan),
            optimizer_sharded=not full and bool(table.state_shard["optimizer"][0] > 1),
            overlap=spec.fsdp.overlap if full else spec.ddp.overlap,
            replicated_sharding=full and self.plan.dp_replicate > 1 and self.plan.dp_shard > 1,
            shard_ranks=ranks("fsdp"),
            expert_shard_ranks=ranks("expert_fsdp"),
            every_micro_batch=self.plan.pp == 1,
            compute_bytes=self.context.dtype_bytes("compute"),
            reduce_bytes=self.context.dtype_bytes("reduce"),
            copies=spec.fsdp.copy_in_copy_out,
            gradient_bytes=self.context.dtype_bytes(spec.state.gradient_dtype),
            gradients_appear=full and spec.state.gradient_dtype != "reduce",
            hbm_bytes_per_s=self.context.roofline.memory_bytes_per_s,
            dp_ranks=ranks("dp"),
            expert_dp_ranks=ranks("expert_dp"),
        )

    def _groups(self) -> dict[str, Groups]:
        world = self.plan.gpus
        groups: dict[str, Groups] = {"pp": strided_groups(world, self.plan.pp, world // self.plan.pp)}
        for name in FAMILIES:
            size, stride = (int(np.asarray(x).flat[0]) for x in self.context.groups.extent(name))
            if size > 1:
                groups[name] = strided_groups(world, size, stride)
        return groups

    def _message_bytes(self) -> int:
        nbytes = float(self.context.sizes["u"][0]) * self.model.hidden * DTYPE_BYTES[self.runtime.compute_dtype]
        if self.spec.pipeline.scatter_p2p and not self.plan.sequence_parallel:
            nbytes /= self.plan.tp
        return round(nbytes)


# Families of groups besides the pipeline; see GroupTimes for what each is.
FAMILIES = ("tp", "cp", "ep", "fsdp", "replicate", "dp", "expert_fsdp", "expert_dp")


def strided_groups(world: int, size: int, stride: int) -> Groups:
    """Return all groups of `size` ranks that lie `stride` apart, in order of their first rank."""
    starts = [r for r in range(world) if (r // stride) % size == 0]
    return tuple(tuple(range(r, r + size * stride, stride)) for r in starts)


def _collapsed(units: list[tuple[Unit, BlockCode]], stage: int) -> list[tuple[Unit, BlockCode]]:
    """Return a stage as one unit: parameters, bytes and steps of its units together."""
    whole = Unit(
        name=f"stage {stage}",
        shared=sum(u.shared for u, _ in units),
        experts=sum(u.experts for u, _ in units),
        pieces=len(units),
    )
    block = BlockCode(
        name=f"stage {stage}",
        forward=tuple(step for _, b in units for step in b.forward),
        backward=tuple(step for _, b in reversed(units) for step in b.backward),
        saved_bytes=sum(b.saved_bytes for _, b in units),
        again_bytes=max((b.again_bytes for _, b in units), default=0),
    )
    return [(whole, block)]
