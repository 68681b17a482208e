"""Samples of steps give back the ratios and host times that they were made with, and estimates use them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.config.hf_config import load_model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.fit_steps import fit_serving
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.measured import LaunchTime, MeasuredServing, MeasuredSteps, Ratio
from topology import codec
from topology.catalog.cluster_file import load_cluster
from topology.profile.profile import CollectiveSample
from topology.profile.samples import ServingSample

MODEL, CLUSTER, ENGINE = load_model("llama3-8b"), load_cluster("h200x4"), "meshwright"
TRUE = MeasuredSteps(
    tp=2,
    by_answers=(LaunchTime(1, 1.2e-6), LaunchTime(16, 2e-6), LaunchTime(64, -0.5e-6)),
    by_tokens=(Ratio(2048, 0.95), Ratio(8192, 0.95)),
    reduced=(Ratio(1, 2.0), Ratio(64, 1.5)),
    cached_ratio=1.4,
    pair_ratio=0.8,
    host_step_s=2e-4,
    host_sequence_s=3e-6,
    host_launch_s=2e-5,
)


def _costs(measured: MeasuredServing | None, tp: int = 2) -> ForwardPass:
    return ForwardPass(MODEL, CLUSTER, Deployment(engine=ENGINE, pool=Pool(tp=tp), measured=measured), Pool(tp=tp))


def _sample(costs: ForwardPass, phase: str, batch: int, context: int = 0) -> ServingSample:
    """Return what a machine with exactly these costs would measure."""
    if phase == "all_reduce":
        seconds = costs.reduced_s(batch) / costs.reductions()
        return ServingSample(
            engine=ENGINE,
            phase=phase,
            model=codec.to_builtins(MODEL),
            tp=2,
            batch=batch,
            all_reduce="own",
            seconds=seconds,
        )
    if phase == "decode":
        seconds = costs.seconds(prompt_tokens=0, pairs=0.0, sequences=batch, keys=float(batch * context))
    else:
        pairs = batch * context * (context + 1) / 2
        seconds = costs.seconds(prompt_tokens=batch * context, pairs=pairs, sequences=0, keys=0.0, readers=batch)
    host = costs.engine.host_step_s + (batch * costs.engine.host_sequence_s if phase == "decode" else 0.0)
    return ServingSample(
        engine=ENGINE,
        phase=phase,
        model=codec.to_builtins(MODEL),
        tp=2,
        batch=batch,
        context=context,
        all_reduce="own",
        seconds=seconds,
        queued_s=seconds - host,
        issued_s=costs.launches.count * costs.engine.host_launch_s,
    )


def _samples() -> list[ServingSample]:
    costs = _costs(MeasuredServing(steps=(TRUE,)))
    decoded = [_sample(costs, "decode", batch, context) for batch in (1, 16, 64) for context in (512, 4096, 16384)]
    read = [_sample(costs, "prefill", 1, tokens) for tokens in (2048, 8192)]
    return [*decoded, *read, *(_sample(costs, "all_reduce", tokens) for tokens in (1, 64))]


def test_ratios_and_host_times_are_found_again() -> None:
    found = fit_serving(_samples(), (), CLUSTER, ENGINE)

    assert found is not None
    (steps,) = found.steps
    assert [one.tokens for one in steps.by_answers] == [1, 16, 64]
    assert [one.late_s for one in steps.by_answers] == pytest.approx([1.2e-6, 2e-6, -0.5e-6], rel=5e-3)
    assert [one.tokens for one in steps.by_tokens] == [2048, 8192]
    assert [one.ratio for one in steps.by_tokens] == pytest.approx([0.95, 0.95], rel=5e-3)
    assert steps.pair_ratio == pytest.approx(0.8, rel=0.02)  # the head's one row takes another ratio
    assert [one.ratio for one in steps.reduced] == pytest.approx([2.0, 1.5])
    assert steps.cached_ratio == pytest.approx(1.4, rel=1e-3)
    times = (steps.host_step_s, steps.host_sequence_s, steps.host_launch_s)
    assert times == pytest.approx((TRUE.host_step_s, TRUE.host_sequence_s, TRUE.host_launch_s), rel=1e-3)


def test_steps_between_and_beyond_the_samples_cost_what_they_did() -> None:
    made, fitted = _costs(MeasuredServing(steps=(TRUE,))), _costs(fit_serving(_samples(), (), CLUSTER, ENGINE))
    for step in (
        {"prompt_tokens": 0, "pairs": 0.0, "sequences": 32, "keys": 32 * 2000.0},
        {"prompt_tokens": 0, "pairs": 0.0, "sequences": 1, "keys": 60000.0},
        {"prompt_tokens": 4096, "pairs": 4096 * 2048.5, "sequences": 0, "keys": 0.0},
    ):
        assert fitted.seconds(**step) == pytest.approx(made.seconds(**step), rel=0.05)


def test_a_step_that_was_issued_as_long_as_it_took_says_nothing_of_kernels() -> None:
    slow = replace(_samples()[-3], context=512, queued_s=0.018, seconds=0.018, issued_s=0.0175)
    with_it, without = (fit_serving(samples, (), CLUSTER, ENGINE) for samples in ([*_samples(), slow], _samples()))
    assert with_it is not None
    assert without is not None
    assert with_it.steps[0].by_tokens == without.steps[0].by_tokens


def test_samples_of_another_engine_change_nothing_and_nccls_times_any_engine() -> None:
    assert fit_serving(_samples(), (), CLUSTER, "vllm") is None
    slow = CollectiveSample(op="all_reduce", ranks=2, nodes=1, nbytes=8192, time_s=5e-4, launch="graph")
    found = fit_serving((), [slow], CLUSTER, "torch")
    assert found is not None
    pool = Pool(tp=2)
    plain, measured = (
        ForwardPass(MODEL, CLUSTER, Deployment(engine="torch", pool=pool, measured=known), pool)
        for known in (None, found)
    )
    assert measured.reduced_s(1) == pytest.approx(64 * 5e-4, rel=0.05)
    assert plain.reduced_s(1) < measured.reduced_s(1) / 5


def test_what_a_kernel_takes_longer_is_the_same_in_a_larger_model() -> None:
    """Its launch and its first reads do not grow with its operands, as a ratio of the small model's steps would have
    them.
    """
    large = load_model("llama3-70b")
    pool, measured = Pool(tp=2), fit_serving(_samples(), (), CLUSTER, ENGINE)
    assert measured is not None
    steps = tuple(replace(one, reduced=(), host_step_s=0.0, host_sequence_s=0.0) for one in measured.steps)
    plain, fitted = (
        ForwardPass(large, CLUSTER, Deployment(engine=ENGINE, pool=pool, measured=known), pool)
        for known in (None, replace(measured, steps=steps))
    )
    step = {"prompt_tokens": 0, "pairs": 0.0, "sequences": 1, "keys": 1.0}
    assert fitted.seconds(**step) - plain.seconds(**step) == pytest.approx(1.2e-6 * plain.launches.count, rel=0.01)
