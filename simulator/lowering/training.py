"""One training step as a Program: micro batches through the stages, data-parallel traffic around them, the optimizer.

Reads like the loop it stands for. A pipeline rank runs its schedule's actions in order; an action runs the units of its
stage (embedding, layers, head) forward, or backward in reverse; each unit is gathered before use and its gradients are
sent on their way after. Memory is counted as the compute stream gets there, in the order in which the host asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simulator.closed_form.data_parallel import has_replicas, update_bytes, updated_dtype
from simulator.closed_form.estimates import calibrated_operators, cost_context, spelled
from simulator.closed_form.layer_cost import CostContext
from simulator.closed_form.memory import State, between_stages_bytes, state_bytes
from simulator.closed_form.scenario import Scenario
from simulator.closed_form.step_cost import NORM_BYTES, host_synchronizes, rest_host_s, step_host_s
from simulator.columns.plan_table import plan_table
from simulator.config.plan import Plan
from simulator.config.runtime import DTYPE_BYTES
from simulator.lowering.block_code import BlockCode, Detail, merged
from simulator.lowering.machine_costs import MachineCosts
from simulator.lowering.network import Network, StageUnits
from simulator.lowering.sharded_data import DataTraffic, DataWriter, Unit
from simulator.lowering.steps import KernelStep, Step
from simulator.lowering.writing import StepWriter
from simulator.pipeline.schedule_program import peak_in_flight, pipeline_program
from simulator.pipeline.schedule_tables import build_schedule
from simulator.pipeline.schedules import Action, Kind, Schedule, default_schedule
from simulator.program.cost_model import Cost
from simulator.program.program import COMPUTE, CodeWriter, Groups, Program
from simulator.runtimes.library import operators_for, wraps_one


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A step ready to run: `simulate(lowered.program, lowered.costs)`."""

    program: Program
    costs: MachineCosts
    schedule: Schedule


def lower_training(scenario: Scenario, plan: Plan, *, detail: Detail = Detail.LAYER, clocks: float = 1.0) -> Lowered:
    """Return the program of one training step. Raises BadPlan for a schedule or recompute word that does not exist.

    `clocks` multiplies kernel times, as the closed form found for the step as a whole (`EstimateTable.clocks`).
    """
    return _Lowering(scenario, plan, detail, clocks).lower()


def plan_context(scenario: Scenario, plan: Plan) -> CostContext:
    """Return what the costs of a single plan depend on: the closed form's context, with one row."""
    operators = calibrated_operators(scenario)
    table = plan_table(
        [spelled(plan, scenario.runtime)],
        scenario.workload,
        cp_method=operators.spec.context_parallel,
        wraps_one=wraps_one(operators.spec, scenario.runtime),
    )
    return cost_context(scenario, table, operators)


class _Lowering:
    def __init__(self, scenario: Scenario, plan: Plan, detail: Detail, clocks: float = 1.0) -> None:
        self.model, self.cluster, self.runtime, self.detail = scenario.model, scenario.cluster, scenario.runtime, detail
        context = plan_context(scenario, plan)
        slowed = replace(context.roofline, kernel_factor=context.roofline.kernel_factor * clocks)
        self.context = replace(context, roofline=slowed)
        self.plan = self.context.table.plans[0]
        self.spec = self.context.spec
        self.synchronizes = bool(host_synchronizes(self.spec.host, self.context.table)[0])
        self.schedule = build_schedule(
            self.plan.schedule or default_schedule(self.plan.virtual_stages),
            ranks=self.plan.pp,
            micro_batches=self.plan.micro_batches(scenario.workload.global_batch_size),
            stages_per_rank=self.plan.virtual_stages,
        )
        self.in_flight = peak_in_flight(self.schedule)
        self.network = Network(
            self.model, operators_for(self.model, self.runtime), self.context, collapse=detail is Detail.STAGE
        )
        self.steps = StepWriter()
        self.traffic = self._traffic()
        self.message_bytes = self._message_bytes()
        self._merged: dict[tuple[str, str], list[Step]] = {}

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
            message_bytes=self.message_bytes,
            groups=self._groups(),
            ranks_of=lambda rank: range(rank * per_rank, (rank + 1) * per_rank),
            early_receives=self.spec.pipeline.p2p_overlap,
            finish=lambda code, rank: self._end(code, writers[rank], rank),
        )
        costs = MachineCosts(
            cluster=self.cluster,
            collectives=self.context.groups.collectives,
            kernels=self.steps.kernels,
            collective_host_s=self.spec.host.collective_s,
            placement=self.plan.placement,
            families={name: self.context.groups.shape(name) for name in FAMILIES},
            peer_copies=self.steps.peer_copies,
        )
        return Lowered(program=program, costs=costs, schedule=self.schedule)

    # --- the parts of a step ------------------------------------------------------------------------------------

    def _begin(self, code: CodeWriter, rank: int) -> DataWriter:
        """What is there before the first micro batch: parameters, optimizer state, and the step's own host work."""
        units, table = self._units(rank), self.context.table
        widths = state_bytes(self.context)

        def held(kind: State, width: float) -> int:
            shard, expert = float(table.state_shard[kind][0]), float(table.expert_shard[kind][0])
            return round(sum(u.shared / shard + u.experts / expert for u in units) * width)

        code.host_work("step", float(step_host_s(self.spec.host, self.context)[0]))
        code.alloc("parameters", held("parameters", widths["parameters"]), "parameters", filled=True, stream=COMPUTE)
        code.alloc("optimizer", held("optimizer", widths["optimizer"]), "optimizer", filled=True, stream=COMPUTE)
        if not self.traffic.gradients_appear and not self._gradients_come:
            nbytes = held("gradients", widths["gradients"])
            code.alloc("gradients", nbytes, "gradients", filled=True, stream=COMPUTE)
        whole = sum(u.elements for u in units)
        if not self.traffic.fully_sharded and self.spec.ddp.bucket_copy and self.plan.dp_replicate > 1:
            code.alloc("buckets", round(whole * widths["gradients"]), "gradient_buffers", filled=True, stream=COMPUTE)
        exchanged = round(self._between_stages_bytes(rank))
        if exchanged:
            code.alloc("between stages", exchanged, "activations", filled=True, stream=COMPUTE)
        placeholders = round(self.network.placeholder_bytes(self.schedule.stages_of(rank)))
        if placeholders and not self.traffic.fully_sharded:
            code.alloc("placeholders", placeholders, "gradient_buffers", filled=True, stream=COMPUTE)
        symmetric = round(self.network.symmetric_bytes(self.schedule.stages_of(rank)))
        if symmetric:
            code.alloc("symmetric", symmetric, "symmetric_buffers", filled=True, stream=COMPUTE)
        kept = round(sum(u.kept_cast for u in units) * self._cast_bytes)
        if kept:
            code.alloc("cast weights", kept, "gathered_parameters", filled=True, stream=COMPUTE)
        return DataWriter(code=code, traffic=self.traffic, steps=self.steps)

    @property
    def _gradients_come(self) -> bool:
        """Whether gradients that stay whole are there only from the backward pass that makes them: one a step."""
        state = self.spec.state
        once = self.schedule.micro_batches <= 1 and state.gradients_freed
        return once and not self.traffic.fully_sharded and state.gradient_dtype != "reduce"

    def _gradient_bytes(self, unit: Unit) -> int:
        """Bytes of the gradients of a unit on a rank, in the type and the shards in which they are kept."""
        table = self.context.table
        shard, expert = float(table.state_shard["gradients"][0]), float(table.expert_shard["gradients"][0])
        return round((unit.shared / shard + unit.experts / expert) * float(state_bytes(self.context)["gradients"]))

    @property
    def _cast_bytes(self) -> float:
        """Bytes of an element of the copies that autocast makes of weights; 0 where it makes none."""
        bytes_of = self.context.dtype_bytes
        casts = self.context.table.conditions["autocast"][0] and bytes_of("param") > bytes_of("compute")
        return bytes_of("compute") if casts else 0.0

    def _action(self, code: CodeWriter, data: DataWriter, action: Action) -> None:
        units = self.network.stages[action.stage]
        if action.kind is Kind.FORWARD:
            self._forward(code, data, units, action)
        else:
            self._backward(code, data, units, action)
        if self.synchronizes:
            code.synchronize(COMPUTE)

    def _forward(self, code: CodeWriter, data: DataWriter, units: StageUnits, action: Action) -> None:
        # Autocast remembers its copies to the end of the pass; what compiled blocks cast is theirs.
        remembered = 0.0 if self.runtime.compile else self._cast_bytes
        casts: list[str] = []
        for position, (unit, block) in enumerate(units):
            following = units[position + 1][0] if position + 1 < len(units) else None
            data.before(unit, following)
            if block.saved_bytes:
                name = f"saved {unit.name} {action.micro_batch}"
                code.alloc(name, block.saved_bytes, "activations", stream=COMPUTE)
            if unit.recast * remembered:
                casts.append(f"cast {unit.name} {action.micro_batch}")
                code.alloc(casts[-1], round(unit.recast * remembered), "loss_and_recompute", stream=COMPUTE)
            self._write(code, block, "forward")
            data.join()
            # The last unit is needed again at once; a whole stage in one is not, but for its last layer.
            if position + 1 < len(units) or unit.pieces > 1:
                data.after(unit, last_use=False)
        for name in casts:
            code.free(name, stream=COMPUTE)

    def _backward(self, code: CodeWriter, data: DataWriter, units: StageUnits, action: Action) -> None:
        last = action.micro_batch == self.schedule.micro_batches - 1
        reducing = data.reduces(last_micro_batch=last) and action.kind is not Kind.INPUT_GRAD
        for position in reversed(range(len(units))):
            unit, block = units[position]
            name = f"{unit.name} {action.micro_batch}"
            if action.kind is Kind.WEIGHT_GRAD:
                self._write(code, block, "weight")
            else:
                following = units[position - 1][0] if position else None
                data.before(unit, following, reducing=reducing)
                recast = min(unit.recast, unit.in_use) * self._cast_bytes
                if block.again_bytes:
                    nbytes = block.again_bytes + round(recast)
                    code.alloc(f"again {name}", nbytes, "loss_and_recompute", stream=COMPUTE)
                self._write(code, block, "backward" if action.kind is Kind.BACKWARD else "input")
                data.join()
                if block.again_bytes:
                    code.free(f"again {name}", stream=COMPUTE)
            if action.kind is not Kind.INPUT_GRAD:
                if block.saved_bytes:
                    code.free(f"saved {name}", stream=COMPUTE)
                # Its gradient is whole by the time its activations are gone.
                whole = round(unit.in_use * self.traffic.unsharded_gradient_bytes) if self.traffic.fully_sharded else 0
                if whole:
                    code.alloc(f"gradient of {name}", whole, "gradient_buffers", stream=COMPUTE)
                data.turned(unit, reducing=reducing)
                if whole:
                    code.free(f"gradient of {name}", stream=COMPUTE)
                if self._gradients_come:
                    code.alloc(f"gradient of {name}", self._gradient_bytes(unit), "gradients", stream=COMPUTE)
                data.after(unit, last_use=last)
        if reducing and action.stage == 0:
            data.settle()

    def _end(self, code: CodeWriter, data: DataWriter, rank: int) -> None:
        """Join what is under way, sum the gradient norm over all that share it, and update."""
        units, table = self._units(rank), self.context.table
        code.host_work("rest", float(rest_host_s(self.spec.host, table)[0]))
        data.finish(units)
        for family, stream in (("dp", "dp norm"), ("tp", "tp comm"), ("pp", "pp norm")):
            if len(self._groups()[family][0] if family in self._groups() else ()) > 1:
                code.after(stream, COMPUTE)
                code.collective("all_reduce", family, round(NORM_BYTES), stream=stream)
                code.after(COMPUTE, stream)
        shard, expert = float(table.state_shard["optimizer"][0]), float(table.expert_shard["optimizer"][0])
        owned = sum(u.shared / shard + u.experts / expert for u in units)
        moved = update_bytes(self.runtime, owned, sum(u.elements for u in units))
        seconds = float(moved) / self.context.roofline.update_bytes_per_s(updated_dtype(self.runtime))
        self.steps.launch(
            code, KernelStep(key=("optimizer", (round(owned),), "float32"), cost=Cost(seconds=seconds), host_s=0.0)
        )
        data.redistribute(units)

    # --- writing ------------------------------------------------------------------------------------------------

    def _write(self, code: CodeWriter, block: BlockCode, which: str) -> None:
        key = (block.name, which)
        if key not in self._merged:
            self._merged[key] = self._steps(block, which)
        self.steps.write(code, self._merged[key])

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
        return merged(wanted, f"{block.name} {which}", self.detail)

    # --- what the parts are told --------------------------------------------------------------------------------

    def _units(self, rank: int) -> list[Unit]:
        return [unit for stage in self.schedule.stages_of(rank) for unit, _ in self.network.stages[stage]]

    def _traffic(self) -> DataTraffic:
        table, spec = self.context.table, self.spec
        full = bool(table.fully_sharded[0])
        bytes_of = self.context.dtype_bytes

        def ranks(axis: str) -> int:
            return int(self.context.groups.extent(axis)[0][0])

        return DataTraffic(
            fully_sharded=full,
            keeps_gathered=bool(self.context.table.keeps_gathered[0]),
            optimizer_sharded=not full and bool(table.state_shard["optimizer"][0] > 1),
            gradients_sharded=not full and bool(table.state_shard["gradients"][0] > 1),
            overlap=spec.fsdp.overlap if full else spec.ddp.overlap,
            replicated_sharding=full and bool(has_replicas(table)[0]),
            shard_ranks=ranks("fsdp"),
            expert_shard_ranks=ranks("expert_fsdp"),
            every_micro_batch=self.plan.pp == 1 and (full or spec.ddp.every_micro_batch),
            scatters_each=self.plan.pp == 1,
            compute_bytes=bytes_of("compute"),
            reduce_bytes=bytes_of("reduce"),
            copies=spec.fsdp.copy_in_copy_out,
            gradient_bytes=bytes_of(spec.state.gradient_dtype),
            unsharded_gradient_bytes=bytes_of(spec.state.unsharded_gradient_dtype),
            gradients_appear=full and spec.state.gradient_dtype != "reduce",
            adds_up=spec.state.gradient_dtype != "reduce",
            bucket_bytes=spec.ddp.bucket_bytes,
            hbm_bytes_per_s=self.context.roofline.memory_bytes_per_s,
            packing_bytes_per_s=self._packing_rate(),
            dp_ranks=ranks("dp"),
            expert_dp_ranks=ranks("expert_dp"),
        )

    def _packing_rate(self) -> float:
        """Return the rate at which a layer of this plan is packed and unpacked."""
        parameters = float(np.asarray(self.network.parameters.dense_layer, dtype=np.float64).flat[0])
        nbytes = parameters * self.context.dtype_bytes("compute")
        return float(np.asarray(self.context.roofline.packing_bytes_per_s(nbytes)).flat[0])

    def _between_stages_bytes(self, rank: int) -> float:
        stages = self.schedule.stages_of(rank)
        first, last = (np.array([[end in stages]]) for end in (0, self.schedule.stages - 1))
        flying = np.array([[self.in_flight[rank] / len(stages)]])
        return float(between_stages_bytes(self.context, first, last, flying)[0, 0])

    def _groups(self) -> dict[str, Groups]:
        if not hasattr(self, "_known_groups"):
            world = self.plan.gpus
            groups: dict[str, Groups] = {"pp": strided_groups(world, self.plan.pp, world // self.plan.pp)}
            for name in FAMILIES:
                if name in EXPERT_FAMILIES and self.model.moe is None:
                    continue
                size, stride = (int(x[0]) for x in self.context.groups.extent(name))
                if size > 1:
                    groups[name] = strided_groups(world, size, stride)
            self._known_groups = groups
        return self._known_groups

    def _message_bytes(self) -> int:
        nbytes = float(self.context.sizes["u"][0]) * self.model.hidden * DTYPE_BYTES[self.runtime.compute_dtype]
        if self.spec.pipeline.scatter_p2p and not self.plan.sequence_parallel:
            nbytes /= self.plan.tp
        return round(nbytes)


# Families of groups besides the pipeline; see GroupTimes for what each is.
EXPERT_FAMILIES = ("ep", "expert_fsdp", "expert_dp")
FAMILIES = ("tp", "cp", "fsdp", "replicate", "dp", *EXPERT_FAMILIES)


def strided_groups(world: int, size: int, stride: int) -> Groups:
    """Return all groups of `size` ranks that lie `stride` apart, in order of their first rank."""
    span = size * stride
    return tuple(
        tuple(range(block + offset, block + offset + span, stride))
        for block in range(0, world, span)
        for offset in range(stride)
    )
