"""Overlap modes compute what plain products compute, forward and backward, on gloo processes; the rest is refused."""

import json
from pathlib import Path

import pytest

from tests.executor.forked_ranks import run_module
from topology.errors import BadPlan

pytest.importorskip("torch", reason="torch is not installed: nothing can be multiplied")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_mode_is_right(tmp_path: Path, ranks: int) -> None:
    """In float64, so that a mistake cannot hide in rounding; with one weight and with two in one gather."""
    out = tmp_path / "verdicts.jsonl"
    run_module("tests.executor.workers.overlap_worker", [str(out)], ranks)

    verdicts = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(verdicts) == 3 * 4 * 2  # operations, modes, shapes
    assert [verdict for verdict in verdicts if not verdict["ok"]] == []


@pytest.mark.parametrize("name", ["multimem", "multimem_one_shot", "multimem_two_shot", "nvls"])
def test_multicast_is_refused_and_said_why(name: str) -> None:
    from executor.overlap import mode_named

    with pytest.raises(BadPlan, match=name) as caught:
        mode_named(name)
    assert "NVLink multicast" in caught.value.why
    assert "fused" in caught.value.remedy


def test_an_unknown_mode_is_told_what_there_is() -> None:
    from executor.overlap import MODES, mode_named

    with pytest.raises(BadPlan) as caught:
        mode_named("fast")
    assert all(mode in caught.value.remedy for mode in MODES)


@pytest.mark.parametrize(
    "tp_overlap", ["none", "fused", "attention_in=chunked,attention_out=none,mlp_in=fused,mlp_out=chunked"]
)
def test_a_plan_is_dispatched_by_site_and_read_back(tp_overlap: str) -> None:
    from executor.model.decoder import Block
    from executor.parallel.tensor_overlap import applied_overlap, overlap_block
    from simulator.config.overlap_sites import written
    from tests.executor.workers.verify_worker import MODELS

    blocks = [Block(MODELS["qk_norm"], index) for index in range(2)]
    for block in blocks:
        overlap_block(block, tp_overlap, None)

    assert written(applied_overlap(blocks)) == tp_overlap


def test_the_planner_models_what_the_executor_runs() -> None:
    from executor.overlap import MODES
    from simulator.overlap.modes import EXECUTED

    assert tuple(MODES) == EXECUTED


def test_what_a_plan_overlaps_is_checked_in_its_own_sizes() -> None:
    from executor.verify.overlap import Shape, planned
    from simulator.config.hf_config import load_model
    from simulator.config.plan import Plan
    from simulator.config.workload import Workload

    llama, workload = load_model("llama3-8b"), Workload(seq_len=2048, global_batch_size=4)
    plan = Plan(tp=2, sequence_parallel=True, tp_overlap="attention_in=fused,mlp_in=fused,mlp_out=copy_engine")

    assert planned(plan, llama, workload) == (
        ("all_gather_matmul", "fused", Shape(rows=2048, depth=4096, columns=2048, weights=2)),
        ("all_gather_matmul", "fused", Shape(rows=2048, depth=4096, columns=7168, weights=2)),
        ("matmul_reduce_scatter", "copy_engine", Shape(rows=2048, depth=7168, columns=4096)),
    )
    assert planned(plan.with_(tp_overlap="none"), llama, workload) == ()
    # Sparse layers have no dense feed-forward; latent attention compresses before it multiplies.
    whole = plan.with_(tp_overlap="fused")
    assert [len(planned(whole, load_model(name), workload)) for name in ("mixtral-8x7b", "deepseek-v3")] == [2, 3]


def test_the_check_in_float64_says_which_kernels_it_does_not_run() -> None:
    from executor.verify.compute_types import differences
    from simulator.config.hf_config import load_model
    from simulator.config.plan import Plan
    from simulator.config.runtime import Runtime

    model = load_model("llama3-8b")

    def said(tp_overlap: str, **types: str) -> list[str]:
        plan = Plan(tp=2, sequence_parallel=True, tp_overlap=tp_overlap)
        return [line for line in differences(plan, model, model, Runtime(**types)) if "half precision" in line]

    assert len(said("attention_in=fused,mlp_out=chunked")) == 1
    assert said("fused", compute_dtype="float64", param_dtype="float64") == []
    assert [said(mode) for mode in ("none", "chunked", "copy_engine")] == [[]] * 3
