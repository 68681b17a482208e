"""Layers on stages and micro batches in flight, against the papers' formulas and a replay of the schedule."""

import pytest

from simulator.columns.plan_table import plan_table
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.pipeline.stages import in_flight, rank_of_stage, stage_layers, stage_layout
from simulator.runtimes.library import runtime_spec
from simulator.runtimes.model_operators import operators_for

TITAN = runtime_spec("torchtitan").pipeline
MEGATRON = runtime_spec("megatron-lm").pipeline


@pytest.mark.parametrize(
    ("layers", "plan", "expected"),
    [
        # torchtitan 0.2.2, generate_llm_fqn_per_model_part: embedding and head count one layer each
        (32, Plan(pp=2), (16, 16)),
        (32, Plan(pp=4), (8, 9, 8, 7)),
        (126, Plan(pp=16), (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)),
        (16, Plan(pp=2, virtual_stages=2), (4, 5, 4, 3)),
        (32, Plan(pp=2, layers_per_stage=(20, 12)), (20, 12)),
    ],
)
def test_torchtitan_splits_layers_with_the_ends_counted(layers: int, plan: Plan, expected: tuple[int, ...]) -> None:
    assert stage_layers(layers, plan, TITAN) == expected
    assert sum(expected) == layers


def test_megatron_splits_layers_evenly() -> None:
    assert stage_layers(96, Plan(pp=8, virtual_stages=3), MEGATRON) == (4,) * 24


def test_nanotron_fills_stages_by_their_share_of_products() -> None:
    """Llama 3 8B on 8 stages, as nanotron's own code divides it (printed in its documentation of pipelines)."""
    spec = operators_for(load_model("llama3-8b"), Runtime(name="nanotron")).spec.pipeline

    assert stage_layers(32, Plan(pp=8), spec) == (5, 4, 4, 5, 4, 4, 4, 2)


def test_folding_schedules_place_stages_in_a_v() -> None:
    assert [rank_of_stage(s, 4, "ZBVZeroBubble") for s in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [rank_of_stage(s, 4, "Interleaved1F1B") for s in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_leading_dense_layers_stay_on_the_first_stage() -> None:
    """DeepSeek-V3: three dense layers, then 58 of experts."""
    table = plan_table([Plan(pp=4, dp_shard=1)], Workload(seq_len=128, global_batch_size=4))
    layout = stage_layout(load_model("deepseek-v3"), table, TITAN)

    assert layout.dense[0].tolist() == [3, 0, 0, 0]
    assert layout.moe[0].sum() == 58


def replay_1f1b(pp: int, m: int, rank: int) -> int:
    """Most micro batches between forward and backward when rank runs 1F1B: warm-up, then one each, then drain."""
    warm_up = min(pp - rank - 1, m)
    held = most = warm_up
    for _ in range(m - warm_up):
        held += 1
        most = max(most, held)
        held -= 1
    return most


@pytest.mark.parametrize(("pp", "m"), [(2, 1), (4, 2), (4, 8), (8, 16)])
def test_1f1b_holds_what_a_replay_holds(pp: int, m: int) -> None:
    table = plan_table([Plan(pp=pp, schedule="1F1B")], Workload(seq_len=8, global_batch_size=m))

    assert in_flight(table)[0].tolist() == [replay_1f1b(pp, m, r) for r in range(pp)]


def test_interleaving_holds_more_on_the_first_rank() -> None:
    """Korthikanti et al., section 4.2.3: L (1 + (p - 1) / (p m)) layers' activations on the first rank."""
    table = plan_table(
        [Plan(pp=8, virtual_stages=3, schedule="Interleaved1F1B")], Workload(seq_len=8, global_batch_size=64)
    )
    layers_per_rank = 96 / 8

    assert in_flight(table)[0, 0] * layers_per_rank == pytest.approx(96 * (1 + 7 / (8 * 3)))
