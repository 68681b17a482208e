"""Lowered steps against theory: where a formula gives equality, the simulation must give the same number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.layer_cost import block_cost
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.overlap_sites import MODES, SITES, written
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.engine.simulate import simulate
from simulator.lowering.block_code import Detail, block_code
from simulator.lowering.simulation import drawn_micro_batches, program_length, ring_hops, simulate_plan
from simulator.lowering.steps import KernelStep, PiecesStep, SiteStep, Step, TransferStep
from simulator.lowering.training import lower_training, plan_context, strided_groups
from simulator.overlap.modes import FURTHER_CALLS, HOST_CALLS, IN_LAYERS, OPERATIONS, OverlapRates
from simulator.overlap.site_costs import SITE_MODES
from simulator.overlap.torch_async import together_s
from simulator.program.program import Collective, Launch, Send
from simulator.runtimes.model_operators import operators_for
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.update import update_bytes, update_rate
from tests.examples import examples
from tests.simulator.lowering_plans import run, shortened
from tests.simulator.program_check import check
from tests.simulator.published_bubbles import bubble_fraction
from topology.catalog.clusters import cluster
from topology.errors import BadPlan

H100 = cluster("dgx-h100")
QUIET = Runtime(name="pytorch", compile=True)


def free_network(machine, factor: float = 1e6):
    """Return `machine` with links so fast that messages cost their latency only."""
    (group,) = machine.groups
    node = replace(
        group.node,
        links=tuple(replace(x, bytes_per_s=(x.bytes_per_s or 0.0) * factor) for x in group.node.links),
        nics=tuple(replace(x, bytes_per_s=(x.bytes_per_s or 0.0) * factor) for x in group.node.nics),
    )
    return replace(machine, groups=(replace(group, node=node),))


class Undisturbed:
    """Costs of another model, except that transfers take nothing from the kernels alongside them."""

    def __init__(self, costs) -> None:
        self._costs = costs

    def __getattr__(self, name):
        return getattr(self._costs, name)

    def cost(self, instruction, ranks):
        cost = self._costs.cost(instruction, ranks)
        return cost if isinstance(instruction, Launch) else replace(cost, sms=0.0, hbm_bytes_per_s=0.0)


def kernels_s(model, workload, plan, runtime, passes=("forward", "backward")):
    """Return the seconds of all kernels of one micro batch, added up by hand from the operators."""
    context = plan_context(Scenario(model=model, cluster=H100, workload=workload, runtime=runtime), plan)
    operators = operators_for(model, runtime)
    total = 0.0
    for name, count in (("dense_layer", model.layers), ("embedding", 1), ("head", 1)):
        block = block_code(name, getattr(operators, name), context, RecomputeSpec())
        for which in passes:
            total += count * sum(s.cost.seconds for s in getattr(block, which) if isinstance(s, KernelStep))
    return total, context


@pytest.mark.parametrize("detail", list(Detail))
def test_one_gpu_is_the_sum_of_its_kernels_and_the_optimizer(detail: Detail) -> None:
    """Device-bound, no neighbours: compute time is the sum over operators, whatever the detail."""
    model, plan = shortened("llama3-8b", 4), Plan()
    workload = Workload(seq_len=8192, global_batch_size=1)
    compute, context = kernels_s(model, workload, plan, QUIET)
    rate = update_rate(context.runtime, context.roofline)
    update = update_bytes(context.runtime, model.parameters, model.parameters) / rate
    scenario = Scenario(model=model, cluster=H100, workload=workload, runtime=QUIET)
    compute *= estimate_plans(scenario, [plan]).clocks[0]

    _, got = run((model, H100, workload, plan, QUIET), detail)
    assert got.trace.busy_s(0, "compute") == pytest.approx(compute + update, rel=1e-3)
    assert got.step_s == pytest.approx(compute + update + context.spec.host.step_s, rel=0.02)


def test_without_overlap_tensor_parallel_collectives_add_to_compute() -> None:
    """Degree 4 with sequence parallelism: every gather and scatter stands between two products."""
    model, plan = shortened("llama3-8b", 4), Plan(tp=4, sequence_parallel=True)
    workload = Workload(seq_len=8192, global_batch_size=1)

    lowered, got = run((model, H100, workload, plan, QUIET), Detail.KERNEL)
    breakdown = got.trace.breakdown_s(0)
    moved = sum(s.duration_s for s in got.trace.of(0, "tp comm") if s.category == "communication")
    assert breakdown["communication"] == pytest.approx(moved, rel=1e-9)
    alone = breakdown["compute"] + moved + breakdown["copy"]
    assert alone == pytest.approx(got.step_s - breakdown["host"] - breakdown["wait"], rel=1e-6)
    (code,) = {c.instructions for c in lowered.program.codes}
    per_layer = sum(isinstance(i, Collective) and i.group == "tp" for i in code) / model.layers
    assert 8 <= per_layer <= 10  # 4 forward, 4 backward, and those of embedding, head and norm


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZBH1", 1), ("LoopedBFS", 2)]
)
def test_bubbles_are_the_published_ones(schedule: str, stages: int) -> None:
    """Equal stages, free messages: idle time is the analytical model's for the passes' own lengths."""
    model = replace(shortened("llama3-8b", 16), vocab=256)  # ends that weigh nothing
    plan = Plan(pp=4, schedule=schedule, virtual_stages=stages, layers_per_stage=(16 // (4 * stages),) * (4 * stages))
    workload = Workload(seq_len=8192, global_batch_size=8)
    runtime = Runtime(name="megatron-lm", param_dtype="bfloat16")
    lowered = lower_training(
        Scenario(model=model, cluster=free_network(H100), workload=workload, runtime=runtime), plan
    )
    got = simulate(lowered.program, Undisturbed(lowered.costs))

    rank = 1  # a middle stage: no embedding, no head
    busy = [s for s in got.trace.of(rank, category="compute") if s.name != "optimizer"]
    window = max(s.end_s for s in got.trace.spans if s.name != "optimizer") - 10e-3
    compute = sum(s.duration_s for s in busy)
    split = schedule == "ZBH1"
    weights = [s for s in busy if "weight" in s.name or s.name.endswith(".wgrad")]
    w = sum(s.duration_s for s in weights) / 8 / stages if split else 0.0
    f = sum(s.duration_s for s in busy if "forward" in s.name) / 8 / stages
    i = compute / 8 / stages - f - w
    fraction = bubble_fraction(
        schedule,
        ranks=4,
        micro_batches=8,
        stages_per_rank=stages,
        forward_s=f,
        input_grad_s=i if split else i / 2,
        weight_grad_s=w if split else i / 2,
    )
    assert 1 - compute / window == pytest.approx(fraction, abs=0.02)


def test_optimizer_does_not_hold_up_the_last_gradient() -> None:
    """The last message of a rank leaves before its gradient reduction and optimizer: drains do not add them up."""
    model = shortened("llama3-8b", 16)
    plan = Plan(pp=8, dp_replicate=2, zero_stage=0, schedule="1F1B")
    runtime = Runtime(name="megatron-lm", version="2022-05", param_dtype="bfloat16")
    lowered, _ = run((model, cluster("dgx-h100", gpus=16), Workload(seq_len=2048, global_batch_size=16), plan, runtime))

    for code in lowered.program.codes[1:]:
        sends = [n for n, i in enumerate(code.instructions) if isinstance(i, Send)]
        reduces = [n for n, i in enumerate(code.instructions) if isinstance(i, Collective) and i.group == "dp"]
        update = next(n for n, i in enumerate(code.instructions) if isinstance(i, Launch) and i.name == "optimizer")
        assert max(sends) < min(reduces) < update


def test_fsdp_hides_all_but_the_ends_when_compute_dominates() -> None:
    """Exposed: the first gather and the last reduction; long sequences hide the rest."""
    model, plan = shortened("llama3-8b", 6), Plan(dp_shard=8)
    workload = Workload(seq_len=16384, global_batch_size=8)
    context = plan_context(Scenario(model=model, cluster=H100, workload=workload, runtime=QUIET), plan)
    # An embedding computes next to nothing: the first layer's traffic has nothing to hide behind either.
    layer = (model.parameters - 2 * model.vocab * model.hidden) / model.layers
    ends = (model.vocab * model.hidden, layer)
    first = sum(context.groups.time_s("all_gather", "fsdp", n * 2.0)[0] for n in ends)
    last = sum(context.groups.time_s("reduce_scatter", "fsdp", n * 2.0)[0] for n in ends)

    _, got = run((model, H100, workload, plan, QUIET))
    exposed = got.trace.exposed_s(0)
    assert exposed == pytest.approx(first + last, rel=0.25)


def test_fsdp_is_bound_by_traffic_when_it_dominates() -> None:
    """On a slow network the step is as long as its gathers and reductions, one after the other."""
    machine = free_network(cluster("dgx-h100", gpus=16), 0.02)
    model, plan = shortened("llama3-8b", 6), Plan(dp_shard=16)
    _, got = run((model, machine, Workload(seq_len=2048, global_batch_size=16), plan, QUIET))

    traffic = got.trace.busy_s(0, "communication", "fsdp comm")
    assert traffic < got.step_s < 1.1 * traffic


def test_hybrid_sharding_sums_replicas_beside_the_next_scatter() -> None:
    """HSDP: the all-reduce over replicas has a communicator of its own and overlaps later reduce-scatters."""
    model, plan = shortened("llama3-8b", 6), Plan(dp_replicate=2, dp_shard=8)
    machine = cluster("dgx-h100", gpus=16)
    _, got = run((model, machine, Workload(seq_len=2048, global_batch_size=16), plan, QUIET))

    sums = [s for s in got.trace.of(0, "replicate comm") if s.category == "communication"]
    scatters = [s for s in got.trace.of(0, "fsdp comm") if s.name.startswith("reduce_scatter")]
    assert len(sums) == len(scatters) == model.layers + 2
    assert all(a.start_s >= b.end_s - 1e-9 for a, b in zip(sums, scatters, strict=True))
    assert any(a.start_s < b.end_s and b.start_s < a.end_s for a in sums for b in scatters)


def test_ring_attention_is_balanced_and_exchanges_all_shards() -> None:
    """Four ranks: every rank computes as long as any other, and passes on cp - 1 shards a layer and pass."""
    model, plan = shortened("llama3-8b", 4), Plan(cp=4, cp_method="ring")
    lowered, got = run((model, H100, Workload(seq_len=8192, global_batch_size=1), plan, QUIET), folded=False)

    busy = [got.trace.busy_s(rank, "compute") for rank in range(4)]
    assert max(busy) == pytest.approx(min(busy), rel=1e-9)
    (code,) = {c.instructions for c in lowered.program.codes}
    assert sum(isinstance(i, Send) for i in code) == 2 * 3 * model.layers
    keys_values = 2 * 8192 / 4 * model.kv_heads * model.head_dim * 2
    assert {i.nbytes for i in code if isinstance(i, Send)} == {round(keys_values), round(2 * keys_values)}


@pytest.mark.parametrize("runtime", ["torchtitan", "megatron-lm"])
def test_a_ring_is_as_long_as_its_program(runtime: str) -> None:
    """The length that decides whether a step is simulated: of one code on a node; across nodes, of each place's."""
    model, workload, ring = shortened("llama3-8b", 4), Workload(seq_len=32768, global_batch_size=16), Plan(cp=8)
    asked = Scenario(model=model, workload=workload, cluster=cluster("dgx-h100", 16), runtime=Runtime(name=runtime))
    written_down = lower_training(asked, replace(ring, dp_shard=2)).program.instructions
    counted = program_length(model, replace(workload, global_batch_size=8), ring, hops=7)

    assert counted == pytest.approx(written_down, rel=0.1)
    assert ring_hops(asked, replace(ring, dp_shard=2)) == 0, "on one node ranks behave alike"
    assert ring_hops(asked, Plan(cp=8, tp=2)) == 7 * 4


def test_async_takes_what_its_formula_says() -> None:
    """One pair of 4 ms product and 2 ms collective on 4 ranks, which does not beat the longer of the two.

    A piece of 1.1 ms alongside a shard of 0.6 ms is slowed by 0.35 of that, but for the first of the four.
    """
    piece = 1.1 + 0.35 * 0.6 * 3 / 4

    assert together_s(hop_s=0.6, pieces_s=4.4, ranks=4.0) == pytest.approx(4 * piece)


def test_copies_that_cannot_be_made_take_for_ever() -> None:
    """Between nodes there are no peer copies: an endless hop stays endless and does not become no number."""
    for hop in (np.inf, np.array([np.inf])):
        assert np.all(np.isposinf(together_s(hop_s=hop, pieces_s=4.4, ranks=4.0)))


@pytest.mark.parametrize("name", ["pytorch", "torchtitan", "megatron-lm"])
@pytest.mark.parametrize("mode", SITE_MODES)
def test_a_layer_with_a_mode_takes_the_same_in_both_forms(mode: str, name: str) -> None:
    """One layer's kernels and pairs, forward and backward, added up by the account and written for one plan."""
    model, runtime = shortened("llama3-8b", 1), Runtime(name=name)
    plan = Plan(tp=4, sequence_parallel=True, tp_overlap=mode)
    context = plan_context(
        Scenario(model=model, cluster=H100, workload=Workload(seq_len=8192, global_batch_size=1), runtime=runtime), plan
    )
    operators = operators_for(model, runtime).dense_layer
    code, cost = block_code("layer", operators, context, RecomputeSpec()), block_cost(operators, context)
    for steps, formula in ((code.forward, cost.forward), (code.backward, cost.backward)):
        assert sum(isinstance(step, SiteStep) for step in steps) == 4
        assert sum(device_s(step) for step in steps) == pytest.approx(formula.device_s[0])
        assert sum(host_s(step) for step in steps) == pytest.approx(formula.host_s[0])


def device_s(step: Step) -> float:
    """Return the seconds of a kernel, a collective or a pair of a block's code."""
    match step:
        case KernelStep():
            return step.cost.seconds
        case SiteStep():
            return step.kernel.cost.seconds + step.exposed.cost.seconds
        case TransferStep():
            return step.seconds
    raise AssertionError(step)


def host_s(step: Step) -> float:
    """Return the seconds in which the host issues it."""
    match step:
        case PiecesStep():
            return step.ranks * (step.piece.host_s + step.copies_host_s)
        case SiteStep():
            return step.kernel.host_s + step.more_host_s
        case KernelStep() | TransferStep():
            return step.host_s
    raise AssertionError(step)


def test_a_share_of_layers_is_wrapped_layer_by_layer() -> None:
    """The mode `selective` of torchtitan wraps every second block: half as many layers recompute, and keep only their
    input.
    """
    model = shortened("llama3-8b", 4)
    workload = Workload(seq_len=2048, global_batch_size=1)
    count = {}
    for mode in ("none", "selective", "full"):
        _, got = run((model, H100, workload, Plan(recompute=mode), Runtime()), Detail.KERNEL)
        count[mode] = sum(s.name == "sdpa" for s in got.trace.of(0, category="compute"))
    assert count == {"none": 4, "selective": 6, "full": 8}


def test_recomputation_by_stage() -> None:
    """Only the stage that is set to recompute does, in both forms; a wrong count is refused."""
    model = shortened("llama3-8b", 8)
    plan = Plan(pp=2, schedule="1F1B", recompute_per_stage=("full", "none"))
    question = (model, H100, Workload(seq_len=2048, global_batch_size=4), plan, Runtime())
    _, got = run(question, Detail.KERNEL)
    passes = [sum(s.name == "sdpa" for s in got.trace.of(rank, category="compute")) for rank in (0, 1)]
    layers = (4, 4)
    assert passes == [4 * 2 * layers[0], 4 * layers[1]]

    formula = estimate_plans(
        Scenario(model=model, cluster=H100, workload=question[2], runtime=Runtime()),
        [plan, replace(plan, recompute_per_stage=()), replace(plan, recompute="full", recompute_per_stage=())],
    )
    kept = formula.memory.categories["activations"]
    assert kept[0, 0] == kept[2, 0]
    assert kept[0, 1] == kept[1, 1]
    with pytest.raises(BadPlan, match="recompute_per_stage"):
        run((*question[:3], replace(plan, recompute_per_stage=("full",)), Runtime()))


def test_busiest_expert_rank_decides_and_capacity_caps_it() -> None:
    model, plan = shortened("qwen3-30b-a3b", 4), Plan(dp_shard=8, ep=8)
    workload = Workload(seq_len=2048, global_batch_size=8)

    def step(imbalance=1.0, capacity=None):
        asked = replace(workload, expert_imbalance=imbalance)
        chosen = replace(plan, capacity_factor=capacity)
        formula = estimate_plans(Scenario(model=model, cluster=H100, workload=asked, runtime=QUIET), [chosen]).step_s[0]
        return formula, run((model, H100, asked, chosen, QUIET))[1].step_s

    even, skewed, capped = step(), step(2.0), step(2.0, 1.25)
    assert even[0] < capped[0] < skewed[0]
    assert even[1] < capped[1] < skewed[1]


def test_unknown_methods_are_refused() -> None:
    for wrong in (Plan(cp=2, cp_method="gossip"), Plan(tp=2, tp_overlap="magic")):
        with pytest.raises(BadPlan, match="unknown"):
            run((shortened("llama3-8b", 4), H100, Workload(seq_len=2048, global_batch_size=1), wrong, Runtime()))


def test_groups_partition_the_world() -> None:
    for size, stride in ((2, 4), (4, 2), (8, 1)):
        groups = strided_groups(16, size, stride)
        assert sorted(rank for group in groups for rank in group) == list(range(16))
        assert {tuple(np.diff(group)) for group in groups} == {(stride,) * (size - 1)}


def test_irregular_placement_folds_to_the_nanosecond() -> None:
    """Ranks dealt over nodes out of order: fewer symmetries, the same times."""
    model = shortened("llama3-8b", 8)
    machine = cluster("dgx-h100", gpus=16)
    dealt = tuple(int(x) for x in np.random.default_rng(3).permutation(16))
    for plan in (
        Plan(dp_shard=4, tp=2, pp=2, sequence_parallel=True, schedule="1F1B", placement=dealt),
        Plan(dp_replicate=2, dp_shard=4, cp=2, cp_method="ring", placement=dealt),
    ):
        question = (model, machine, Workload(seq_len=2048, global_batch_size=16), plan, Runtime())
        lowered, folded = run(question)
        unfolded = simulate(lowered.program, lowered.costs, folded=False, spans=False)

        assert check(lowered.program) == []
        assert folded.step_s == pytest.approx(unfolded.step_s, abs=1e-9)


def test_simulate_plan_reads_the_run_back() -> None:
    """The step of the estimate is the run's; its parts add up."""
    model = shortened("llama3-8b", 8)
    plan = Plan(dp_shard=2, pp=2, schedule="1F1B")
    got = simulate_plan(
        Scenario(model=model, cluster=H100, workload=Workload(seq_len=2048, global_batch_size=8), runtime=Runtime()),
        plan,
    )

    assert got.estimate.step_s.value == pytest.approx(got.run.step_s + got.estimate.breakdown_s["allocator"], rel=1e-12)
    assert sum(got.estimate.breakdown_s.values()) == pytest.approx(got.estimate.step_s.value)
    assert got.estimate.step_s.low < got.run.step_s < got.estimate.step_s.high


def test_sixteen_thousand_gpus_fold_to_their_stages() -> None:
    """llama3-405b, tp 8, cp 2, pp 16: 16 classes, tens of thousands of instructions for two micro batches; a timeline
    of 64 of them is drawn with the fewest that show how it goes on.
    """
    model, machine = load_model("llama3-405b"), cluster("dgx-h100", gpus=16384)
    plan = Plan(dp_shard=64, tp=8, sequence_parallel=True, cp=2, pp=16, schedule="1F1B")
    workload = Workload(seq_len=8192, global_batch_size=2 * 64)

    assert drawn_micro_batches(model, replace(workload, global_batch_size=64 * 64), plan) == 2 * 16 + 2
    lowered = lower_training(Scenario(model=model, cluster=machine, workload=workload, runtime=Runtime()), plan)
    got = simulate(lowered.program, lowered.costs, spans=False)
    assert len(got.folding.classes) == 16
    assert lowered.program.instructions < 60_000
    formula = estimate_plans(Scenario(model=model, cluster=machine, workload=workload, runtime=Runtime()), [plan])
    assert got.step_s == pytest.approx(formula.step_s[0], rel=0.01)


def test_async_tensor_parallelism_hides_only_what_its_graph_pass_matches() -> None:
    """micro_pipeline_tp matches a reduce-scatter that reads one product. Backward of the gated MLP adds up two first,
    and that of queries, keys and values up to three.
    """
    layers, tp = 4, 4
    model = shortened("llama3-8b", layers)
    workload = Workload(seq_len=8192, global_batch_size=1)
    summed = {}
    for name in ("pytorch", "torchtitan"):
        for mode in ("copy_engine", "async"):
            plan = Plan(tp=tp, sequence_parallel=True, tp_overlap=mode)
            runtime = Runtime(name=name, compile=True)
            _, got = run((model, H100, workload, plan, runtime), Detail.KERNEL)
            summed[name, mode] = sum(s.name == "add_partials" for s in got.trace.of(0))
    # Both of a layer's forward, and the head's backward, which is one product; so is that of a joint projection.
    assert summed["torchtitan", "async"] == 2 * layers + 1
    assert summed["pytorch", "async"] == 3 * layers + 1
    assert summed["torchtitan", "copy_engine"] == 0


@examples(25)
@given(st.fixed_dictionaries(dict.fromkeys(SITES, st.sampled_from(MODES))), st.sampled_from(["torchtitan", "pytorch"]))
def test_sites_cost_what_they_cost_alone(modes: dict[str, str], name: str) -> None:
    """What the modes of a block's four sites change, each alone in its plan, adds up; forward and backward."""
    model, workload, runtime = (
        shortened("llama3-8b", 1),
        Workload(seq_len=8192, global_batch_size=1),
        Runtime(name=name),
    )
    operators = operators_for(model, runtime).dense_layer

    def cost(tp_overlap: str) -> np.ndarray:
        plan = Plan(tp=4, sequence_parallel=True, tp_overlap=tp_overlap)
        block = block_cost(
            operators, plan_context(Scenario(model=model, cluster=H100, workload=workload, runtime=runtime), plan)
        )
        return np.array([(p.exposed_s[0], p.compute_s[0], p.host_s[0]) for p in (block.forward, block.backward)])

    plain = cost("none")
    alone = [cost(written({site: mode})) - plain for site, mode in modes.items()]

    assert cost(written(modes)) == pytest.approx(plain + sum(alone), rel=1e-9)


def test_async_pieces_are_issued_one_by_one() -> None:
    """Host seconds of a layer's forward: the same in both forms, and a launch and its calls for every piece."""
    model, workload = shortened("llama3-8b", 1), Workload(seq_len=8192, global_batch_size=1)
    plan = Plan(tp=4, sequence_parallel=True, tp_overlap="async")
    context = plan_context(Scenario(model=model, cluster=H100, workload=workload, runtime=QUIET), plan)
    operators = operators_for(model, QUIET).dense_layer
    steps = block_code("layer", operators, context, RecomputeSpec()).forward
    formula = block_cost(operators, context).forward.host_s[0]

    assert sum(host_s(step) for step in steps) == pytest.approx(formula)
    # The gathers before qkv and w1, the scatters behind out and w2; w3 comes after a kernel of its own.
    host, pairs = context.spec.host, 4
    alone = plan_context(
        Scenario(model=model, cluster=H100, workload=workload, runtime=QUIET), replace(plan, tp_overlap="none")
    )
    more = formula - block_cost(operators, alone).forward.host_s[0]
    assert more == pytest.approx(pairs * (7 * host.collective_s + 3 * host.launch_s), abs=1e-9)


@pytest.mark.parametrize("mode", SITE_MODES)
def test_pairs_are_issued_as_the_executor_was_counted_to(mode: str) -> None:
    """The products and four collectives of a layer's forward give way to two gathers and two scatters."""
    model, workload = shortened("llama3-8b", 1), Workload(seq_len=8192, global_batch_size=1)
    operators, host = operators_for(model, QUIET).dense_layer, {}
    for tp_overlap in ("none", mode):
        plan = Plan(tp=4, sequence_parallel=True, tp_overlap=tp_overlap)
        context = plan_context(Scenario(model=model, cluster=H100, workload=workload, runtime=QUIET), plan)
        host[tp_overlap] = block_cost(operators, context).forward.host_s[0]
    products = sum(bool(operator.matmul) for operator in operators)
    calls = 2 * sum(always + 3 * each for always, each in (HOST_CALLS[operation, mode] for operation in OPERATIONS))
    calls += (products - 4) * FURTHER_CALLS.get(mode, 0.0)
    issued = IN_LAYERS.get(mode, 1.0) * OverlapRates().host_s * calls

    spared = products * context.spec.host.launch_s + 4 * context.spec.host.collective_s
    assert host[mode] - host["none"] == pytest.approx(issued - spared)


@pytest.mark.parametrize(("name", "reductions"), [("torchtitan", 2), ("meshwright", 1)])
def test_gradients_are_copied_into_the_buckets_of_ddp_and_back(name: str, reductions: int) -> None:
    """Both ways read and write all of them (reducer.cpp); torchtitan reduces after each of two micro batches."""
    model, plan = shortened("llama3-8b", 2), Plan(dp_replicate=2)
    workload, runtime = Workload(seq_len=2048, global_batch_size=4), Runtime(name=name)
    _, context = kernels_s(model, workload, plan, runtime)

    _, got = run((model, H100, workload, plan, runtime), Detail.LAYER)

    copied = sum(span.duration_s for span in got.trace.of(0, "compute") if span.name.startswith("copy_"))
    alone = reductions * 4 * 4 * model.parameters / context.roofline.memory_bytes_per_s
    assert alone * (1 - 1e-6) <= copied < 1.3 * alone  # some of it alongside reductions
