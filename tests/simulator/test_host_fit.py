"""What single layers say of hosts: every sample of a profile is predicted back, and costs that made runs are found in
them.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import Calibration, RuntimeCosts
from simulator.config.model import MixtureOfExperts, Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.fitting.calibration_fit import calibrated
from simulator.fitting.host_fit import REFERENCE_S, HostAlone, HostRuns, fit_hosts, host_alone, usual_costs
from simulator.fitting.runtime_fit import run_of
from simulator.lowering.simulation import simulate_plan
from simulator.runtimes.library import runtime_spec
from simulator.step.host import SLOWEST, slowest
from topology import codec
from topology.catalog.cluster_file import load_cluster
from topology.catalog.clusters import cluster
from topology.cluster import Cluster
from topology.profile.profile import Profile, read_profile
from topology.profile.samples import HostSample, LayerSample

PROFILES = Path(__file__).parents[2] / "examples" / "profiles"
TITAN = runtime_spec("torchtitan").host
MACHINE = load_cluster("h200x4")


@cache
def measured(name: str) -> tuple[Profile, Cluster, Calibration]:
    """Return a kept profile, the machine it was taken on, and what is calibrated by it."""
    profile = read_profile(PROFILES / f"{name}.json")
    machine = cluster("dgx-h100", 4) if name.startswith("h100") else MACHINE
    known = calibrated(profile, machine)
    assert known is not None
    return profile, machine, known


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("h100x4_draw2", 8),
        ("h200x4_draw3", 18),
        pytest.param("h200x4_draw1", 16, marks=pytest.mark.nightly),
        pytest.param("h200x2_next", 40, marks=pytest.mark.nightly),
    ],
)
def test_a_calibration_tells_its_own_samples_back(name, own) -> None:
    """Runs of one and two layers of our executor: within 7 % in the mean and 25 % each; of torchtitan, whose ranks wait
    for the slowest of their data loaders on top, within 25 % each.
    """
    profile, machine, known = measured(name)
    missed = {"meshwright": [], "torchtitan": []}
    for sample in profile.layers:
        run = run_of(sample)
        assert run is not None
        scenario = Scenario(
            model=run.model, cluster=machine, workload=run.workload, runtime=run.runtime, calibration=known
        )
        step_s = float(estimate_plans(scenario, [run.plan]).step_s[0])
        missed[run.runtime.name].append(abs(step_s / sample.step_s - 1))

    assert len(missed["meshwright"]) == own
    assert np.mean(missed["meshwright"]) < 0.07
    assert max(missed["meshwright"]) < 0.25
    assert max(missed["torchtitan"], default=0.0) < 0.25


def runs_of(costs: dict[str, float], kinds: list[dict[str, float]]) -> HostRuns:
    """Return runs whose steps are sums of `costs`, each as often as a kind says, and 0.2 ms that no host decides."""

    def seconds(place: int, host) -> float:
        return 0.2e-3 + sum(often * host[name] for name, often in kinds[place].items())

    return HostRuns(
        described=TITAN,
        seconds=np.array([seconds(place, costs) for place in range(len(kinds))]),
        spreads=np.zeros(len(kinds)),
        occurring=[frozenset(kind) for kind in kinds],
        predict=lambda places, hosts: np.array([seconds(*run) for run in zip(places, hosts, strict=True)]),
    )


PLAIN = [{"launch_s": 60.0 * layers, "rest_s": 1.0} for layers in (1, 2)]
SHARDED = [{**run, "fsdp_layer_s": layers, "fsdp_rest_s": 1.0} for layers, run in zip((1.0, 2.0), PLAIN, strict=True)]


def test_costs_that_made_runs_are_found_in_them() -> None:
    truth = usual_costs(TITAN) | {"launch_s": 40e-6, "fsdp_layer_s": 6e-3, "fsdp_rest_s": 3e-3, "rest_s": 4e-3}

    found = fit_hosts([runs_of(truth, [*PLAIN, *SHARDED])]).costs[0]

    for name in ("launch_s", "fsdp_layer_s"):
        assert found[name] == pytest.approx(truth[name], rel=0.1)
    for one, two in (("backward_launch_s", "launch_s"), ("dtensor_launch_s", "launch_s")):
        assert found[one] == found[two]


def test_what_was_not_run_is_as_described_at_the_speed_of_the_host() -> None:
    """Layers took twice as long as described: so will those that are cut, which nobody ran."""
    slow = {name: 2 * value for name, value in usual_costs(TITAN).items()}

    fit = fit_hosts([runs_of(slow, [*PLAIN, *SHARDED])])

    assert 1.5 < fit.speed < 2.2
    assert fit.costs[0]["tp_layer_s"] == pytest.approx(fit.speed * TITAN.tp_layer_s, rel=0.01)


def test_a_runtime_without_runs_is_as_slow_as_the_host_that_others_showed() -> None:
    """Two hosts have narrow layers of our executor alone, and one of them is quicker than any other that is
    described.
    """
    profile, machine, known = measured("h100x4_draw2")
    _, _, quick = measured("h200x2_next")
    run = run_of(next(sample for sample in profile.layers if sample.model["hidden"] == 512))
    assert run is not None

    def host_s(calibration) -> float:
        scenario = Scenario(
            model=run.model,
            cluster=machine,
            workload=run.workload,
            runtime=Runtime(name="pytorch"),
            calibration=calibration,
        )
        return float(estimate_plans(scenario, [run.plan]).breakdown_s["host"][0])

    described = dataclasses.replace(known, runtimes={})
    faster = dataclasses.replace(known, runtimes=quick.runtimes)
    assert quick.host_speed < min(known.host_speed, 1.0)
    assert host_s(faster) < min(host_s(known), host_s(described))


def narrow_steps() -> list[tuple[Model, Plan, Workload, Runtime]]:
    """One and two narrow layers on one GPU, under FSDP, with experts, and of two stages."""
    dense = Model(
        name="n",
        family="qwen3",
        layers=1,
        hidden=512,
        heads=8,
        kv_heads=8,
        head_dim=64,
        ffn=1024,
        vocab=1024,
        qk_norm=True,
    )
    sparse = dataclasses.replace(dense, moe=MixtureOfExperts(experts=8, experts_per_token=2, ffn=256))
    found = []
    for model, plan, counts in (
        (dense, Plan(), (1, 2)),
        (dense, Plan(dp_shard=4), (1, 8)),
        (dense, Plan(dp_replicate=4), (1, 8)),
        (sparse, Plan(dp_shard=4), (1, 2)),
        (sparse, Plan(dp_shard=4, ep=4), (1, 2)),
        (dense, Plan(dp_shard=2, pp=2, schedule="1F1B"), (2,)),
    ):
        workload = Workload(seq_len=256, global_batch_size=plan.data_parallel * (4 if plan.pp > 1 else 1))
        runtime = Runtime(name="torchtitan", logs_each_step=True)  # samples are of single steps
        found += [(dataclasses.replace(model, layers=layers), plan, workload, runtime) for layers in counts]
    return found


def step_s(parts: tuple[Model, Plan, Workload, Runtime], known: Calibration) -> float:
    model, plan, workload, runtime = parts
    scenario = Scenario(model=model, cluster=MACHINE, workload=workload, runtime=runtime, calibration=known)
    return float(estimate_plans(scenario, [plan]).step_s[0])


def sample_of(parts: tuple[Model, Plan, Workload, Runtime], seconds: float, **more: float) -> LayerSample:
    names = ("model", "plan", "workload", "runtime")
    return LayerSample(**{n: codec.to_builtins(p) for n, p in zip(names, parts, strict=True)}, step_s=seconds, **more)


def slowest_load_s(parts: tuple[Model, Plan, Workload, Runtime], usual_s: float) -> float:
    """Return how long the slowest rank of a run loads data where the usual one takes `usual_s`."""
    return float(slowest(np.array([float(parts[1].gpus)]), TITAN.data_spread)[0]) * usual_s


def test_loading_that_runs_tell_of_is_no_cost_of_their_hosts() -> None:
    """Layers as described, whose loading took twenty times as long as described, and was reported: the host is as
    described. Ranks wait for the slowest of them, of which the one that tells is not one.
    """
    gpu, steps = Calibration(gpu=MACHINE.slowest_kind), narrow_steps()[:4]
    silent = {("torchtitan", False): RuntimeCosts(host={"data_token_s": 0.0})}
    samples = tuple(
        sample_of(
            parts, step_s(parts, dataclasses.replace(gpu, runtimes=silent)) + slowest_load_s(parts, 10e-3), data_s=10e-3
        )
        for parts in steps
    )

    found = calibrated(Profile(machine="m", gpu=MACHINE.slowest_kind.name, layers=samples), MACHINE)

    costs = found.runtime("torchtitan", compiled=False).host
    assert found.host_speed == pytest.approx(1.0, rel=0.01)
    assert costs["launch_s"] == pytest.approx(TITAN.launch_s, rel=0.01)
    assert costs["rest_s"] + costs["step_s"] == pytest.approx(TITAN.rest_s + TITAN.step_s, rel=0.01)


def test_hosts_of_experts_and_pipelines_are_found_though_described_as_nothing() -> None:
    """Steps of narrow layers as a host makes them that takes 4 ms for a layer's experts, 0.8 ms for a stage's pass, and
    3 ms more for a step under DDP.
    """
    true = {"ep_layer_s": 4e-3, "pp_pass_s": 0.8e-3, "ddp_rest_s": 3e-3}
    gpu = Calibration(gpu=MACHINE.slowest_kind)
    host = dataclasses.replace(gpu, runtimes={("torchtitan", False): RuntimeCosts(host=true)})
    samples = tuple(sample_of(parts, step_s(parts, host)) for parts in narrow_steps())

    found = calibrated(Profile(machine="m", gpu=MACHINE.slowest_kind.name, layers=samples), MACHINE)

    costs = found.runtime("torchtitan", compiled=False).host
    assert costs["ep_layer_s"] == pytest.approx(4e-3, rel=0.2)
    assert costs["pp_pass_s"] == pytest.approx(0.8e-3, rel=0.25)
    assert costs["ddp_rest_s"] == pytest.approx(3e-3, rel=0.25)
    assert costs["launch_s"] == pytest.approx(TITAN.launch_s, rel=0.1)
    for parts, sample in zip(narrow_steps(), samples, strict=True):
        assert step_s(parts, found) == pytest.approx(sample.step_s, rel=0.06)


def test_the_simulation_and_the_sums_have_the_same_pipeline_host() -> None:
    """A stage whose passes are so short that its host decides: 8 micro batches, each with one forward and one
    backward.
    """
    parts = (*narrow_steps()[-1][:2], Workload(seq_len=256, global_batch_size=16), Runtime(name="torchtitan"))
    gpu = Calibration(gpu=MACHINE.slowest_kind)

    def both(seconds: float) -> tuple[float, float]:
        known = dataclasses.replace(gpu, runtimes={("torchtitan", False): RuntimeCosts(host={"pp_pass_s": seconds})})
        model, plan, workload, runtime = parts
        scenario = Scenario(model=model, cluster=MACHINE, workload=workload, runtime=runtime, calibration=known)
        return step_s(parts, known), simulate_plan(scenario, plan).estimate.step_s.value

    (sums, simulated), (more_sums, more_simulated) = both(0.0), both(2e-3)

    assert more_simulated - simulated == pytest.approx(2 * 8 * 2e-3, rel=0.3)
    assert more_sums - sums == pytest.approx(more_simulated - simulated, rel=0.3)


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_the_slowest_of_several_ranks_is_the_expected_largest(ranks: int) -> None:
    drawn = 1.0 + 0.2 * np.random.default_rng(0).standard_normal((40_000, ranks))

    assert slowest(np.array([float(ranks)]), 0.2)[0] == pytest.approx(drawn.max(axis=1).mean(), abs=0.01)


def test_no_rank_is_slower_than_any_that_was_timed() -> None:
    assert slowest(np.array([1.0, 1024.0]), 0.7).tolist() == [1.0, SLOWEST]


def test_a_cpu_alone_says_how_slow_the_host_is_and_what_dtensors_cost_there() -> None:
    """Twice the reference is twice both; and steps that wait for DTensors follow, from no run on any GPU."""
    samples = tuple(HostSample(name=name, seconds=2 * seconds) for name, seconds in REFERENCE_S.items())
    usual = host_alone([HostSample(name=name, seconds=seconds) for name, seconds in REFERENCE_S.items()])
    slow = host_alone(samples)
    assert slow is not None
    assert usual is not None
    assert slow.speed / usual.speed == pytest.approx(2.0)
    assert slow.dtensors / usual.dtensors == pytest.approx(2.0)
    assert host_alone(samples[:1]) is None

    known = calibrated(Profile(machine="m", gpu=MACHINE.slowest_kind.name, host=samples), MACHINE)
    assert known is not None
    assert not known.gpu_measured
    model = Model(
        name="m", family="llama", layers=8, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=2048, vocab=32000
    )

    def step_s(calibration: Calibration | None) -> float:
        scenario = Scenario(
            model=model,
            cluster=MACHINE,
            workload=Workload(seq_len=512, global_batch_size=1),
            runtime=Runtime(),
            calibration=calibration,
        )
        return float(estimate_plans(scenario, [Plan(tp=4, sequence_parallel=True)]).step_s[0])

    assert step_s(known) / step_s(None) == pytest.approx(slow.dtensors, rel=0.1)


def test_what_the_cpu_showed_is_where_a_fit_begins() -> None:
    """A run that no tensor parallelism is in leaves that as the CPU alone has it."""
    names = ("launch_s", "rest_s")
    usual = usual_costs(TITAN)

    def predict(places, hosts):
        return np.array([100 * host["launch_s"] + host["rest_s"] for host in hosts])

    runs = HostRuns(
        described=TITAN,
        seconds=np.array([100 * usual["launch_s"] + usual["rest_s"]]),
        spreads=np.array([0.02]),
        occurring=[frozenset(names)],
        predict=predict,
    )
    alone = HostAlone(speed=1.0, dtensors=1.5)

    assert fit_hosts([runs], alone).costs[0]["tp_layer_s"] == pytest.approx(1.5 * TITAN.tp_layer_s, rel=0.01)
    assert fit_hosts([], alone).speed == 1.0
