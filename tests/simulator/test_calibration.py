"""What a profile changes in an estimate, and what it leaves alone."""

import dataclasses
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import Calibration, Contention, RuntimeCosts, overlap_of
from simulator.calibration.gaussian import conditioned
from simulator.calibration.items import OperatorItem
from simulator.calibration.kernel_samples import operators_of
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.fitting.calibration_fit import calibrated
from simulator.fitting.kernel_fit import layer_elements
from simulator.fitting.runtime_fit import fit_runtimes, run_of
from simulator.kernels.efficiency import efficiency
from simulator.kernels.operators import OperatorSpec, Work, WorkKind
from simulator.kernels.roofline import Roofline
from simulator.lowering.simulation import simulate_plan
from simulator.overlap.site_costs import SiteRates
from simulator.runtimes.library import RuntimeSpec, runtime_spec
from simulator.step.host import BATCH_TOKENS
from topology import codec
from topology.catalog.cluster_file import load_cluster
from topology.catalog.platform import take_gpus
from topology.profile.profile import Profile, read_profile
from topology.profile.samples import Conditions, LayerSample, OperatorSample

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WIDE = Model(
    name="wide", family="llama", layers=2, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=4096
)
NARROW = dataclasses.replace(WIDE, name="narrow", hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1024, vocab=1024)
RUNTIME = Runtime(name="torchtitan", logs_each_step=True)  # samples are of single steps
TITAN = ("torchtitan", False)
HOST = {
    "launch_s": 20e-6,
    "backward_launch_s": 20e-6,
    "dtensor_launch_s": 20e-6,
    "forward_layer_s": 0.0,
    "backward_layer_s": 0.0,
    "checkpoint_s": 1e-3,
    "fsdp_layer_s": 3e-3,
    "step_s": 4e-3,
    "data_token_s": 1e-6,
}


@lru_cache
def cluster():
    return load_cluster("h200x4")


def workload(plan: Plan, seq_len: int) -> Workload:
    return Workload(seq_len=seq_len, global_batch_size=plan.data_parallel * plan.micro_batch_size)


@lru_cache
def operators(slower: float = 1.0) -> tuple[OperatorSample, ...]:
    """Every operator of a few layers, each `slower` times what the datasheet's rates would take."""
    found = {}
    for length in (2048, 4096, 8192):
        for width in (2048, 4096):
            model = dataclasses.replace(WIDE, hidden=width, heads=width // 128)
            plan = Plan(dp_shard=2)
            for one in operators_of(model, plan, workload(plan, length), RUNTIME):
                found[codec.fingerprint(one)] = sample(one, slower)
    return tuple(found.values())


def sample(one: OperatorItem, slower: float) -> OperatorSample:
    shape = one.shape
    if one.kind == "matmul":
        seconds = 2.0 * shape["m"] * shape["n"] * shape["k"] / 690e12 + 3e-6
    elif one.kind == "attention":
        flops = 2.0 * shape["a"] * shape["s"] * shape["S"] * shape["d"]
        seconds = flops * (2.5 / 450e12 if one.direction == "backward" else 1 / 550e12) + 5e-6
    else:
        seconds = 8 * elements(one.name, shape) / 4e12 + 3e-6
    return OperatorSample(**dataclasses.asdict(one), seconds=slower * seconds)


def elements(name: str, shape: dict) -> float:
    """What a kernel goes over: the parameters of a layer shared by ranks, or tokens times a width."""
    if "ranks" in shape:
        return layer_elements(shape) / shape["ranks"]
    rows = shape.get("t", shape.get("u", 1))
    width = {
        "rotary_complex": ("q", "kv"),
        "embedding": ("h",),
        "cross_entropy": ("v",),
        "silu": ("f",),
        "gate": ("f",),
    }
    return float(rows * sum(shape[axis] for axis in width.get(name, ("h",))))


def profile(**changes) -> Profile:
    return Profile(**{"machine": "m", "gpu": "h200-sxm", "taken_at": "2026-11-21", "operators": operators(), **changes})


def estimate(plan: Plan, profile: Profile | None, *, model: Model = WIDE, calibration=None, seq_len: int = 8192):
    known = calibration or calibrated(profile, cluster())
    scenario = Scenario(
        model=model, cluster=cluster(), workload=workload(plan, seq_len), runtime=RUNTIME, calibration=known
    )
    table = estimate_plans(scenario, [plan])
    return table.estimate(0)


def test_without_operators_a_profile_changes_nothing() -> None:
    plan = Plan(dp_shard=4)

    assert calibrated(None, cluster()) is None
    assert estimate(plan, Profile(machine="m", gpu="h200-sxm")) == estimate(plan, None)


@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "cpu", "something else"])
def test_a_profile_of_another_gpu_is_not_used(gpu: str) -> None:
    assert calibrated(profile(gpu=gpu), cluster()) is None


def test_throttled_and_burst_samples_are_not_used() -> None:
    hot = tuple(dataclasses.replace(s, invalid="slowed down") for s in operators(3.0))
    burst = tuple(dataclasses.replace(s, regime="burst", seconds=1e-9) for s in operators() if s.kind != "matmul")
    plan = Plan(dp_shard=4)

    expected = estimate(plan, profile()).step_s.value
    assert estimate(plan, profile(operators=operators() + hot + burst)).step_s.value == pytest.approx(expected)


def test_measured_shapes_take_what_was_measured() -> None:
    whole = calibrated(profile(), cluster())
    twice = calibrated(profile(operators=operators(2.0)), cluster())
    assert whole is not None
    assert twice is not None
    plan = Plan(dp_shard=2)

    once, double = (estimate(plan, None, calibration=c).breakdown_s["compute"] for c in (whole, twice))

    assert double == pytest.approx(2 * once, rel=0.02)


def test_shares_add_up_and_name_what_the_step_rests_on() -> None:
    found = estimate(Plan(dp_shard=4), profile())

    assert sum(found.sources.values()) == pytest.approx(1.0)
    assert max(found.sources, key=lambda name: found.sources[name]) == "measured"
    assert found.sources["assumed"] > 0, "no layer of the runtime was run: its host is assumed"
    unseen = estimate(Plan(dp_shard=4), profile(), model=dataclasses.replace(WIDE, hidden=6144, heads=48, ffn=16384))
    assert unseen.sources["measured"] < 0.1
    assert unseen.sources["fitted"] > 0.5
    assert sum(estimate(Plan(dp_shard=4), None).sources.values()) == pytest.approx(1.0)
    assert estimate(Plan(dp_shard=4), None).sources["measured"] == 0.0


def test_float32_products_stay_on_the_datasheet_and_widen_the_interval() -> None:
    table = estimate_plans(
        Scenario(
            model=WIDE,
            cluster=cluster(),
            workload=Workload(seq_len=8192, global_batch_size=1),
            runtime=Runtime(name="torchtitan", compute_dtype="float32"),
            calibration=calibrated(profile(), cluster()),
        ),
        [Plan(tp=4)],
    )
    single, narrow = table.estimate(0), estimate(Plan(dp_shard=4), profile())

    assert single.sources["datasheet"] > 0.5
    assert single.step_s.low / single.step_s.value < narrow.step_s.low / narrow.step_s.value


def test_a_profile_without_a_rested_product_leaves_the_clocks_that_are_described() -> None:
    """A calibration whose time went to layers says nothing of what the power limit leaves them."""
    one = take_gpus(cluster(), 1)
    found = calibrated(dataclasses.replace(profile(), operators=()), one)
    assert found is not None
    assert found.burst == Roofline(gpu=one.slowest_kind).rested < 1.0


def test_products_that_reach_what_datasheets_expect_of_them_change_nothing() -> None:
    """Products by themselves, on a GPU at its power limit and after a rest, that take what a GPU of their kind takes:
    a step runs them at the times, and at the range of clocks, of a step that is predicted without a profile.
    """
    described = Roofline(gpu=cluster().slowest_kind)
    known = efficiency(described.gpu.architecture)

    def product(rows: int, dtype: str) -> tuple[Work, float]:
        work = Work(kind=WorkKind.MATMUL, name="up", flops=2.0 * rows * 8192**2, m=float(rows), n=8192.0, k=8192.0)
        return work, float(dataclasses.replace(described, dtype=dtype).seconds(work)[0])

    def measured(rows: int, dtype: str, share: float, regime: str = "sustained") -> OperatorSample:
        item = OperatorItem(kind="matmul", name="up", shape={"m": rows, "n": 8192, "k": 8192}, dtype=dtype)
        return OperatorSample(**dataclasses.asdict(item), regime=regime, seconds=share * product(rows, dtype)[1])

    by_themselves = {"bfloat16": known.sustained, "float32": 1.0}  # without tensor cores power does not limit them
    samples = [measured(rows, dtype, share) for dtype, share in by_themselves.items() for rows in (4096, 8192, 16384)]
    found = calibrated(profile(operators=(*samples, measured(8192, "bfloat16", known.rested, "burst"))), cluster())
    assert found is not None

    for dtype in by_themselves:
        work, expected = product(8192, dtype)
        assert dataclasses.replace(described, dtype=dtype, measured=found).seconds(work)[0] == pytest.approx(expected)
    assert found.burst == pytest.approx(described.rested, rel=0.02)


def test_a_host_that_costs_nothing_and_no_contention_shorten_a_step() -> None:
    found = calibrated(profile(), cluster())
    assert found is not None
    quick = {("torchtitan", False): RuntimeCosts(host=dict.fromkeys(("launch_s", "fsdp_layer_s", "step_s"), 0.0))}
    plan = Plan(dp_shard=4)

    measured = estimate(plan, None, calibration=found).step_s.value
    for other in ({"runtimes": quick}, {"contention": {"all_reduce": Contention()}}):
        assert estimate(plan, None, calibration=dataclasses.replace(found, **other)).step_s.value < measured


def test_the_simulation_and_the_closed_form_agree_on_calibrated_costs() -> None:
    model, plan = dataclasses.replace(WIDE, layers=8), Plan(dp_shard=4)
    load = workload(plan, 8192)

    simulated = simulate_plan(
        Scenario(
            model=model, cluster=cluster(), workload=load, runtime=RUNTIME, calibration=calibrated(profile(), cluster())
        ),
        plan,
        spans=False,
    ).estimate

    formula = estimate(plan, profile(), model=model)
    assert simulated.step_s.value == pytest.approx(formula.step_s.value, rel=0.06)


# --- runtimes -------------------------------------------------------------------------------------------------------


def layers(
    kernel_factor: float = 1.0, layer_factor: float = 1.0, wide: Model = WIDE, own: dict = HOST
) -> tuple[LayerSample, ...]:
    """Steps of one and two layers on a machine whose host and kernels follow the model exactly."""
    whole = calibrated(profile(), cluster())
    assert whole is not None
    costs = RuntimeCosts(kernel_factor=kernel_factor, layer_factor=layer_factor, host=own, runs=1)
    truth = dataclasses.replace(whole, runtimes={("torchtitan", False): costs})
    found = []
    runs = [
        (NARROW, Plan(), 256),
        (NARROW, Plan(dp_shard=2), 256),
        (NARROW, Plan(dp_shard=2, recompute="full"), 256),
        *((wide, Plan(dp_shard=2), length) for length in (4096, 8192, 16384)),
        (wide, Plan(), 8192),
    ]
    for model, plan, length in runs:
        for count in (1, 2):
            one = dataclasses.replace(model, layers=count)
            load = workload(plan, length)
            table = estimate_plans(
                Scenario(model=one, cluster=cluster(), workload=load, runtime=RUNTIME, calibration=truth), [plan]
            )
            found.append(
                LayerSample(
                    model=codec.to_builtins(one),
                    plan=codec.to_builtins(plan),
                    workload=codec.to_builtins(load),
                    runtime=codec.to_builtins(RUNTIME),
                    step_s=float(table.step_s[0]),
                    data_s=own["data_token_s"] * (length + BATCH_TOKENS),
                )
            )
    return tuple(found)


def test_host_data_and_kernel_times_are_told_apart() -> None:
    whole = calibrated(profile(), cluster())
    assert whole is not None

    costs = fit_runtimes(profile(layers=layers(kernel_factor=1.1)), cluster(), whole)[TITAN]

    assert costs.kernel_factor == pytest.approx(1.1, rel=0.02)
    assert costs.host["data_token_s"] == pytest.approx(HOST["data_token_s"])
    assert costs.host["launch_s"] == pytest.approx(HOST["launch_s"], rel=0.1)
    assert costs.host["fsdp_layer_s"] == pytest.approx(HOST["fsdp_layer_s"], rel=0.1)
    assert costs.host["checkpoint_s"] == pytest.approx(HOST["checkpoint_s"], rel=0.3)
    assert costs.host["step_s"] == pytest.approx(HOST["step_s"], abs=1.5e-3)
    assert costs.spread < 0.02


def test_kernels_of_layers_are_told_from_those_of_a_large_head() -> None:
    """With a vocabulary that takes longer than a layer, one factor for both would say the head's of every layer."""
    whole = calibrated(profile(), cluster())
    assert whole is not None
    large = dataclasses.replace(WIDE, vocab=128256)

    found = layers(kernel_factor=0.95, layer_factor=1.12, wide=large)
    costs = fit_runtimes(profile(layers=found), cluster(), whole)[TITAN]

    assert costs.kernel_factor == pytest.approx(0.95, rel=0.02)
    assert costs.layer_factor == pytest.approx(1.12, rel=0.02)


def test_noise_in_runs_without_a_large_head_does_not_become_a_factor() -> None:
    """A head of a thousandth of the step: noise of some percent is many times its size, and one factor stands for
    all.
    """
    whole = calibrated(profile(), cluster())
    assert whole is not None
    tiny = dataclasses.replace(WIDE, vocab=64)
    signs = [1, -1, 1, -1, 1, -1, -1, 1]
    noisy = tuple(
        dataclasses.replace(sample, step_s=sample.step_s * (1 + 0.03 * signs[place % 8]))
        for place, sample in enumerate(layers(kernel_factor=1.1, wide=tiny))
    )

    costs = fit_runtimes(profile(layers=noisy), cluster(), whole)[TITAN]

    assert costs.layer_factor == 1.0
    assert costs.kernel_factor == pytest.approx(1.1, rel=0.1)


def test_one_shape_however_often_it_ran_moves_factors_as_far_as_it_tells_of_others() -> None:
    """A layer 20 % longer than alone, in two types: others are not taken to be so, as they are where three shapes say
    it; a model of such layers is.
    """
    whole = calibrated(profile(), cluster())
    assert whole is not None
    every = layers(layer_factor=1.2, wide=dataclasses.replace(WIDE, vocab=128256))
    one = tuple(sample for sample in every if sample.workload["seq_len"] in (256, 8192))
    again = tuple(dataclasses.replace(s, runtime=s.runtime | {"reduce_dtype": "bfloat16"}) for s in one)

    fits = [fit_runtimes(profile(layers=some), cluster(), whole)[TITAN] for some in (one, one + again, every)]
    factors = [costs.kernel_factor * costs.layer_factor for costs in fits]

    deep = dataclasses.replace(WIDE, vocab=128256, layers=16)
    truth, known, silent = (
        dataclasses.replace(whole, runtimes={("torchtitan", False): found})
        for found in (
            RuntimeCosts(layer_factor=1.2, host=HOST, runs=1),
            dataclasses.replace(fits[0], host=HOST),
            RuntimeCosts(host=HOST, runs=1),
        )
    )
    off = {}
    for tokens in (8192, 4096):
        exact, found, alone = (
            estimate(Plan(dp_shard=2), None, calibration=costs, model=deep, seq_len=tokens).step_s.value
            for costs in (truth, known, silent)
        )
        off[tokens] = (exact - found) / (exact - alone)

    assert abs(off[8192]) < 0.2, "of its own layers"
    assert 0.4 < off[4096] < 1.0, "of layers that nobody ran"
    assert 1.0 < factors[0] < 1.12
    assert 1.0 < factors[1] < 1.15
    assert factors[2] == pytest.approx(1.2, rel=0.02)


def test_runs_too_short_for_the_power_limiter_do_not_make_kernels_quick() -> None:
    """The same seconds, at the clock of a rested GPU: kernels under full load take longer, by what clocks differ, but
    for what a step's other kernels leave its products.

    What the driver reads when all is over says nothing: clocks are up again by then.
    """
    burst = dataclasses.replace(
        next(s for s in operators() if s.kind == "matmul" and min(s.shape.values()) >= 2048),
        regime="burst",
        conditions=Conditions(sm_clock_hz=1.98e9),
    )
    burst = dataclasses.replace(burst, seconds=0.9 * burst.seconds)
    busy_all_along = layers(own=HOST | {"data_token_s": 0.0, "step_s": 0.0})
    rested, read_later = (
        tuple(dataclasses.replace(s, conditions=conditions) for s in busy_all_along)
        for conditions in (Conditions(mean_sm_clock_hz=1.98e9), Conditions(sm_clock_hz=1.98e9))
    )

    def busy(found: tuple[LayerSample, ...]) -> tuple[float, Calibration]:
        known = calibrated(profile(operators=(*operators(), burst), layers=found), cluster())
        assert known is not None
        costs = known.runtimes[TITAN]
        return costs.kernel_factor * costs.layer_factor, known

    usual, known = busy(busy_all_along)
    runs = [run for sample in busy_all_along if (run := run_of(sample)) is not None and run.runtime.name == TITAN[0]]
    left = [
        float(
            estimate_plans(
                Scenario(
                    model=run.model, cluster=cluster(), workload=run.workload, runtime=run.runtime, calibration=known
                ),
                [run.plan],
            ).clocks[0]
        )
        for run in runs
        if run.model.hidden >= 2048
    ]
    assert min(left) / known.burst * 0.99 < busy(rested)[0] / usual < max(left) / known.burst * 1.01
    assert busy(read_later)[0] == usual


def test_full_depth_follows_from_one_and_two_layers() -> None:
    whole = calibrated(profile(), cluster())
    assert whole is not None
    truth = dataclasses.replace(
        whole, runtimes={("torchtitan", False): RuntimeCosts(kernel_factor=1.1, host=HOST, runs=1)}
    )
    deep, plan = dataclasses.replace(WIDE, layers=32), Plan(dp_shard=4)

    predicted = estimate(plan, profile(layers=layers(kernel_factor=1.1)), model=deep).step_s.value

    assert predicted == pytest.approx(estimate(plan, None, model=deep, calibration=truth).step_s.value, rel=0.02)


def test_layers_that_this_version_cannot_read_are_passed_over() -> None:
    strange = LayerSample(model={"layers": 1}, plan={"tea": 1}, workload={}, runtime={"name": "unheard of"}, step_s=1.0)
    whole = calibrated(profile(), cluster())
    assert whole is not None

    assert fit_runtimes(profile(layers=(strange,)), cluster(), whole) == {}
    invalid = tuple(dataclasses.replace(s, invalid="slowed down") for s in layers())
    assert fit_runtimes(profile(layers=invalid), cluster(), whole) == {}


def eager_titan() -> Profile:
    """Return the shipped profile of four H200 with the layers of one runtime and small heads alone, which are fitted
    sooner.
    """
    known = read_profile(EXAMPLES / "profiles" / "h200x4.json")
    titan = (
        s
        for s in known.layers
        if s.runtime["name"] == "torchtitan" and not s.runtime["compile"] and s.model["vocab"] <= 4096
    )
    return dataclasses.replace(known, layers=tuple(titan))


@cache
def shipped(gpus: int) -> Calibration:
    """Return what the shipped profile of four H200 says of so many of them."""
    found = calibrated(eager_titan(), take_gpus(cluster(), gpus))
    assert found is not None
    return found


def test_a_part_of_the_measured_machine_is_calibrated_as_the_whole() -> None:
    """Layers that ran on four GPUs say the same of two of them: what they took does not depend on the question."""
    whole, part = (shipped(gpus).runtime("torchtitan", compiled=False) for gpus in (4, 2))

    assert whole.host["fsdp_layer_s"] > 1e-3
    assert part == whole


def test_a_runtime_that_is_like_another_borrows_what_was_measured_of_it() -> None:
    """The executor has torchtitan's costs but for Python between tensors, until layers of its own were run."""
    borrowed = shipped(4)
    titan, executor = (borrowed.runtime(name, compiled=False) for name in ("torchtitan", "meshwright"))
    own = dataclasses.replace(
        borrowed, runtimes={("meshwright", False): RuntimeCosts(kernel_factor=1.2, host=HOST, runs=4)}
    )

    assert set(titan.host) - set(executor.host) == {"tp_layer_s", "selective_s"}
    assert executor.host["fsdp_layer_s"] == titan.host["fsdp_layer_s"]
    assert executor.kernel_factor == titan.kernel_factor
    assert own.runtime("meshwright", compiled=False).kernel_factor == 1.2


@pytest.mark.nightly  # plans of such a runtime cost the same: test_like_runtime.py
def test_layers_of_a_runtime_like_another_say_the_same_as_of_that_other() -> None:
    """The very runs, as if the executor had made them: it has fewer launches, and a layer takes its host as long."""
    measured = eager_titan()
    own = [dataclasses.replace(sample, runtime={**sample.runtime, "name": "meshwright"}) for sample in measured.layers]
    as_own = calibrated(dataclasses.replace(measured, layers=tuple(own)), cluster())
    assert as_own is not None

    def second_layer(calibration: Calibration, name: str) -> float:
        one, two = (
            estimate_plans(
                Scenario(
                    model=dataclasses.replace(NARROW, layers=count),
                    cluster=cluster(),
                    workload=workload(Plan(dp_shard=2), 256),
                    runtime=Runtime(name=name),
                    calibration=calibration,
                ),
                [Plan(dp_shard=2)],
            ).breakdown_s["host"][0]
            for count in (3, 4)
        )
        return float(two - one)

    # What the two are described as differs, and half a cost's distance from its description is left where runs scatter.
    assert second_layer(as_own, "meshwright") == pytest.approx(second_layer(shipped(4), "torchtitan"), rel=0.1)


def test_the_executor_runs_torchtitans_operators_but_for_rotary_positions_fused_norms_and_exchanged_heads() -> None:
    titan, executor = (runtime_spec(name) for name in ("torchtitan", "meshwright"))
    rotary = {"rotary", "rotary_kernel"}

    def others(spec: RuntimeSpec) -> list[OperatorSpec]:
        # What context parallelism exchanges and merges is the executor's own; autocast leaves its norms fused.
        own = ("to_heads", "to_tokens", "kv_", "merge_", "qk_norm", "cast_norms")
        return [op for op in spec.layer.attention if op.name not in rotary and not op.name.startswith(own)]

    def passes(spec: RuntimeSpec) -> tuple[str, ...]:
        return next(op.reads for op in spec.layer.attention if op.name in rotary and "!compiled" in op.when)

    assert others(executor) == others(titan)
    assert passes(executor) == ("t q", "t kv")
    assert len(passes(titan)) == 4
    assert executor.recompute == titan.recompute
    assert executor.host.plain_tensors
    assert not titan.host.plain_tensors


def test_calls_of_overlap_modes_follow_the_speed_of_the_host_unless_they_were_measured() -> None:
    costs = {("meshwright", False): RuntimeCosts(host_speed=1.5, runs=1)}
    known = Calibration(gpu=cluster().slowest_kind, runtimes=costs)

    assert overlap_of(known).rates.host_s == pytest.approx(1.5 * SiteRates().rates.host_s)
    assert overlap_of(dataclasses.replace(known, overlap=SiteRates(source="fitted"))).rates == SiteRates().rates


def test_a_gaussian_update_adds_precisions() -> None:
    """Information of independent observations adds up: the inverse covariance after is P^-1 + H' R^-1 H."""
    rng = np.random.default_rng(7)
    root = rng.normal(size=(4, 4))
    prior, seen, noise = root @ root.T + np.eye(4), rng.normal(size=(3, 4)), np.array([0.1, 1.0, 2.0])

    after = conditioned(prior, seen, noise)

    information = np.linalg.inv(prior) + seen.T @ np.diag(noise**-2.0) @ seen
    assert after == pytest.approx(np.linalg.inv(information), rel=1e-9)
    assert conditioned(prior, seen[:0], noise[:0]) == pytest.approx(prior)
