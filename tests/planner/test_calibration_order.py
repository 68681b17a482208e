"""What a calibration measures first: posteriors against Gaussian conditioning on samples, orders against brute
force.
"""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.calibrate.agenda import Wanted, agenda_for, made_of
from planner.calibrate.calibration_request import Request
from planner.calibrate.choose import Knowledge, Measurement, Targets, in_order, targets_of_differences
from planner.calibrate.measurements import FEW_WORDS, PossibleMeasurements, job_of, messages, ops_of, shallow
from planner.calibrate.planned_step import PlannedStep
from planner.calibrate.terms import effects, terms_of
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import Calibration
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.catalog.cluster_file import load_cluster
from topology.profile.profile import Profile
from topology.profile.samples import OperatorSample

MACHINE = load_cluster("h200x4")


def measurement(seen: list[list[float]], seconds: float = 1.0, noise: float = 0.1, ranks: int = 1) -> Measurement:
    rows = np.array(seen)
    return Measurement(
        name="m", request=Request(), ranks=ranks, seconds=seconds, seen=rows, noise=np.full(len(rows), noise)
    )


def step(plan: Plan, *, model: str = "llama3.2-1b", seq_len: int = 2048, runtime: str = "torchtitan") -> PlannedStep:
    return PlannedStep(
        model=load_model(model),
        plan=plan,
        workload=Workload(seq_len=seq_len, global_batch_size=16),
        runtime=Runtime(name=runtime),
    )


def test_what_is_left_after_a_measurement_is_what_drawing_shows() -> None:
    """Of 400,000 draws of three errors, those for which a sum came out near zero scatter as the posterior says."""
    random = np.random.default_rng(1)
    draws = random.standard_normal((400_000, 3))
    row = np.array([0.8, -0.5, 0.1])
    shown = draws @ row + 0.3 * random.standard_normal(len(draws))
    near = draws[np.abs(shown) < 0.02]
    knowledge = Knowledge.of_nothing(3)

    knowledge.measure(measurement([row.tolist()], noise=0.3))

    np.testing.assert_allclose(knowledge.covariance, np.cov(near.T), atol=0.03)


@given(
    st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=1, max_size=4),
    st.lists(st.floats(-1, 1), min_size=3, max_size=3),
)
def test_measuring_never_makes_less_sure(rows: list[list[float]], target: list[float]) -> None:
    knowledge, targets = Knowledge.of_nothing(3), Targets(rows=np.array([target]), weights=np.ones(1))
    for row in rows:
        before = targets.variance(knowledge.covariance)
        knowledge.measure(measurement([row]))

        assert targets.variance(knowledge.covariance) <= before + 1e-9


def test_the_first_measurement_narrows_most_a_second() -> None:
    """Against all orders of three: the first is that of the order which is surest after the first job, a second."""
    targets = Targets(rows=np.array([[1.0, 0.4, 0.2]]), weights=np.ones(1))
    some = [measurement([[1, 0, 0]], 8.0), measurement([[0, 1, 0]], 0.5), measurement([[0, 0, 1]], 1.0)]

    chosen = in_order(some, targets, Knowledge.of_nothing(3), gpus=1, budget_s=100)

    def rate(order: tuple[Measurement, ...]) -> float:
        after = Knowledge.of_nothing(3).after(order[0])
        return (targets.variance(np.eye(3)) - targets.variance(after)) / order[0].seconds

    best = max(permutations(some), key=rate)
    assert chosen[0].measurement is best[0]
    assert [one.after for one in chosen] == sorted((one.after for one in chosen), reverse=True)
    assert all(one.before > one.after for one in chosen)


def test_what_shows_nothing_is_left_out_and_the_budget_is_kept() -> None:
    targets = Targets(rows=np.array([[1.0, 0.0]]), weights=np.ones(1))
    some = [measurement([[0, 1]]), measurement([[1, 0]], 30.0), measurement([[0.5, 0]], 4.0, ranks=2)]

    chosen = in_order(some, targets, Knowledge.of_nothing(2), gpus=4, budget_s=3.0)

    assert [one.measurement for one in chosen] == [some[2]], "4 s on two of four GPUs are 2 s, 30 s on one are 7.5"


def test_plans_far_behind_the_first_count_less() -> None:
    effects_of = np.array([[0.1, 0.0], [0.0, 0.1], [0.0, 0.1]])

    near, far, own = targets_of_differences(effects_of, np.array([1.0, 1.05, 2.0])).weights

    assert near > 0.5 > own > far


def test_effects_are_those_of_the_prediction() -> None:
    """Raising a term's cost by its spread through the description itself changes the predicted step as much."""
    one = step(Plan(tp=4, sequence_parallel=True))
    terms = terms_of([one.plan], [one.runtime], ops_of([messages(one, MACHINE)]))
    scenario = Scenario(model=one.model, cluster=MACHINE, workload=one.workload, runtime=one.runtime)

    found, table = effects(scenario, [one.plan], terms)

    by_name = dict(zip((term.name for term in terms), found[0], strict=True))
    parts = {name: float(seconds[0] / table.step_s[0]) for name, seconds in table.breakdown_s.items()}
    assert by_name["clipping and updating"] == pytest.approx(0.25 * parts["optimizer"])
    assert by_name["host, torchtitan: a layer's tensor parallelism"] > 0.1, "a small model waits for DTensor operators"
    assert by_name["this host's speed"] > by_name["host, torchtitan: a layer's tensor parallelism"]


def test_messages_of_a_step_are_its_collectives() -> None:
    """FSDP 4 of a 1B model gathers each layer's 61 M parameters in bfloat16, and reduces them in float32."""
    found = messages(step(Plan(dp_shard=4)), MACHINE)
    layer = 2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192 + 2 * 2048

    assert ("all_gather", 4, 2 * layer) in found
    assert ("reduce_scatter", 4, 4 * layer) in found


def test_an_agenda_measures_what_the_plans_differ_by_and_not_what_is_known() -> None:
    plans = (Plan(dp_shard=4), Plan(tp=4, sequence_parallel=True))
    wanted = Wanted(steps=tuple(step(plan) for plan in plans), choice=True)

    agenda = agenda_for(wanted, MACHINE, None, gpus=4, budget_s=120)

    names = [one.measurement.name for one in agenda.chosen]
    assert any("tp 4" in name for name in names)
    assert not any("CP" in name or "EP" in name for name in names)
    assert agenda.spread_after([one.measurement for one in agenda.chosen]) < 0.6 * agenda.spread_after([])
    assert sum(one.measurement.seconds * one.measurement.ranks / 4 for one in agenda.chosen) <= 120
    jobs = agenda.jobs()
    assert all(job["kind"] in {"layers", "operators", "collectives", "contention", "overlap"} for job in jobs)


def test_what_a_profile_has_is_not_measured_again() -> None:
    plans = (Plan(dp_shard=4), Plan(dp_shard=2, tp=2, sequence_parallel=True))
    steps = tuple(step(plan, model="llama3-8b", seq_len=8192) for plan in plans)
    first = agenda_for(Wanted(steps=steps, choice=True), MACHINE, None, gpus=4, budget_s=120)
    operators = [one for job in first.jobs() if job["kind"] == "operators" for one in job["items"]]
    profile = Profile(
        machine="m", gpu="h200-sxm", operators=tuple(OperatorSample(**one, seconds=1e-4) for one in operators)
    )

    again = agenda_for(first.wanted, MACHINE, profile, gpus=4, budget_s=120)

    assert operators
    assert not [one for job in again.jobs() if job["kind"] == "operators" for one in job["items"] if one in operators]
    assert again.spread_after(again.known) < first.spread_after(first.known)
    assert {one.name for one in made_of(first, profile)} == {
        one.measurement.name for one in first.chosen if one.measurement.request.operators
    }


def test_what_was_not_measured_is_told_with_what_it_could_change() -> None:
    wanted = Wanted(steps=(step(Plan(dp_shard=4)), step(Plan(tp=4, sequence_parallel=True))), choice=True)
    agenda = agenda_for(wanted, MACHINE, None, gpus=4, budget_s=120)

    assumed = agenda.assumed([])
    left = {one.name: one for one in assumed}
    after = {one.name for one in agenda.assumed([one.measurement for one in agenda.chosen])}

    assert assumed == sorted(assumed, key=lambda one: (one.decides, abs(one.change)), reverse=True)
    assert left["host, torchtitan: a layer's tensor parallelism"].plan == "tp 4"
    assert left["host, torchtitan: a layer's tensor parallelism"].spread == pytest.approx(
        np.expm1(1.2816 * np.hypot(0.4, np.log1p(0.35 / 7.8)))
    )
    assert len(after) < len(left)


def test_layers_of_a_runtime_that_is_not_run_here_are_not_measured_as_the_executors() -> None:
    """The executor's own narrow layer tells how quick the host is; what such a runtime's layers cost it stays
    assumed.
    """
    wanted = Wanted(steps=(step(Plan(tp=2, dp_shard=2, sequence_parallel=True), runtime="megatron-lm"),))

    agenda = agenda_for(wanted, MACHINE, None, gpus=4, budget_s=120)

    layers = [one for job in agenda.jobs() if job["kind"] == "layers" for one in job["items"]]
    assert [one["runtime"]["name"] for one in layers] == ["meshwright"]
    assert "operators" in {job["kind"] for job in agenda.jobs()}
    left = {one.name for one in agenda.assumed([one.measurement for one in agenda.chosen])}
    assert "host, megatron-lm: a layer's tensor parallelism" in left
    assert "this host's speed" not in left


def test_measurements_have_names_of_their_own() -> None:
    plans = [
        Plan(dp_shard=4, reshard_after_forward=held, micro_batch_size=size) for held in (True, False) for size in (1, 2)
    ]
    possible = PossibleMeasurements(MACHINE, 4, terms_of([plans[0]], [Runtime()], ["all_gather"]))

    names = [one.name for one in possible.of([step(plan) for plan in plans], [set()] * len(plans))]

    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("micro_batch", "words"), [(8, 128256), (64, FEW_WORDS)])
def test_layers_are_run_with_all_words_where_their_loss_fits(micro_batch: int, words: int) -> None:
    """A head of 128,256 words takes six times as long as a layer here: with fewer words nothing tells of it."""
    asked = step(Plan(micro_batch_size=micro_batch))
    possible = PossibleMeasurements(MACHINE, 1, terms_of([asked.plan], [asked.runtime], []))

    (item,) = (
        one
        for measured in possible.of([asked], [set()])
        for one in measured.request.layers
        if one.model.hidden == asked.model.hidden
    )

    assert item.model.vocab == words


def test_a_job_is_what_the_executor_takes() -> None:
    possible = PossibleMeasurements(
        MACHINE, 4, terms_of([Plan(dp_shard=4)], [Runtime()], ["all_gather"]), Calibration(gpu=MACHINE.slowest_kind)
    )

    asked = step(Plan(dp_shard=4))
    jobs = [job_of(one) for one in possible.of([asked], [messages(asked, MACHINE)])]

    assert {job["kind"] for job in jobs} == {"layers", "operators", "collectives", "contention"}
    assert all(1 <= job["ranks"] <= 4 and job["seconds"] > 0 and job["items"] for job in jobs)


def test_a_shallow_network_has_layers_of_both_windows() -> None:
    """A config may name the layers that attend within a window one by one: a shallow network counts them."""
    named = replace(load_model("mistral-7b"), layers=6, sliding_window=4096, sliding_layers=(0, 1, 2, 4))

    few = shallow(named, 2)

    assert (few.layers, few.windowed_layers) == (2, 2)
    assert shallow(replace(named, sliding_window=0, sliding_layers=6), 2).windowed_layers == 0
