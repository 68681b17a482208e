"""Curves recover the law that made the samples, and say how far off they are."""

import numpy as np
import pytest

from simulator.calibration.operator_curves import FITTED_TILES, attention_flops
from simulator.fitting.calibration_fit import fit_collective, fit_contention, left_out_errors
from simulator.fitting.kernel_fit import layer_elements, measured_operators
from simulator.fitting.operator_fit import fit_attention, fit_matmul, fit_move, left_out
from simulator.kernels.efficiency import efficiency
from simulator.kernels.roofline import matmul_utilization
from topology.catalog.gpus import gpu_kind
from topology.profile.samples import ContentionSample, OperatorSample

RATE, BANDWIDTH = 700e12, 4.2e12
SIZES = (512, 1024, 2048, 3072, 4096, 8192, 14336)


def product_s(m: float, n: float, k: float) -> float:
    """A GPU of 132 SMs that follows the law exactly."""
    one = [np.array([float(x)]) for x in (m, n, k, 1)]
    used = float(matmul_utilization(FITTED_TILES, *one, sms=132.0, ramp_k=160.0, wave_floor=0.9)[0])
    return max(2.0 * m * n * k / (RATE * used), 2.0 * (m * k + k * n + m * n) / BANDWIDTH) + 3e-6


def product(m: int, n: int, k: int, seconds: float | None = None, direction: str = "forward") -> OperatorSample:
    return OperatorSample(
        kind="matmul",
        name="matmul",
        shape={"m": m, "n": n, "k": k},
        dtype="bfloat16",
        direction=direction,
        seconds=product_s(m, n, k) if seconds is None else seconds,
    )


def products(noise: float = 0.0) -> list[OperatorSample]:
    random = np.random.default_rng(7)
    shapes = [(8192, n, k) for n in SIZES for k in SIZES] + [(2048, n, k) for n in SIZES for k in SIZES]
    return [product(*shape, seconds=product_s(*shape) * float(np.exp(noise * random.normal()))) for shape in shapes]


def fit(samples):
    curve = fit_matmul(samples, sms=132.0, bytes_per_s=BANDWIDTH, element_bytes=2.0)
    assert curve is not None
    return curve


def test_the_law_of_products_is_recovered() -> None:
    curve = fit(products())

    assert curve.flops == pytest.approx(RATE, rel=0.02)
    assert curve.rest["forward"].error < 0.01


@pytest.mark.parametrize("shape", [(4096, 5120, 5120), (16384, 4096, 4096), (8192, 6144, 2560)])
def test_shapes_that_were_not_measured_are_predicted(shape) -> None:
    curve = fit(products(noise=0.03))
    one = [np.array([float(x)]) for x in (*shape, 1)]

    assert float(curve.seconds(*one, "forward")[0]) == pytest.approx(product_s(*shape), rel=0.05)


def test_the_error_of_left_out_samples_is_the_noise_that_was_put_in() -> None:
    # Leaving a sample out, its own noise and a little of its neighbours' remain: mean |N(0, 5%)| is 4 %.
    assert 0.03 < fit(products(noise=0.05)).rest["forward"].error < 0.06


def test_each_memory_layout_has_its_own_correction() -> None:
    slow = [product(s.shape["m"], s.shape["n"], s.shape["k"], 1.2 * s.seconds, "wgrad") for s in products()]
    curve = fit([*products(), *slow])
    one = [np.array([float(x)]) for x in (8192, 4096, 4096, 1)]

    assert float((curve.seconds(*one, "wgrad") / curve.seconds(*one, "forward"))[0]) == pytest.approx(1.2, rel=0.02)


def test_a_sample_far_from_all_others_is_left_to_the_curve() -> None:
    points = np.array([[0.0], [0.1], [30.0]])

    assert left_out(points, np.array([0.5, 0.5, 0.3]))[2] == pytest.approx(-0.3), "nothing near: no correction"


def test_too_few_samples_fit_nothing() -> None:
    assert fit_matmul([product(64, 64, 64)], sms=132.0, bytes_per_s=BANDWIDTH, element_bytes=2.0) is None
    assert fit_attention([]) is None
    assert fit_move([], [], []) is None


def test_attention_over_unseen_lengths_and_heads() -> None:
    def seconds(heads: int, length: int) -> float:
        shape = {"b": 1, "a": heads, "s": length, "S": length, "d": 128}
        return attention_flops(shape, "forward") * (1 + 400 / length) / 600e12 + 5e-6

    samples = [
        OperatorSample(
            kind="attention",
            name="attention",
            shape={"b": 1, "a": heads, "kv": 8, "s": length, "S": length, "d": 128},
            dtype="bfloat16",
            seconds=seconds(heads, length),
        )
        for heads in (8, 16, 32)
        for length in (1024, 2048, 4096, 8192, 32768)
    ]
    curve = fit_attention(samples)
    assert curve is not None
    flops = attention_flops({"b": 1, "a": 24, "s": 16384, "S": 16384, "d": 128}, "forward")
    values = [np.array([float(x)]) for x in (flops, 16384, 16384, 24)]

    assert float(curve.seconds(*values)[0]) == pytest.approx(seconds(24, 16384), rel=0.02)
    assert attention_flops({"b": 1, "a": 1, "s": 2, "S": 2, "d": 1}, "forward") == 4 * 2 * 1.5, (
        "half the square, causal"
    )


def test_kernels_that_move_memory_keep_their_ratio_between_sizes() -> None:
    sizes = [2.0**power for power in range(20, 31, 2)]
    curve = fit_move(sizes, [size / 4e12 for size in sizes], [1.5 * size / 4e12 for size in sizes])

    assert curve is not None
    assert curve.ratio(np.array([2.0**25, 2.0**40])) == pytest.approx([1.5, 1.5])
    assert curve.error == pytest.approx(0.0, abs=1e-9)


def test_an_update_counts_by_its_steady_samples_without_their_small_kernels() -> None:
    """AdamW and clipping of two layers, at 8.1 and 3.55 ps a parameter; something disturbed two calls of the larger
    one.
    """
    shapes = ({"h": 2048, "q": 2048, "kv": 512, "f": 8192}, {"h": 4096, "q": 4096, "kv": 1024, "f": 14336})
    kind = gpu_kind("h200-sxm")
    small_s = efficiency(kind.architecture).kernel_s
    samples = [
        OperatorSample(
            kind="move",
            name=name,
            shape={**shape, "ranks": 1},
            dtype="float32",
            direction="forward",
            seconds=(each_s * layer_elements(shape) + kernels * small_s) * (1.35 if shape["h"] == 4096 else 1.0),
            spread=0.31 if shape["h"] == 4096 else 0.01,
        )
        for name, each_s, kernels in (("adamw", 8.1e-12, 1), ("clip", 3.55e-12, 7))
        for shape in shapes
    ]

    assert measured_operators(samples, kind).update_rates["float32"] == pytest.approx(40 / 11.65e-12, rel=0.01)


def pair(op: str, compute_s: float, collective_s: float, compute: str = "matmul") -> ContentionSample:
    """Pairs of a machine where a collective waits for 0.8 of the product in flight."""
    waits = 0.8 * compute_s if compute == "matmul" else 0.0
    return ContentionSample(
        compute=compute,
        shape={"m": round(compute_s * 1e7)},
        dtype="bfloat16",
        op=op,
        ranks=4,
        nbytes=1,
        compute_alone_s=compute_s,
        compute_beside_s=1.25 * compute_s,
        collective_alone_s=collective_s,
        collective_beside_s=1.1 * collective_s + waits,
    )


def test_contention_is_a_share_and_a_wait() -> None:
    pairs = [pair(op, c, t) for op, t in (("all_gather", 1e-3), ("reduce_scatter", 2e-3)) for c in (2e-4, 1e-3, 3e-3)]

    assert fit_collective(pairs, "matmul") == pytest.approx((1.1, 0.8))
    assert left_out_errors(pairs) == pytest.approx((0.0, 0.0), abs=1e-9)
    found = fit_contention(pairs)
    assert found["all_gather"].compute == pytest.approx(1.25)
    assert found["all_gather"].lost == pytest.approx(found["all_gather"].collective * 0.2)
    assert fit_contention([]) == {}
    assert fit_collective([], "copy") is None
