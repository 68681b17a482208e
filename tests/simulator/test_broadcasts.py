"""Updated parameters of a sharded optimizer that owns whole tensors: a broadcast for each owner, one after the other,
as InternEvo has it (solver/optimizer/hybrid_zero_optim.py: broadcast_params).
"""

from __future__ import annotations

import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.collectives.cost import CollectiveModel
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.lowering.simulation import simulate_plan
from simulator.lowering.training import lower_training
from simulator.program.program import Collective
from simulator.runtimes.stated import resolve
from topology.catalog.clusters import cluster
from topology.rates.groups import group_shape

LAYER_TENSORS = 1 + 1 + 3 + 2  # qkv in one product; the output of attention; gate, up and down; two norms
TENSORS = 32 * LAYER_TENSORS + 3  # of Llama 2 7B: embedding, last norm and head besides


def scenario(gpus: int, *, runtime: str = "internevo") -> Scenario:
    return Scenario(
        model=load_model("llama2-7b"),
        cluster=cluster("dgx-a100", gpus),
        workload=Workload(seq_len=2048, global_batch_size=gpus),
        runtime=resolve({"name": runtime})[0],
    )


def sent(asked: Scenario, plan: Plan, op: str) -> list[Collective]:
    code = lower_training(asked, plan).program.codes[0]
    return [one for one in code.instructions if isinstance(one, Collective) and one.op == op]


@pytest.mark.parametrize(("ranks", "owners"), [(16, 16), (512, TENSORS)])
def test_every_rank_that_owns_tensors_broadcasts_them(ranks, owners):
    asked = scenario(ranks)
    broadcasts = sent(asked, Plan(dp_replicate=ranks, zero_stage=1), "broadcast")

    assert len(broadcasts) == owners
    assert sum(one.nbytes for one in broadcasts) == pytest.approx(2 * asked.model.parameters, rel=1e-4)


def test_many_ranks_wait_for_as_many_rings():
    """A ring's latency grows with its ranks and is paid for each tensor; a gather pays it once."""
    steps = {ranks: estimate_plans(scenario(ranks), [Plan(dp_replicate=ranks, zero_stage=1)]) for ranks in (256, 1024)}
    nbytes = 2 * scenario(256).model.parameters / TENSORS
    once = {}
    for ranks in steps:
        shape = group_shape(size=ranks, stride=1, gpus_per_node=8, world=ranks)
        once[ranks] = float(CollectiveModel(cluster("dgx-a100", ranks)).time_s("broadcast", nbytes, shape))

    longer = steps[1024].step_s[0] - steps[256].step_s[0]
    assert longer == pytest.approx(TENSORS * (once[1024] - once[256]), rel=0.1)


@pytest.mark.parametrize("runtime", ["internevo", "megatron-lm"])
def test_parameters_stay_within_the_ranks_that_share_an_optimizer(runtime):
    op = "broadcast" if runtime == "internevo" else "all_gather"
    plan = Plan(dp_shard=8, dp_replicate=2, zero_stage=1)

    assert {one.group for one in sent(scenario(16, runtime=runtime), plan, op)} == {"fsdp"}


@pytest.mark.parametrize("plan", [Plan(dp_replicate=16, zero_stage=1), Plan(dp_shard=8, dp_replicate=2, zero_stage=1)])
def test_account_and_simulation_agree(plan):
    asked = scenario(16)
    simulated = simulate_plan(asked, plan).estimate

    assert estimate_plans(asked, [plan]).step_s[0] == pytest.approx(simulated.step_s.value, rel=0.03)
