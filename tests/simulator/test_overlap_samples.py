"""Measured overlap modes in a profile: rates fitted to them cost plans, and a shape that was measured outranks the
rates.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.layer_cost import block_cost
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import overlap_assumed, overlap_of
from simulator.collectives.cost import CollectiveModel
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.engine.simulate import simulate
from simulator.fitting.calibration_fit import calibrated, rate_errors, with_rates
from simulator.fitting.overlap_fit import mean_error
from simulator.fitting.overlap_samples import rates_as_numbers, rates_of, timed_modes
from simulator.kernels.roofline import Roofline
from simulator.lowering.training import lower_training, plan_context
from simulator.overlap.modes import EXECUTED, GATHER, SCATTER, OverlapRates, mode_s
from simulator.runtimes.model_operators import operators_for
from tests.simulator.lowering_plans import shortened
from topology.catalog.clusters import cluster
from topology.profile.profile import Profile, read_profile
from topology.profile.samples import OverlapSample

MACHINE = cluster("h200x4")
ROOFLINE, LINKS = Roofline(gpu=MACHINE.slowest_kind), CollectiveModel(MACHINE)
TRUTH = OverlapRates(
    copy_latency_s=3e-5, product_slowdown=0.3, late_product_slowdown=0.5, fused_ratio=1.1, host_s=1.5e-5
)


def sample(operation: str, rows: int, columns: tuple[int, ...], depth: int, **seconds: float) -> OverlapSample:
    """One shape on four GPUs with parts alone, and times under TRUTH where none are given."""
    bare = OverlapSample(
        operation=operation,
        ranks=4,
        rows=rows,
        columns=columns,
        depth=depth,
        dtype="bfloat16",
        seconds=dict.fromkeys(EXECUTED, 1.0),
        product_s=2.0 * rows * sum(columns) * depth / 700e12 + 5e-6,
        collective_s=2.0 * rows * (depth if operation == GATHER else columns[0]) / 350e9 + 2e-5,
    )
    parts = timed_modes([bare], ROOFLINE, LINKS)[0][1].parts
    taken = {mode: float(mode_s(mode, operation, parts, TRUTH)) for mode in EXECUTED}
    return replace(bare, seconds=taken | seconds)


def profile(*samples: OverlapSample, gpu: str = "h200-sxm") -> Profile:
    return Profile(machine="m", gpu=gpu, overlap=samples)


MANY = [
    sample(operation, rows, columns, depth)
    for rows in (2048, 8192, 16384)
    for operation, columns, depth in (
        (GATHER, (3584, 3584), 4096),
        (GATHER, (1024, 256, 256), 4096),
        (SCATTER, (4096,), 3584),
        (SCATTER, (8192,), 7168),
    )
]


def test_rates_are_fitted_to_samples_and_kept_as_numbers() -> None:
    """Times that other rates made are predicted within 2 %, and the profile's numbers read back as the same rates."""
    fitted = with_rates(profile(*MANY), MACHINE)
    rates = rates_of(fitted.overlap_rates)
    timed = [one for _, one in timed_modes(MANY, ROOFLINE, LINKS)]

    assert mean_error(timed, rates) < 0.02 < mean_error(timed, OverlapRates())
    assert rates_as_numbers(rates) == fitted.overlap_rates
    assert rate_errors(fitted, MACHINE)["all"] == (pytest.approx(mean_error(timed, rates)), len(timed))
    assert overlap_of(calibrated(fitted, MACHINE)).source == "fitted"


def test_without_samples_or_on_another_gpu_the_defaults_hold() -> None:
    for given in (None, profile(), profile(*MANY, gpu="a100-sxm-80gb")):
        known = calibrated(given, MACHINE)
        found = overlap_of(known)

        assert (found.rates, found.measured, found.source) == (OverlapRates(), {}, "assumed")
        assert "as measured on H200s" in overlap_assumed(["mlp_in=fused"], known)[0]
        assert overlap_assumed(["async"], known) == overlap_assumed(["none"], known) == ()
    assert overlap_assumed(["fused"], calibrated(profile(*MANY), MACHINE)) == ()
    assert with_rates(profile(), MACHINE) == profile()


def test_throttled_samples_say_nothing() -> None:
    bad = [replace(one, invalid="hot") for one in MANY]

    assert timed_modes(bad, ROOFLINE, LINKS) == []
    assert overlap_of(calibrated(replace(profile(*MANY[:1], *bad), overlap_rates={"host_s": 2e-5}), MACHINE)).measured


def exposed(given: Profile | None, mode: str) -> float:
    """Exposed seconds of the forward pass of a layer of llama3-8b with `mode` before the feed-forward alone."""
    model, runtime = shortened("llama3-8b", 1), Runtime(name="pytorch")
    plan = Plan(tp=4, sequence_parallel=True, tp_overlap=f"mlp_in={mode}")
    context = plan_context(
        Scenario(
            model=model,
            cluster=MACHINE,
            workload=Workload(seq_len=8192, global_batch_size=1),
            runtime=runtime,
            calibration=calibrated(given, MACHINE),
        ),
        plan,
    )
    return float(block_cost(operators_for(model, runtime).dense_layer, context).forward.device_s[0])


def test_a_shape_that_was_measured_outranks_the_rates() -> None:
    """8192 tokens, gate and up of 3584 columns on each of 4 ranks: whatever was measured moves the layer by as much."""
    rates = rates_as_numbers(OverlapRates())
    slow, slower = (
        replace(profile(sample(GATHER, 8192, (3584, 3584), 4096, fused=s)), overlap_rates=rates) for s in (2e-3, 3e-3)
    )
    other = replace(profile(sample(GATHER, 8192, (3584,), 4096, fused=3e-3)), overlap_rates=rates)

    assert exposed(slower, "fused") - exposed(slow, "fused") == pytest.approx(1e-3)
    assert exposed(slow, "chunked") == exposed(slower, "chunked")
    assert exposed(other, "fused") == pytest.approx(exposed(None, "fused"))


def test_a_time_that_the_host_made_says_nothing_of_the_device() -> None:
    one = sample(GATHER, 8192, (3584, 3584), 4096, fused=1e-3)
    bound = replace(one, host_s={"fused": 0.95e-3})
    rates = rates_as_numbers(OverlapRates())

    measured = [
        overlap_of(calibrated(replace(profile(given), overlap_rates=rates), MACHINE)).measured for given in (one, bound)
    ]
    assert [any(key[1] == "fused" for key in found) for found in measured] == [True, False]


def test_both_forms_use_the_profile() -> None:
    """Slow links of a profile make a step longer in the analytical model and in the simulation, and alike."""
    model, workload, runtime = shortened("llama3-8b", 2), Workload(seq_len=8192, global_batch_size=1), Runtime()
    plan = Plan(tp=4, sequence_parallel=True, tp_overlap="fused")
    slow = replace(profile(*MANY), overlap_rates=rates_as_numbers(OverlapRates(copy_latency_s=5e-3)))
    times = []
    for given in (None, slow):
        formula = estimate_plans(
            Scenario(
                model=model, cluster=MACHINE, workload=workload, runtime=runtime, calibration=calibrated(given, MACHINE)
            ),
            [plan],
        ).step_s[0]
        lowered = lower_training(
            Scenario(
                model=model, cluster=MACHINE, workload=workload, runtime=runtime, calibration=calibrated(given, MACHINE)
            ),
            plan,
        )
        times.append((formula, simulate(lowered.program, lowered.costs).step_s))

    (plain, simulated), (slower, simulated_slower) = times
    assert slower > plain * 1.05
    assert slower - plain == pytest.approx(simulated_slower - simulated, rel=0.05)


def test_what_the_shipped_profile_says_of_four_h200() -> None:
    """Rates come from its own samples, within the error that is published for them."""
    shipped = read_profile(Path(__file__).parents[2] / "examples" / "profiles" / "h200x4.json")
    errors = rate_errors(shipped, MACHINE)

    assert errors["all"][1] > 250
    assert errors["all"][0] < 0.065
    assert errors["copy_engine"][0] < 0.06
    assert errors["fused"][0] < 0.06
    assert np.isfinite(list(shipped.overlap_rates.values())).all()


def test_a_profile_of_four_gpus_answers_for_one_and_names_of_early_builds_are_read() -> None:
    """One GPU has no links to fit rates on, and nothing to overlap with."""
    single = cluster("h200x4", gpus=1)

    assert overlap_of(calibrated(profile(*MANY), single)) == overlap_of(None)
    assert rates_of({"behind_beside": 0.5, "signal_s": 1e-6}) == OverlapRates(early_product_slowdown=0.5, signal_s=1e-6)
