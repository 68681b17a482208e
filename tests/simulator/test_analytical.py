"""Step times: columns equal rows, bounds hold, and what should cost more does."""

from dataclasses import replace

import numpy as np
import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.fitting.calibration_fit import calibrated
from simulator.step.update import update_bytes
from topology.catalog.clusters import cluster
from topology.errors import BadPlan
from topology.profile.profile import CollectiveSample, Profile

WORKLOAD = Workload(seq_len=4096, global_batch_size=64)
PLANS = [
    Plan(dp_shard=16),
    Plan(dp_shard=16, recompute="full"),
    Plan(dp_shard=2, tp=8, sequence_parallel=True),
    Plan(dp_shard=4, pp=4, schedule="1F1B"),
    Plan(dp_shard=4, pp=2, tp=2, sequence_parallel=True, virtual_stages=2, schedule="Interleaved1F1B"),
    Plan(dp_replicate=2, dp_shard=8, micro_batch_size=2),
    Plan(dp_shard=4, cp=4),
]


def table(plans, *, model="llama3-8b", runtime=None, machine=None, workload=WORKLOAD):
    return estimate_plans(
        Scenario(
            model=load_model(model),
            cluster=machine or cluster("dgx-h100", gpus=16),
            workload=workload,
            runtime=runtime or Runtime(),
        ),
        plans,
    )


def test_columns_equal_one_plan_at_a_time() -> None:
    """Vectorising changes nothing, to the last bit but one."""
    together = table(PLANS)
    for index, plan in enumerate(PLANS):
        alone = table([plan])

        assert together.step_s[index] == pytest.approx(alone.step_s[0], rel=1e-12)
        assert together.reserved_bytes[index] == pytest.approx(alone.reserved_bytes[0], rel=1e-12)
        assert together.estimate(index).breakdown_s == pytest.approx(alone.estimate(0).breakdown_s, rel=1e-9)


def test_breakdown_adds_up() -> None:
    got = table(PLANS)
    total = sum(got.breakdown_s.values())

    np.testing.assert_allclose(total, got.step_s, rtol=1e-12)
    assert all((column >= 0).all() for column in got.breakdown_s.values())
    exposed = sum(got.exposed_by_axis_s.values())
    np.testing.assert_allclose(exposed, got.breakdown_s["exposed_communication"], rtol=1e-12)


def test_no_plan_beats_the_datasheet() -> None:
    """Model FLOPs over the dense peak of all GPUs is a floor under any step."""
    model = load_model("llama3-8b")
    floor = 3 * model.forward_flops_per_token(4096) * WORKLOAD.tokens_per_step / (16 * 989e12)

    got = table(PLANS)
    assert (got.step_s > floor).all()
    assert all(0 < got.estimate(i).mfu < 1 for i in range(len(PLANS)))


def test_one_gpu_step_is_the_sum_of_its_kernels() -> None:
    """No communication, no bubble, no recomputation on a single GPU."""
    one = Workload(seq_len=4096, global_batch_size=1)
    estimate = table([Plan()], machine=cluster("dgx-h100", gpus=1), model="llama3.2-1b", workload=one).estimate(0)

    for term in ("exposed_communication", "bubble", "recompute", "contention", "copies"):
        assert estimate.breakdown_s[term] == 0


def test_full_recomputation_costs_about_a_forward_pass_and_saves_memory() -> None:
    got = table([Plan(dp_shard=16), Plan(dp_shard=16, recompute="full")])
    compute, extra = got.breakdown_s["compute"][0], got.breakdown_s["recompute"][1]

    assert 0.2 < extra / compute < 0.4
    assert got.reserved_bytes[1] < got.reserved_bytes[0]


def test_slower_network_never_helps() -> None:
    """The same plans on nodes with an eighth of the NIC rate take as long or longer."""
    fast = cluster("dgx-h100", gpus=16)
    (group,) = fast.groups
    nics = tuple(replace(nic, bytes_per_s=nic.bytes_per_s / 8) for nic in group.node.nics)
    throttled = replace(fast, groups=(replace(group, node=replace(group.node, nics=nics)),))

    assert (table(PLANS, machine=throttled).step_s >= table(PLANS, machine=fast).step_s - 1e-12).all()


def test_unknown_recompute_word_lists_the_known() -> None:
    with pytest.raises(BadPlan, match="selective-op"):
        table([Plan(dp_shard=16, recompute="everything")])


def test_a_plan_too_large_for_its_cluster_is_refused() -> None:
    with pytest.raises(BadPlan, match="needs 32 GPUs"):
        table([*PLANS, Plan(dp_shard=32)])


def test_synonyms_of_recompute_are_understood() -> None:
    got = table([Plan(dp_shard=16, recompute="per-op selective"), Plan(dp_shard=16, recompute="selective-op")])

    assert got.step_s[0] == got.step_s[1]


def test_estimate_is_deterministic() -> None:
    assert table(PLANS).step_s.tolist() == table(PLANS).step_s.tolist()


def test_ten_thousand_plans_cost_little_memory_each() -> None:
    """Columns, not objects: 10,000 plans in one call."""
    plans = [Plan(dp_shard=16, micro_batch_size=1 + i % 4) for i in range(10_000)]

    assert len(set(table(plans).step_s.tolist())) == 4


def test_a_profile_of_this_gpu_prices_collectives() -> None:
    """Collectives measured ten times slower make communication-bound plans slower; another GPU's profile does not."""
    sizes = [2**k for k in range(10, 31, 2)]
    slow = tuple(
        CollectiveSample(op=op, ranks=8, nodes=1, nbytes=size, time_s=1e-4 + size / 2e10)
        for op in ("all_gather", "reduce_scatter", "all_reduce")
        for size in sizes
    )
    plan, machine = Plan(tp=8, sequence_parallel=True), cluster("dgx-h100")

    def step(gpu: str | None) -> float:
        profile = Profile(machine="test", gpu=gpu, collectives=slow) if gpu else None
        table = estimate_plans(
            Scenario(
                model=load_model("llama3-8b"),
                cluster=machine,
                workload=WORKLOAD,
                runtime=Runtime(name="megatron-lm"),  # whose host does not decide
                calibration=calibrated(profile, machine),
            ),
            [plan],
        )
        return float(table.step_s[0])

    assert step("h100-sxm") > 1.5 * step(None)
    assert step("a100-sxm-80gb") == step(None)


def test_the_end_of_a_step_moves_what_the_optimizer_owns_and_what_gradients_pass_through() -> None:
    """Megatron with a sharded optimizer: 46 bytes of each parameter owned (28 AdamW, 12 clipping, 6 for the 16-bit
    copy) and 16 of each gradient held (4 zeroed, 8 averaged, 4 checked); torchtitan moves 40 of what it owns.
    """
    megatron, early = Runtime(name="megatron-lm"), Runtime(name="megatron-lm", version="2022-05")

    assert update_bytes(megatron, 100.0, 800.0) == 100 * 46 + 800 * 16
    assert update_bytes(early, 100.0, 800.0) == 100 * 46
    assert update_bytes(Runtime(name="torchtitan"), 100.0, 800.0) == 100 * 40
    in_backward = {name: Runtime(name=name, savers=("optimizer_in_backward",)) for name in ("torchtune", "meshwright")}
    assert update_bytes(in_backward["torchtune"], 100.0, 800.0) == 100 * 28, "nothing is clipped"
    assert update_bytes(in_backward["meshwright"], 100.0, 800.0) == 100 * 32, "but ours reads gradients for their norms"
