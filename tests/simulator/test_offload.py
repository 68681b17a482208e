"""State in host memory: the bytes that leave the GPU, what moves over PCIe, and what the CPU takes to update it."""

from __future__ import annotations

import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.lowering.simulation import simulate_plan
from simulator.runtimes.stated import resolve
from simulator.step.offload import HOST_SHARE
from simulator.step.update import ADAM_BYTES, CLIP_BYTES
from topology.catalog.clusters import cluster
from topology.cluster import COPY_SHARE
from topology.rates.host import SOCKET_BYTES_PER_S, host_rates

# Ren et al., ZeRO-Offload, arXiv 2101.06840, table 4: seconds of DeepSpeed's Adam on two Xeon Platinum 8168 by billions
# of parameters.
CPU_ADAM_S = {1: 0.22, 2: 0.51, 4: 1.03, 8: 2.41, 10: 2.57}


def scenario(runtime: str, *, batch: int = 8, machine: str = "dgx-h100", gpus: int = 8) -> Scenario:
    return Scenario(
        model=load_model("llama3-8b"),
        cluster=cluster(machine, gpus),
        workload=Workload(seq_len=4096, global_batch_size=batch),
        runtime=resolve({"name": runtime})[0],
    )


@pytest.mark.parametrize("billions", CPU_ADAM_S)
def test_adam_on_the_cpu_takes_what_was_published(billions):
    seconds = billions * 1e9 * ADAM_BYTES / (HOST_SHARE * 2 * SOCKET_BYTES_PER_S["gen3"])

    assert seconds == pytest.approx(CPU_ADAM_S[billions], rel=0.2)


def test_gpus_share_the_memory_of_their_host_and_the_slot_of_their_switch():
    """DGX A100 has a PCIe 4 switch for every two GPUs; DGX H100 one of PCIe 5 for each."""
    shared, own = host_rates(cluster("dgx-a100"), 8), host_rates(cluster("dgx-h100"), 8)

    assert shared.copy_bytes_per_s == pytest.approx(COPY_SHARE * 31.5e9 / 2, rel=0.01)
    assert own.copy_bytes_per_s == pytest.approx(COPY_SHARE * 63e9, rel=0.01)
    assert own.memory_bytes_per_s == pytest.approx(2 * 8 * 38.4e9 / 8)
    assert host_rates(cluster("dgx-h100"), 1).memory_bytes_per_s == pytest.approx(8 * own.memory_bytes_per_s)
    assert host_rates(cluster("gb200-nvl72"), 72).copy_bytes_per_s > 3 * own.copy_bytes_per_s


@pytest.mark.parametrize(
    ("runtime", "plan", "gone"),
    [
        # Parameters, gradients and two moments of 1/8 of the network, all in float32.
        ("torchtitan", Plan(dp_shard=8, recompute="full", offload="parameters"), 4 + 4 + 8),
        # Two moments and the float32 copy; gradients with them, of 16 bits on the GPU and of 32 where the CPU uses
        # them.
        ("deepspeed", Plan(dp_replicate=8, zero_stage=2, recompute="full", offload="optimizer"), 12 + 4),
        ("megatron-lm", Plan(dp_replicate=8, zero_stage=1, recompute="full", offload="optimizer"), 12),
    ],
)
def test_what_leaves_the_gpu_is_what_the_host_holds(runtime, plan, gone):
    asked = scenario(runtime)
    table = estimate_plans(asked, [plan, plan.with_(offload="none")])
    away, here = table.estimate(0).memory, table.estimate(1).memory

    assert away.host_bytes == pytest.approx(gone * asked.model.parameters / 8, rel=1e-3)
    assert here.host_bytes == 0
    state = [sum(one.by_category[name] for name in ("parameters", "gradients", "optimizer")) for one in (here, away)]
    narrower = 2 if runtime == "deepspeed" else 0
    assert state[0] - state[1] == pytest.approx(away.host_bytes * (gone - narrower) / gone)


def test_one_step_pays_for_the_update_and_for_what_moves():
    """One micro batch in Megatron-LM: float32 gradients down, the update, bf16 parameters back, one after the other."""
    asked, plan = scenario("megatron-lm"), Plan(dp_replicate=8, zero_stage=1, recompute="full", offload="optimizer")
    away, here = (simulate_plan(asked, one).estimate for one in (plan, plan.with_(offload="none")))
    rates, owned = host_rates(asked.cluster, 8), asked.model.parameters / 8
    moved = owned * (4 + 2) / rates.copy_bytes_per_s
    updated = owned * (ADAM_BYTES + CLIP_BYTES + 6) / (HOST_SHARE * rates.memory_bytes_per_s)

    saved = here.breakdown_s["optimizer"] - away.breakdown_s["optimizer"]  # what the GPU does itself remains

    assert away.step_s.value - here.step_s.value + saved == pytest.approx(moved + updated, rel=0.01)


PLANS = [
    ("torchtitan", Plan(dp_shard=8, offload="parameters", recompute="full")),
    ("torchtitan", Plan(dp_replicate=2, dp_shard=4, offload="parameters", recompute="full", micro_batch_size=4)),
    ("torchtitan", Plan(dp_shard=4, pp=2, offload="parameters", schedule="1F1B", recompute="full")),
    ("pytorch", Plan(offload="parameters", recompute="full")),
    ("deepspeed", Plan(dp_replicate=8, zero_stage=3, offload="parameters", recompute="full")),
    ("deepspeed", Plan(dp_replicate=8, zero_stage=1, offload="optimizer", recompute="full")),
    ("megatron-lm", Plan(dp_replicate=4, pp=2, zero_stage=1, offload="optimizer", schedule="1F1B", recompute="full")),
]


@pytest.mark.parametrize(("runtime", "plan"), PLANS)
def test_account_and_simulation_agree(runtime, plan):
    asked = scenario(runtime, batch=64, gpus=plan.gpus)
    counted = estimate_plans(asked, [plan])
    simulated = simulate_plan(asked, plan).estimate

    assert counted.step_s[0] == pytest.approx(simulated.step_s.value, rel=0.03)
    assert counted.peak_bytes[0] == pytest.approx(simulated.memory.peak_bytes.value, rel=0.01)


def test_gradients_of_further_micro_batches_are_added_up_by_the_cpu():
    plan = Plan(dp_shard=8, offload="parameters", recompute="full")
    seconds = [simulate_plan(scenario("torchtitan", batch=8 * count), plan).estimate.step_s.value for count in (2, 3)]
    asked = scenario("torchtitan")
    added = 3 * 4 * asked.model.parameters / 8 / (HOST_SHARE * host_rates(asked.cluster, 8).memory_bytes_per_s)

    assert seconds[1] - seconds[0] > added
