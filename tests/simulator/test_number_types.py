"""What number types change in a step: which casts run, which kernels, how long the update takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.kernels.operators import Work, WorkKind
from simulator.kernels.roofline import Roofline
from simulator.legality.frameworks import FRAMEWORKS
from simulator.legality.rule import RuleFacts
from simulator.legality.rules import is_legal, problems
from simulator.runtimes.model_operators import operators_for
from topology.catalog.cluster_file import load_cluster
from topology.catalog.gpus import gpu_kind

PROFILES = Path(__file__).parents[2] / "examples" / "profiles"
MODEL = Model(
    name="small", family="llama", layers=4, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=5632, vocab=32000
)


@pytest.mark.parametrize(
    ("stored", "computed", "casts"),
    [("float32", "bfloat16", True), ("bfloat16", "bfloat16", False), ("float32", "float32", False)],
)
def test_autocast_casts_only_where_products_are_narrower_than_parameters(stored, computed, casts) -> None:
    """torch.autocast casts the operands of a product to its type; operands that have it already are left alone."""
    operators = operators_for(MODEL, Runtime(name="torchtitan", param_dtype=stored, compute_dtype=computed))

    assert any(o.name.startswith("cast_") for o in operators.dense_layer) == casts


def saved_bytes(runtime: str, seq_len: int) -> float:
    scenario = Scenario(
        model=MODEL,
        cluster=load_cluster("h200x4"),
        workload=Workload(seq_len=seq_len, global_batch_size=1),
        runtime=Runtime(name=runtime, param_dtype="float32", compute_dtype="float32"),
    )
    return estimate_plans(scenario, [Plan()]).estimate(0).memory.by_category["activations"]


def test_fused_attention_in_float32_keeps_no_scores() -> None:
    """Torch's memory-efficient kernel keeps what is linear in the sequence; torchtitan 0.2.2 does not ask for it, and
    keeps scores, which are quadratic: kernels of both were seen on H200s (examples/validation/fresh.jsonl, 3/15 and
    3/16).
    """
    assert saved_bytes("meshwright", 8192) == pytest.approx(2 * saved_bytes("meshwright", 4096), rel=1e-6)
    assert saved_bytes("torchtitan", 8192) > 3 * saved_bytes("torchtitan", 4096)


def test_products_in_float32_stay_below_the_rate_without_tensor_cores() -> None:
    """A large one comes near it; 44 TFLOP/s of 66.9 were seen on H200 in products of few tiles (fresh.jsonl, 3/16)."""
    size = np.array([8192.0])
    work = Work(kind=WorkKind.MATMUL, name="w", m=size, n=size, k=size, flops=2 * size**3, bytes=12 * size**2)
    kind = gpu_kind("h200-sxm")
    rate = (work.flops / Roofline(gpu=kind, dtype="float32").seconds(work))[0]

    assert 0.7 * kind.peak_flops["float32"] < rate < 0.9 * kind.peak_flops["float32"]


def test_measured_products_of_an_h200_are_described_by_tiles_alone() -> None:
    """170 products measured by themselves scatter by less than 4.5 % around the datasheet model, whatever their
    shape.
    """
    samples = json.loads((PROFILES / "h200x4.json").read_text())["operators"]
    roofline, missed = Roofline(gpu=gpu_kind("h200-sxm")), []
    for s in samples:
        if (s["kind"], s["dtype"], s["regime"]) == ("matmul", "bfloat16", "sustained") and "batch" not in s["shape"]:
            m, n, k = (np.array([float(s["shape"][axis])]) for axis in "mnk")
            work = Work(
                kind=WorkKind.MATMUL, name="w", m=m, n=n, k=k, flops=2 * m * n * k, bytes=2 * (m * k + k * n + m * n)
            )
            missed.append(float(np.log(roofline.seconds(work)[0] / s["seconds"])))

    assert len(missed) > 150
    assert np.std(missed) < 0.045


def test_an_update_in_16_bits_is_shorter_than_in_float32_but_not_half_as_long() -> None:
    """Bytes halve, the arithmetic in float32 stays: 0.0113 ns an element in 16 bits, 0.0133 in float32 on one H200."""
    roofline = Roofline(gpu=gpu_kind("h200-sxm"))
    ratio = roofline.update_bytes_per_s("float32") / roofline.update_bytes_per_s("bfloat16")

    assert 0.5 < ratio <= 1.0


@pytest.mark.parametrize(
    ("compute", "cp", "legal"), [("float32", 2, False), ("float32", 1, True), ("bfloat16", 2, True)]
)
def test_torchtitan_has_no_context_parallelism_in_float32(compute, cp, legal) -> None:
    """It failed when run: "aten.add.Tensor got mixed torch.Tensor and DTensor" (fresh.jsonl, 1/10)."""
    facts = RuleFacts(
        model=MODEL,
        workload=Workload(seq_len=2048, global_batch_size=4),
        framework=FRAMEWORKS["torchtitan"],
        runtime=Runtime(name="torchtitan", param_dtype="float32", compute_dtype=compute),
    )
    assert is_legal(problems(Plan(cp=cp, micro_batch_size=4), facts)) == legal


def test_products_in_tf32_are_quicker_than_in_float32_and_slower_than_in_16_bits() -> None:
    """H200: 494.7 TFLOP/s of TF32 by the datasheet, half of bfloat16's. V100 has none, and multiplies as in float32."""
    m = np.array([8192.0])
    work = Work(name="mm", kind=WorkKind.MATMUL, m=m, n=m, k=m, flops=2 * m**3, bytes=12 * m**2)

    def rate(gpu: str, dtype: str, *, tf32: bool = False) -> float:
        return float((work.flops / Roofline(gpu=gpu_kind(gpu), dtype=dtype, tf32=tf32).seconds(work)).item())

    assert rate("h200-sxm", "float32") < 66.9e12 < rate("h200-sxm", "float32", tf32=True) < 494.7e12
    assert rate("h200-sxm", "float32", tf32=True) < 0.55 * rate("h200-sxm", "bfloat16")
    assert rate("v100-sxm-16gb", "float32", tf32=True) == rate("v100-sxm-16gb", "float32")


def test_tf32_changes_products_alone() -> None:
    """Tensors stay float32, in memory and in messages; kernels that are no products take as long."""
    scenario = Scenario(
        model=MODEL,
        cluster=load_cluster("h200x4"),
        workload=Workload(seq_len=4096, global_batch_size=4),
        runtime=Runtime(name="meshwright", compute_dtype="float32"),
    )
    rounded = replace(scenario, runtime=replace(scenario.runtime, compute_dtype="tf32"))

    exact, quick = (estimate_plans(one, [Plan(dp_shard=4)]) for one in (scenario, rounded))

    assert quick.step_s[0] < 0.6 * exact.step_s[0]
    assert quick.memory.reserved_bytes[0] == exact.memory.reserved_bytes[0]
    assert quick.breakdown_s["optimizer"][0] == pytest.approx(exact.breakdown_s["optimizer"][0])
    assert Runtime(param_dtype="tf32").not_modelled
    assert not Runtime(compute_dtype="tf32").not_modelled
