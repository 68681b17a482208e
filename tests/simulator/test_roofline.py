"""Kernel times against the roofline's own limits and a published effect of the power limit."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simulator.config.runtime import Runtime
from simulator.kernels.efficiency import efficiency
from simulator.kernels.low_precision import has_no_bfloat16, recipe_of, recipes
from simulator.kernels.operators import OperatorSpec, Work, WorkKind, backward_work, forward_work
from simulator.kernels.roofline import (
    GATHER_PACK,
    GATHER_UNPACK,
    REDUCE_PACK,
    Packing,
    Roofline,
    grouped_tile_factor,
)
from simulator.runtimes.library import attention_kernel, generations_back, runtime_spec, spec_for
from simulator.runtimes.quantized import LowPrecisionSpec, quantized
from topology.catalog.gpus import gpu_kind, gpu_kinds
from topology.cluster import GpuKind

EXAMPLES = Path(__file__).parents[2] / "examples"


def product(m: float, n: float, k: float) -> Work:
    shape = [np.array([float(x)]) for x in (m, n, k)]
    return Work(
        kind=WorkKind.MATMUL,
        name="w",
        m=shape[0],
        n=shape[1],
        k=shape[2],
        flops=2 * shape[0] * shape[1] * shape[2],
        bytes=2 * (m * k + k * n + m * n) * np.ones(1),
    )


@pytest.mark.parametrize("kind", [k for k in gpu_kinds() if k.peak_flops.get("bfloat16")], ids=lambda k: k.name)
def test_no_product_exceeds_the_peak_or_the_memory_rate(kind) -> None:
    roofline = Roofline(gpu=kind)
    for m, n, k in ((8192, 8192, 8192), (1, 4096, 4096), (100, 100, 100), (4096, 128256, 4096)):
        work = product(m, n, k)
        seconds = roofline.seconds(work)[0]

        assert work.flops[0] / seconds < roofline.peak_flops
        assert work.bytes[0] / seconds < kind.memory_bytes_per_s


def test_a_partial_wave_costs_a_whole_one() -> None:
    """132 SMs: 132 tiles of 128 x 256 run as one wave, 133 need two."""
    roofline = Roofline(gpu=gpu_kind("h100-sxm"))
    full = roofline.seconds(product(128 * 132, 256, 8192))[0]
    over = roofline.seconds(product(128 * 140, 256, 8192))[0]

    assert over > 1.2 * full


@pytest.mark.parametrize(
    ("shape", "alone_s", "adds_s"),
    [
        ((128256, 4096, 8192), 12.595e-3, 12.988e-3),
        ((128256, 2048, 1024), 0.868e-3, 1.069e-3),
        ((32000, 4096, 2048), 0.814e-3, 0.955e-3),
    ],
)
def test_adding_to_a_stored_result_takes_as_much_longer_as_on_an_h200(shape, alone_s, adds_s) -> None:
    """Products alone and added to float32, medians on one H200 (examples/validation/kernels.md)."""
    roofline, (rows, columns, _) = Roofline(gpu=gpu_kind("h200-sxm")), shape
    alone = product(*shape)
    adds = replace(alone, bytes=alone.bytes + 2 * rows * columns, added_bytes=4.0 * rows * columns)

    longer = float((roofline.seconds(adds) - roofline.seconds(alone))[0])

    assert alone_s + longer == pytest.approx(adds_s, rel=0.05)


@pytest.mark.parametrize(
    ("kernel", "width", "widened", "seconds"),
    [
        (GATHER_PACK, 0.5 * (4 + 2), False, 200e-6),
        (GATHER_UNPACK, 2 + 2, False, 235e-6),
        (REDUCE_PACK, 2 + 4, True, 690e-6),
        (REDUCE_PACK, 2 + 2, False, 240e-6),
    ],
)
def test_fsdps_copies_take_what_they_took_on_an_h200(kernel, width, widened, seconds) -> None:
    """A layer of 218 million parameters on two ranks, alone and in steps of torch 2.11 (examples/profiles/h200x4.json,
    examples/validation/kernels.md).
    """
    elements = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    packing = Packing(kernel=kernel, module_bytes=2.0 * elements, widened_bytes=float(width) * widened)
    rate = float(Roofline(gpu=gpu_kind("h200-sxm")).packing_bytes_per_s(packing))

    assert width * elements / rate == pytest.approx(seconds, rel=0.1)


def test_lower_power_limit_slows_products_as_published() -> None:
    """One H100 at 650 and 500 W: 1403 against 1655 us for the same matmul (symm-mem-recipes README)."""
    full, capped = gpu_kind("h100-sxm"), gpu_kind("h100-sxm-96gb-hbm2e-500w")
    ratio = Roofline(gpu=capped).sustained_flops / Roofline(gpu=full).sustained_flops

    assert ratio == pytest.approx((500 / 700) ** (np.log(1403 / 1655) / np.log(500 / 650)), rel=0.02)


def test_heads_that_are_no_multiple_of_eight_wide_are_slow_in_16_bits_and_by_themselves_in_a_batch() -> None:
    """One run of heads of 150 took 208 s where one of heads of 144 took 160, of which products by head are a fortieth
    of the arithmetic.
    """

    def seconds(width: float, batch: float, dtype: str = "bfloat16", rows: float = 0.0) -> float:
        flops = 2 * 2048 * 2048 * width * np.array([batch])
        work = replace(product(2048, 2048, width), batch=np.array([batch]), flops=flops, grouped_rows=rows)
        return float(Roofline(gpu=gpu_kind("a100-sxm-80gb"), dtype=dtype).seconds(work)[0])

    assert seconds(150, 48) > 5 * seconds(152, 48)
    assert seconds(108, 48) > 5 * seconds(112, 48)
    assert seconds(150, 1) <= seconds(152, 1) * 1.001
    assert seconds(150.4, 48, rows=150.4) <= seconds(152, 48, rows=152) * 1.001, "rows of experts begin with whole rows"
    assert seconds(150, 48, "float32") <= seconds(152, 48, "float32") * 1.001


def with_usual_power(gpu: GpuKind) -> GpuKind:
    """A part with as many watts for its rate as the one that its architecture's figures are of."""
    known = efficiency(gpu.architecture)
    return replace(gpu, power_w=known.reference_w / known.reference_flops * gpu.peak_flops["bfloat16"])


@pytest.mark.parametrize("name", ["gb300", "gb200", "gh200-96gb", "b300-sxm"])
@pytest.mark.parametrize("low", [None, "delayed"])
def test_more_power_quickens_products_up_to_the_largest_that_was_found(name: str, low: str | None) -> None:
    gpu = gpu_kind(name)
    runtime = Runtime(name="megatron-lm", compute_dtype="float8", low_precision_recipe=low) if low else Runtime()
    more, usual = (Roofline(gpu=kind, low=recipe_of(runtime)) for kind in (gpu, with_usual_power(gpu)))
    found = gpu.achieved_flops["float8" if low else "bfloat16"]

    rates = [roofline.sustained_flops * roofline.low_rate for roofline in (more, usual)]

    assert rates[1] <= rates[0] <= found * (1 + 1e-9)
    assert more.sustained_flops > usual.sustained_flops
    assert more.sustained_flops / more.rested <= gpu.peak_flops["bfloat16"]


def test_power_that_no_search_has_tried_changes_nothing() -> None:
    """An H20 has four times the power for its rate; here nothing is known of its products."""
    gpu = replace(gpu_kind("h20"), achieved_flops={})

    assert Roofline(gpu=gpu).sustained_flops == Roofline(gpu=with_usual_power(gpu)).sustained_flops


@pytest.mark.parametrize(
    ("name", "published"),
    [("rtx-4090", 160.2e12), ("a10g", 66.6e12), ("t4", 41.9e12)],
)
def test_cards_multiply_at_the_rate_that_their_owners_measured(name: str, published: float) -> None:
    """Products of 8,192 by themselves (zzc0721/torch-performance-test-data, issues 78 and 126), of a T4 in float16 the
    largest of its table there: its power, not its clock, limits it.
    """
    gpu = gpu_kind(name)
    seconds = float(Roofline(gpu=gpu).seconds(product(8192, 8192, 8192))[0])

    assert 2 * 8192**3 / seconds == pytest.approx(published * efficiency(gpu.architecture).sustained, rel=0.06)
    if has_no_bfloat16(gpu):  # nor TF32
        return
    assert Roofline(gpu=gpu, dtype="float32", tf32=True).sustained_flops == pytest.approx(
        Roofline(gpu=gpu).sustained_flops / 2, rel=0.01
    )


def test_every_architecture_of_the_catalogue_has_efficiencies() -> None:
    for kind in gpu_kinds():
        known = efficiency(kind.architecture)

        assert 0 < known.burst < 1
        assert 0.9 < known.sustained < 1
        assert 0 < known.hbm < 1


def test_attention_backward_takes_longer_than_forward() -> None:
    roofline = Roofline(gpu=gpu_kind("h200-sxm"))
    shape = {"batch": 32.0, "m": np.array([8192.0]), "n": np.array([8192.0]), "k": np.array([128.0])}
    forward = Work(kind=WorkKind.ATTENTION, name="a", flops=np.array([1e13]), **shape)
    backward = Work(kind=WorkKind.ATTENTION, name="a", flops=np.array([2.5e13]), backward=True, **shape)

    assert roofline.seconds(backward)[0] > 2.5 * roofline.seconds(forward)[0]


@pytest.mark.parametrize(
    ("low", "published_s"), [("", 13.102e-3), ("current", 6.812e-3), ("mxfp8", 7.161e-3), ("nvfp4", 3.764e-3)]
)
def test_products_of_a_layer_on_blackwell_ultra_take_what_their_makers_measured(low: str, published_s: float) -> None:
    """TransformerEngine's 12 products by themselves (its docs/examples/gemm_profiling, 15,872 tokens, width 4,096)."""
    gpu, tokens, width, inner = gpu_kind("b300-sxm"), 15872, 4096, 16384
    compute = {"": "bfloat16", "nvfp4": "float4"}.get(low, "float8")
    runtime = Runtime(name="megatron-lm", compute_dtype=compute, low_precision_recipe=low or None)
    roofline = Roofline(gpu=gpu, low=recipe_of(runtime))
    shapes = [(tokens, n, k) for n, k in ((3 * width, width), (width, width), (inner, width), (width, inner))]
    every = [*shapes, *((m, k, n) for m, n, k in shapes), *((k, n, m) for m, n, k in shapes)]
    seconds = sum(float(roofline.seconds(replace(product(*shape), low=bool(low)))[0]) for shape in every)

    assert seconds * efficiency(gpu.architecture).sustained == pytest.approx(published_s, rel=0.08)


@pytest.mark.parametrize(
    ("tokens", "forward", "backward"),
    [(4096, 1408 / 591, 1148 / 474), (8192, 1574 / 644, 1332 / 541), (16384, 1708 / 673, 1328 / 579)],
)
def test_attention_on_blackwell_compares_with_hopper_as_its_makers_measured(
    tokens: int, forward: float, backward: float
) -> None:
    """Kernels of cuDNN, causal, 64 heads of 128 (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training)."""

    def seconds(name: str, sequences: float, back: bool) -> float:
        shape = {"m": np.array([float(tokens)]), "n": np.array([float(tokens)]), "k": np.array([128.0])}
        flops = np.array([sequences * 64 * tokens**2 * 128 * (5.0 if back else 2.0)])
        work = Work(kind=WorkKind.ATTENTION, name="a", flops=flops, batch=64 * sequences, backward=back, **shape)
        return float(Roofline(gpu=gpu_kind(name)).seconds(work)[0])

    for back, published in ((False, forward), (True, backward)):
        assert 2 * seconds("h200-sxm", 1.0, back) / seconds("gb200", 2.0, back) == pytest.approx(published, rel=0.06)


def test_a_power_limit_slows_attention_as_it_slows_products() -> None:
    """Both run on tensor cores: an arithmetic-bound kernel loses the same share of its rate."""
    full, capped = gpu_kind("h100-sxm"), gpu_kind("h100-sxm-96gb-hbm2e-500w")
    shape = {"m": np.array([65536.0]), "n": np.array([65536.0]), "k": np.array([128.0])}
    work = Work(kind=WorkKind.ATTENTION, name="a", flops=np.array([1e15]), **shape)
    products = Roofline(gpu=capped).sustained_flops / Roofline(gpu=full).sustained_flops
    attention = Roofline(gpu=full).seconds(work)[0] / Roofline(gpu=capped).seconds(work)[0]

    assert attention == pytest.approx(products, rel=1e-3)


@pytest.mark.parametrize("name", ["gb200", "gb300", "mi325x"])
def test_more_power_quickens_attention_as_it_quickens_products(name: str) -> None:
    gpu = gpu_kind(name)
    known, usual = efficiency(gpu.architecture), with_usual_power(gpu)
    shape = {"m": np.array([65536.0]), "n": np.array([65536.0]), "k": np.array([128.0])}
    work = Work(kind=WorkKind.ATTENTION, name="a", flops=np.array([1e15]), **shape)
    gained = Roofline(gpu=usual).seconds(work)[0] / Roofline(gpu=gpu).seconds(work)[0]

    assert gained == pytest.approx((gpu.power_w / usual.power_w) ** known.power_exponent, rel=1e-3)


@pytest.mark.parametrize(
    ("version", "architecture", "kernel"),
    [
        (None, "Hopper", "cudnn"),
        ("0.2.2", "Hopper", "cudnn"),
        ("0.1", "Hopper", "flash2"),
        ("v0.1.0", "Ampere", "flash2"),
        ("0.1", "Blackwell", "cudnn"),
    ],
)
def test_torchtitan_calls_the_attention_of_its_version(version, architecture, kernel) -> None:
    """As models/attention.py of each time lists them: FlashAttention first until 0.2, except on Blackwell."""
    assert attention_kernel(Runtime(name="torchtitan", version=version), architecture) == kernel


def test_megatron_calls_composable_kernel_on_amd_unless_it_multiplies_matrices() -> None:
    """ROCm/TransformerEngine, README.rst: of two backends that match, CK goes first."""
    assert attention_kernel(Runtime(name="megatron-lm"), "CDNA3") == "flash2"
    assert attention_kernel(Runtime(name="megatron-lm", version="2022-05"), "CDNA3") == "unfused"
    assert attention_kernel(Runtime(name="megatron-deepspeed"), "CDNA3") == "unfused"


@pytest.mark.parametrize(
    ("name", "version", "early"),
    [
        ("megatron-lm", "2022-05", True),
        ("megatron-lm", "2022-11", False),
        ("megatron-lm", "0.12.1", False),
        ("megatron-deepspeed", "2022-11", True),
        ("megatron-deepspeed", "2023-10", False),
        ("internevo", "2022-05", False),
        ("vectorlm", "0.1", False),
        ("meshwright", "0.1", True),
        ("meshwright", "0.4.0", False),
    ],
)
def test_versions_are_those_of_a_runtime_itself(name, version, early) -> None:
    """A description that is like another's has versions of its own; a release number says nothing where only months
    do.
    """
    assert (generations_back(Runtime(name=name, version=version)) > 0) == early
    assert (spec_for(Runtime(name=name, version=version)) != runtime_spec(name)) == early


def test_older_generations_are_changes_of_newer_ones() -> None:
    """Transformers 4.49 shifts labels instead of logits (loss/loss_utils.py); checkpoints without re-entrance are of
    5.0, fused AdamW is of 4.54.
    """
    oldest, older, today = (spec_for(Runtime(name="transformers", version=one)) for one in ("4.48.3", "4.50", "5.1"))

    assert oldest.layer.head_peak != older.layer.head_peak == today.layer.head_peak
    assert oldest.recompute_stops == older.recompute_stops == "reentrant" != today.recompute_stops


def test_products_of_experts_waste_half_a_tile_each_as_measured() -> None:
    """Rows that a router drew, torch's grouped_mm alongside a batched product on H100: within 10 % in the mean,
    unbiased.
    """
    table = json.loads((EXAMPLES / "validation/grouped_products.json").read_text())
    missed = []
    for row in table["rows"]:
        if row["drawn"]:
            work = replace(product(1, 1, 1), grouped_rows=np.array([float(row["rows"])]))
            missed.append(np.log(row["grouped_s"] / row["batched_s"] / grouped_tile_factor(work))[0])

    assert len(missed) > 50
    assert abs(np.mean(missed)) < 0.03
    assert np.mean(np.abs(missed)) < 0.1


def test_grouped_kernels_take_what_they_took_in_steps() -> None:
    """Nine steps on an H200 to which nothing was fitted, each the mean of all its products, at the clocks measured."""
    roofline, one = Roofline(gpu=gpu_kind("h200")), efficiency("hopper").grouped
    highest_hz, lowest_hz = 1.95e9, 1.4e9
    ratios = []
    for line in (EXAMPLES / "validation/fresh.jsonl").read_text().splitlines():
        run = json.loads(line)
        if run["draw"] != "2026-12-01.35" or not run["model"]["moe"] or run["runtime"]["compute_dtype"] != "bfloat16":
            continue
        seen = [k for k in run["measured"]["profiled"]["longest"] if "3x_kernel_for_sm9" in k["name"]]
        measured_s = sum(k["seconds"] for k in seen) / sum(k["count"] for k in seen)
        moe, hidden, width = run["model"]["moe"], run["model"]["hidden"], run["model"]["moe"]["ffn"]
        tokens = run["plan"]["micro_batch_size"] * run["workload"]["seq_len"]
        experts, rows = moe["experts"], tokens * moe["experts_per_token"] / moe["experts"]
        alone = []
        for m, n, k in ((rows, width, hidden), (rows, hidden, width), (hidden, width, rows)):
            work = product(m, n, k)
            work = replace(work, batch=float(experts), flops=work.flops * experts, bytes=work.bytes * experts)
            alone += list(roofline.seconds(replace(work, grouped_rows=np.array([rows]), one_kernel=True)))
        slowed = np.clip((highest_hz - run["measured"]["mean_sm_clock_hz"]) / (highest_hz - lowest_hz), 0.0, 1.0)
        clocks = 1.0 - one.clocks * (1.0 - roofline.rested) * (1.0 - slowed)
        ratios.append(np.mean(alone) * clocks / measured_s)

    assert len(ratios) == 9
    assert np.median(np.abs(np.array(ratios) - 1.0)) < 0.1
    assert 0.75 < min(ratios) < max(ratios) < 1.4


@pytest.mark.parametrize(
    ("gpu", "kernel", "backward", "published"),
    [
        ("mi355x", "cudnn", False, {2048: 353, 8192: 705}),
        ("mi355x", "cudnn", True, {1024: 110, 8192: 224}),
        ("mi355x", "flash2", False, {2048: 701, 8192: 866}),
        ("mi355x", "flash2", True, {4096: 946, 8192: 978}),
        ("mi300x", "cudnn", False, {1024: 164, 4096: 257}),
    ],
)
def test_attention_on_amd_takes_what_was_published(
    gpu: str, kernel: str, backward: bool, published: dict[int, float]
) -> None:
    """TFLOP/s of an MI355X, 16 sequences of 64 heads, causal (HipKittens' tables), and of an MI300X, of 16 heads
    (attn-dsl-bench). Curves are of other lengths, but for `flash2` backward at 8,192 tokens.
    """
    roofline = Roofline(gpu=gpu_kind(gpu), attention_kernel=kernel)
    heads = {"mi355x": 64, "mi300x": 16}[gpu]
    for tokens, tflops in published.items():
        shape = {"batch": 16.0 * heads, "m": np.array([float(tokens)]), "n": np.array([float(tokens)])}
        work = Work(
            kind=WorkKind.ATTENTION, name="a", flops=np.array([1e15]), k=np.array([128.0]), backward=backward, **shape
        )
        assert 1e15 / roofline.seconds(work)[0] == pytest.approx(tflops * 1e12, rel=0.1)


@pytest.mark.parametrize("gpu", ["h100-sxm", "mi300x"])
def test_a_weight_gradient_in_16_bits_gains_nothing(gpu: str) -> None:
    """A product of torchao's rowwise_with_gw_hp is three: two gain what they gain by rows, one takes what it took."""
    runtimes = {
        "bfloat16": Runtime(name="torchtitan"),
        **{
            name: Runtime(name="torchtitan", compute_dtype="float8", low_precision_recipe=name)
            for name in ("rowwise", "rowwise_with_gw_hp")
        },
    }
    spec = OperatorSpec(name="w", matmul="t h, h f -> t f", saves=("t h",))
    sizes = {"t": np.array([8192.0]), "h": np.array([8192.0]), "f": np.array([8192.0]), "one": np.ones(1)}
    seconds, saves = {}, {}
    for name, runtime in runtimes.items():
        recipe = recipe_of(runtime)
        product = quantized([spec], LowPrecisionSpec(recipe=name), recipe)[-1] if recipe else spec
        work = [*forward_work(product, sizes, dtype_bytes), *backward_work(product, sizes, dtype_bytes)]
        seconds[name] = sum(float(Roofline(gpu=gpu_kind(gpu), low=recipe).seconds(one)[0]) for one in work)
        saves[name] = product.saves

    gained = seconds["bfloat16"] - seconds["rowwise"]
    assert gained > 0.2 * seconds["bfloat16"]
    assert seconds["bfloat16"] - seconds["rowwise_with_gw_hp"] == pytest.approx(gained * 2 / 3, rel=0.05)
    assert saves["rowwise_with_gw_hp"] == saves["bfloat16"] != saves["rowwise"]


@pytest.mark.parametrize(
    ("recipe", "moved"), [("tensorwise", 6.0), ("rowwise", 8.0), ("rowwise_with_gw_hp", 3.0), ("mxfp8", 6.0)]
)
def test_torchao_moves_what_its_roofline_counts_to_quantise_a_number(recipe: str, moved: float) -> None:
    """Of an input or a gradient (pytorch/ao, torchao/testing/training/roofline_utils.py)."""
    runtime = Runtime(name="torchtitan", compute_dtype="float8", low_precision_recipe=recipe)
    known = recipe_of(runtime)
    assert known is not None
    low = runtime_spec("torchtitan").low_precision
    spec = OperatorSpec(name="w", matmul="t h, h f -> t f", saves=("t h",))
    quantise = quantized([spec], low, known, recipe)[0]

    written = known.written_bytes("hopper" if recipe != "mxfp8" else "blackwell")
    assert 2.0 * len(quantise.reads) + written == pytest.approx(moved, rel=0.02)
    assert len(quantise.backward_reads) == len(quantise.reads)


@pytest.mark.parametrize(("gpu", "transposed"), [("h100-sxm", 1.0), ("b200-sxm", 0.0)])
@pytest.mark.parametrize(
    ("name", "matmul", "forward", "backward"),
    [
        # A norm writes its product's input along one axis: the copy along the other is read and written once.
        ("fc1", "t h, h gf -> t gf", lambda *_: 0.0, lambda t, _, z: 2 * z * t * H + (3 + z) * t * F),
        # Tokens cast along one axis are gathered, and transposed on every rank; others are cast along both.
        ("fc2", "t f, f h -> t h", lambda t, _, z: (3 + z) * t * F, lambda t, u, z: 3 * u * H + 2 * z * t * H),
    ],
)
def test_transformer_engine_transposes_what_it_gathers(gpu, transposed, name, matmul, forward, backward) -> None:
    """Delayed scaling with sequence parallelism, bytes by hand from @v1.11: layernorm_linear.py (fp8_transpose of the
    gathered input), base.py (grad_output_preprocess: cast_to_fp8, gather, fp8_transpose; else cast and transpose).
    """
    architecture, recipe = gpu_kind(gpu).architecture, recipes()["delayed"]
    low = runtime_spec("megatron-lm").low_precision
    written = {"compute": 2.0, "low": 1.0, "low_copies": recipe.written_bytes(architecture)}
    written |= {"low_transposed": recipe.transposed_bytes(architecture)}
    t, u = 4096.0, 1024.0
    sizes = {"t": t, "u": u, "h": H, "f": F, "gf": F, "one": 1.0}
    norm = OperatorSpec(name="pre_mlp_norm", reads=("u h",), writes=("u h",))
    found = quantized([norm, OperatorSpec(name=name, matmul=matmul, saves=("t h",))], low, recipe, "delayed")
    casts = [one for one in found if one.name == f"{name}_quantise" and "!sp" not in one.when]

    for direction, expected in ((forward_work, forward), (backward_work, backward)):
        moved = sum(float(np.sum(work.bytes)) for one in casts for work in direction(one, sizes, written.__getitem__))
        assert moved == pytest.approx(expected(t, u, transposed))
    assert found[0].writes == (("u h:low",) if name == "fc1" else ("u h",))


H, F = 8192.0, 7168.0


def dtype_bytes(name: str) -> float:
    return {"low": 1.0, "compute": 2.0}[name]


def test_few_heads_leave_sms_idle_at_the_end_of_the_forward_grid() -> None:
    """B200, 4096 tokens: 64 heads keep it as busy as the benchmarks did; SimuMax's table has 0.84 of that rate for 32
    heads, 0.66 for 16 and 0.36 for 8 (sdp_fwd of configs/system/b200_bf16_ceperm.json).
    """
    roofline = Roofline(gpu=gpu_kind("b200-sxm"))

    def rate(heads: float) -> float:
        work = Work(
            kind=WorkKind.ATTENTION,
            name="a",
            flops=np.array([heads * 1e11]),
            batch=heads,
            m=np.array([4096.0]),
            n=np.array([4096.0]),
            k=np.array([128.0]),
        )
        return work.flops[0] / roofline.seconds(work)[0]

    assert rate(128) == pytest.approx(rate(64), rel=0.02)
    for heads, measured in ((32, 0.84), (16, 0.66), (8, 0.36)):
        assert rate(heads) / rate(64) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("gpu", "rows", "forward_us", "backward_us"),
    [
        ("h100-sxm", 7168 * (36 + 18) / 2, 131.7, 140.8),  # one launch for queries, one for keys: 2/12
        ("h200-sxm", 16384 * 40, 458.0, 471.0),  # 4/08, the norms of whole tokens taken out
    ],
)
def test_norms_of_short_rows_take_their_time_a_row(gpu, rows, forward_us, backward_us) -> None:
    """Runs of the ledger (draw/number): mean microseconds of a norm of heads of 64, far above what memory takes."""
    moved = np.array([rows * 64 * 2.0])
    roofline = Roofline(gpu=gpu_kind(gpu))

    for parts, measured in ((2, forward_us), (4, backward_us)):
        work = Work(kind=WorkKind.MOVE, name="qk_norm", bytes=parts * moved, units={"row": np.array([rows])})
        assert roofline.seconds(work)[0] * 1e6 == pytest.approx(measured, rel=0.06)
        assert roofline.seconds(work)[0] > 1.5 * roofline.seconds(replace(work, units={}))[0]


@pytest.mark.parametrize(
    ("backward", "whole_us", "causal_us", "all_us"), [(False, 931.6, 264.5, 214.3), (True, 2833.0, 776.4, 682.5)]
)
def test_attention_to_the_keys_of_two_ranks_takes_what_its_parts_take(backward, whole_us, causal_us, all_us) -> None:
    """An H200 by cuDNN, 32 heads of 128, microseconds: 8,192 tokens by one kernel; a rank's 4,096 queries with its own
    keys, causal, and half of the other's, all (examples/validation/kernels.md).
    """

    def seconds(parts: float) -> float:
        work = Work(
            kind=WorkKind.ATTENTION,
            name="a",
            flops=np.array([2.7e11]),
            batch=32.0,
            m=np.array([4096.0]),
            n=np.array([8192.0]),
            k=np.array([128.0]),
            parts=parts,
            backward=backward,
        )
        return float(Roofline(gpu=gpu_kind("h200-sxm")).seconds(work)[0])

    measured = (causal_us + all_us) / (whole_us / 2)
    assert 1.0 < seconds(2.0) / seconds(1.0) == pytest.approx(measured, abs=0.035)
    assert seconds(8.0) > seconds(2.0)
