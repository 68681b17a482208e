"""Tuning: beliefs against other computations of the same, choices against what is known to be right, and recorded
runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm, truncnorm

from planner.cli import main
from planner.commands.tune import add_trials
from planner.question.cases import read_cases
from planner.question.question import question_of
from planner.tune.beliefs import NOISE, Belief, believe
from planner.tune.candidates import Candidates, candidates_of
from planner.tune.choice import Best, choose, gain
from planner.tune.loop import MOST_FAILED, Limits, tune
from planner.tune.runners.recorded_trials import Recorded, RecordedTrials, recorded_questions
from planner.tune.sessions.session import require_device, require_here
from planner.tune.state import TuningRequest, read_state, write_new, writing
from planner.tune.stop import outlook
from planner.tune.trials import Status, Trial
from simulator.config.hf_config import load_model
from simulator.config.workload import Workload
from simulator.legality.frameworks import torchtitan_family
from tests.planner.conftest import ROOT, make_cluster
from topology import codec
from topology.errors import BadInput, BadPlan, PlannerError, Stale
from topology.health.diagnose import diagnose

RECORDED = ROOT / "tests" / "data" / "tune" / "vtrain_two_questions.json"  # vTrain's measured runs on eight A100s


@pytest.fixture(scope="module")
def recorded():
    """Recorded plans of one question on eight GPUs."""
    return max(recorded_questions(read_cases(RECORDED)[0]), key=lambda one: len(one.candidates))


@pytest.fixture(scope="module")
def small():
    """The candidates of a small question on eight GPUs, and the question."""
    workload = Workload(seq_len=512, global_batch_size=32)
    question = question_of(load_model("llama3.2-1b"), make_cluster(), workload, framework="meshwright")
    return question, candidates_of(question, fastest=40)


def trial(candidates: Candidates, row: int, step_s: float | None, status: Status = Status.FINISHED, **more) -> Trial:
    return Trial(key=candidates.plans[row].key, status=status, step_s=step_s, **more)


def test_the_posterior_is_that_of_linear_regression() -> None:
    """The same by the other form: precisions add up."""
    draw = np.random.default_rng(3)
    weights, spreads = draw.random((6, 3)), np.array([0.3, 0.1, 0.5])
    prior = Belief(mean=draw.random(6), covariance=(weights * spreads**2) @ weights.T)
    rows, logs, noise = [1, 4], [0.7, 0.2], [0.01, 0.05]

    found = prior.given(rows, logs, noise)

    at = weights[rows]
    precision = np.diag(spreads**-2.0) + at.T @ np.diag(np.square(noise) ** -1.0) @ at
    errors = np.linalg.solve(precision, at.T @ ((np.array(logs) - prior.mean[rows]) / np.square(noise)))
    assert found.mean == pytest.approx(prior.mean + weights @ errors, abs=1e-9)
    assert found.covariance == pytest.approx(weights @ np.linalg.inv(precision) @ weights.T, abs=1e-9)


@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("limit", [-1.0, 0.3, 2.0])
def test_a_limit_that_was_crossed_gives_the_moments_of_the_truncated_gaussian(above: bool, limit: float) -> None:
    belief = Belief(mean=np.array([0.4, 1.0]), covariance=np.array([[0.25, 0.1], [0.1, 0.2]]))

    found = belief.beyond(0, limit, above=above)

    ends = ((limit - 0.4) / 0.5, np.inf) if above else (-np.inf, (limit - 0.4) / 0.5)
    expected = truncnorm(*ends, loc=0.4, scale=0.5)
    assert found.mean[0] == pytest.approx(expected.mean(), rel=1e-6)
    assert found.covariance[0, 0] == pytest.approx(expected.var(), rel=1e-5)
    # The other one moves along its regression on the first: checked on samples.
    draw = multivariate_normal(belief.mean, belief.covariance).rvs(400_000, random_state=1)
    kept = draw[(draw[:, 0] > limit) == above]
    if len(kept) > 2000:
        assert found.mean[1] == pytest.approx(kept[:, 1].mean(), abs=0.02)


def test_before_any_trial_plans_are_as_wide_as_their_predicted_ranges(recorded) -> None:
    belief = believe(recorded.candidates, []).step

    for row, one in enumerate(recorded.candidates.plans):
        value, low, high = belief.interval(row)
        said = one.estimate.step_s
        assert value == pytest.approx(said.value)
        assert high / low == pytest.approx(said.high / said.low, rel=1e-6)


def test_a_trial_corrects_plans_that_spend_time_on_the_same_more_than_others(recorded) -> None:
    plans = recorded.candidates
    before = believe(plans, []).step
    row = 0
    slower = plans.plans[row].estimate.step_s.value * 1.15

    after = believe(plans, [trial(plans, row, slower)]).step

    moved = after.mean - before.mean
    share = before.covariance[:, row] / before.covariance[row, row]
    assert moved[row] == pytest.approx(math.log(1.15), rel=0.05)
    assert np.corrcoef(moved, share)[0, 1] > 0.95
    assert (after.spread <= before.spread * 3.01).all()
    assert after.spread[row] < 2 * NOISE


def test_memory_that_ran_out_makes_larger_plans_unlikely_and_none_likelier(small) -> None:
    _, plans = small
    tight = [
        replace(
            one,
            estimate=replace(
                one.estimate,
                memory=replace(one.estimate.memory, capacity_bytes=one.estimate.memory.reserved_bytes * 1.15),
            ),
        )
        for one in plans.plans[:12]
    ]
    plans = Candidates(plans=tuple(tight), legal=12)
    before = believe(plans, [])

    after = believe(plans, [trial(plans, 3, None, Status.OUT_OF_MEMORY)])

    assert after.fits[3] == 0.0
    others = np.arange(12) != 3
    assert (after.fits[others] < before.fits[others]).all()
    # One that fits says the opposite.
    held = plans.plans[3].estimate.memory.reserved_bytes * 0.9
    assert (believe(plans, [trial(plans, 3, 1.0, reserved_bytes=held)]).fits[others] > before.fits[others]).all()


def test_expected_improvement_is_the_mean_over_samples() -> None:
    belief = Belief(mean=np.array([0.1, -0.2]), covariance=np.diag([0.04, 0.01]))

    found = gain(belief, [0, 1], Best(row=5, step_s=1.0))

    draw = np.random.default_rng(0).normal(size=400_000)
    for row in (0, 1):
        logs = belief.mean[row] + math.hypot(belief.spread[row], NOISE) * draw
        assert found[row] == pytest.approx(np.maximum(0.0, -logs).mean(), rel=0.02)


def test_the_chance_that_a_better_plan_is_left_is_that_of_the_one_plan_left(small) -> None:
    _, plans = small
    two = Candidates(plans=plans.plans[:2], legal=2)
    measured = trial(two, 0, two.plans[0].estimate.step_s.value)
    beliefs = believe(two, [measured])

    found = outlook(two, beliefs, [measured], 0.01)

    wanted = math.log(measured.step_s) + math.log1p(-0.01)
    expected = beliefs.runs[1] * norm.cdf((wanted - beliefs.step.mean[1]) / beliefs.step.spread[1])
    assert found.probability == pytest.approx(expected, abs=0.03)
    assert found.candidate == 1


def test_plans_that_may_not_fit_wait_for_those_that_do(small) -> None:
    _, plans = small
    quick, slow = plans.plans[0], plans.plans[1]
    memory = quick.estimate.memory
    doubtful = replace(memory, capacity_bytes=memory.reserved_bytes * 1.01)
    two = Candidates(plans=(replace(quick, estimate=replace(quick.estimate, memory=doubtful)), slow), legal=2)

    first = choose(two, believe(two, []), [], RecordedTrials(recorded={}))

    assert [one.row for one in first] == [1]


def test_what_fails_is_not_tried_again_and_casts_doubt_on_its_likes(small) -> None:
    _, plans = small
    failed = trial(plans, 0, None, Status.FAILED, cause="rank 1: SIGKILL")

    after = believe(plans, [failed])

    assert after.runs[0] == min(after.runs)
    assert all(one.row != 0 for one in choose(plans, after, [failed], RecordedTrials(recorded={})))


def test_no_trial_is_begun_that_cannot_end_but_the_first(small) -> None:
    """A start takes 20 s; what shares one is begun only where all of it ends, too."""
    _, plans = small
    together = RecordedTrials(recorded={}, begin_s=20.0, compile_s=0.0)
    measured = trial(plans, 3, 0.5)
    after = believe(plans, [measured])

    assert choose(plans, believe(plans, []), [], together, left_s=1.0)
    assert choose(plans, after, [measured], together, left_s=19.0) == []
    assert choose(plans, after, [measured], together, left_s=600.0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RecordedTrials, "shares_start", lambda *_: True)
        counts = [len(choose(plans, believe(plans, []), [], together, left_s=left_s)) for left_s in (21.0, 1e6)]
    assert counts[0] == 1
    assert counts[1] > 1


def drawn_truth(plans: Candidates, seed: int) -> dict[str, Recorded]:
    """Return steps drawn from what is believed before any trial."""
    belief = believe(plans, []).step
    logs = multivariate_normal(belief.mean, belief.covariance, allow_singular=True).rvs(random_state=seed)
    return {one.key: Recorded(step_s=math.exp(log)) for one, log in zip(plans.plans, logs, strict=True)}


def test_where_beliefs_are_right_the_stop_is_right_as_often_as_it_says(small) -> None:
    """A better plan by 1 % is left in at most a few of the tunings that ended for want of one."""
    plans = Candidates(plans=small[1].plans[:20], legal=20)
    wrong, used = 0, []
    for seed in range(24):
        truth = drawn_truth(plans, seed)
        view = tune(plans, RecordedTrials(recorded=truth), Limits(budget_s=math.inf))
        least = min(one.step_s for one in truth.values())
        wrong += least < view.best.step_s * 0.99
        used.append(len(view.trials))

    assert wrong <= 3  # 5 % of 24, and what chance adds
    assert np.mean(used) < 0.5 * len(plans)


def test_recorded_runs_are_searched_in_fewer_trials_than_by_chance(recorded) -> None:
    view = tune(recorded.candidates, RecordedTrials(recorded=recorded.recorded), Limits(budget_s=math.inf, trials=6))

    steps = np.array([one.step_s for one in recorded.recorded.values() if one.step_s])
    draw = np.random.default_rng(0)
    by_chance = np.mean([draw.permutation(steps)[: len(view.trials)].min() for _ in range(500)])
    assert view.best.step_s <= 1.01 * recorded.best_s < by_chance


def test_a_budget_ends_a_tuning(recorded) -> None:
    clock = iter(np.arange(0.0, 1e6, 40.0))

    view = tune(
        recorded.candidates,
        RecordedTrials(recorded=recorded.recorded),
        Limits(budget_s=100.0, within=0.0),
        clock=lambda: next(clock),
    )

    assert view.reason == "the budget ended"
    assert len(view.trials) <= 3


# --- the state
# ---------------------------------------------------------------------------------------------------------


def begun(path, small) -> Candidates:
    question, plans = small
    asked = TuningRequest(
        model=question.model,
        cluster=question.cluster,
        workload=question.workload,
        runtime=question.runtime,
        framework=question.framework.name,
        gpus=question.count,
        budget_s=60.0,
        within=0.01,
        legal=plans.legal,
    )
    write_new(path, asked, plans)
    return plans


def test_a_state_is_read_as_it_was_written(tmp_path, small) -> None:
    plans = begun(tmp_path / "state", small)
    made = [trial(plans, 0, 0.5, seconds=12.0, why="quick"), trial(plans, 2, None, Status.TIMEOUT, cause="it hung")]
    with writing(tmp_path / "state") as journal:
        for one in made:
            journal.ended(one)

    found = read_state(tmp_path / "state")

    assert found.trials == tuple(made)
    assert [one.plan for one in found.candidates.plans] == [one.plan for one in plans.plans]
    first, again = (believe(known, made).step.interval(1) for known in (plans, found.candidates))
    assert first == pytest.approx(again)


def test_a_state_of_a_release_whose_plans_had_fewer_fields_is_read(tmp_path, small) -> None:
    plans = begun(tmp_path / "state", small)
    head, *lines = map(json.loads, (tmp_path / "state").read_text().splitlines())
    for line in lines:
        assert line["plan"].pop("ep_overlap") == "none"
    key = codec.fingerprint((lines[0]["plan"], lines[0]["runtime"]))
    lines.append({"kind": "trial", **codec.to_builtins(replace(trial(plans, 0, 0.5), key=key))})
    (tmp_path / "state").write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))

    found = read_state(tmp_path / "state")

    assert key != plans.plans[0].key
    assert [one.key for one in found.trials] == [plans.plans[0].key]


def test_nothing_but_a_torn_last_line_is_lost_wherever_a_writer_is_killed(tmp_path, small) -> None:
    path = tmp_path / "state"
    plans = begun(path, small)
    with writing(path) as journal:
        journal.ended(trial(plans, 0, 0.5))
        whole = len(path.read_bytes())
        journal.ended(trial(plans, 1, 0.6))
    content = path.read_bytes()
    for length in range(whole, len(content), 37):
        path.write_bytes(content[:length])
        assert [one.step_s for one in read_state(path).trials] == [0.5]
        with writing(path) as journal:
            journal.ended(trial(plans, 2, 0.7))
        assert [one.step_s for one in read_state(path).trials] == [0.5, 0.7]


def test_two_tunings_do_not_write_one_state(tmp_path, small) -> None:
    begun(tmp_path / "state", small)
    with writing(tmp_path / "state"), pytest.raises(PlannerError, match="another process"), writing(tmp_path / "state"):
        pass


@pytest.mark.parametrize("text", ["", "{}\n", '{"kind":"tuning"}\n', "[1]\n", "x\n"])
def test_what_is_no_state_is_refused(tmp_path, text: str) -> None:
    (tmp_path / "state").write_text(text)
    with pytest.raises(BadInput):
        read_state(tmp_path / "state")


# --- the command
# -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_trials(tmp_path_factory):
    """A tuning of two trials: its state, and the document that it printed."""
    state = tmp_path_factory.mktemp("tuning") / "state.jsonl"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["tune", "--recorded", str(RECORDED), "--state", str(state), "--trials", "2", "--json"]) == 0
    return state, json.loads(out.getvalue())


def test_the_command_answers_as_its_contract_says_and_resumes(two_trials, tmp_path, planner) -> None:
    state, document = shutil.copy(two_trials[0], tmp_path), two_trials[1]

    more = planner("tune", "--resume", str(state), "--trials", "4", "--within", "0", "--json")

    assert more.returncode == 0, more.stderr
    resumed = json.loads(more.stdout)
    assert {"schema_version", "trials", "best", "stop", "profile"} <= set(document)
    for one in document["trials"]:
        assert {"plan", "predicted_s", "measured_s", "status", "seconds"} <= set(one)
        assert set(one["predicted_s"]) == {"value", "low", "high"}
    assert document["best"]["measured_s"] == min(one["measured_s"] for one in document["trials"])
    assert 0 <= document["stop"]["better_exists_probability"] <= 1
    assert [one["plan"] for one in resumed["trials"][:2]] == [one["plan"] for one in document["trials"]]
    assert len(resumed["trials"]) <= 4


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--objective", "memory", "--model", "tiny-llama"), 2),
        (("--budget", "soon", "--model", "tiny-llama", "--cluster", "h200x4"), 2),
        ((), 2),
        (("--model", "llama3-405b", "--cluster", "h200x4", "--gpus", "1", "--device", "cpu"), 3),
        (("--recorded", RECORDED, "--trials", "1", "--submit"), 2),
    ],
)
def test_questions_that_cannot_be_tuned_are_refused(flags, code: int, tmp_path, planner) -> None:
    done = planner("tune", *flags, "--state", str(tmp_path / "state"))

    assert done.returncode == code, done.stderr


def test_a_state_is_shown_without_a_trial_more(two_trials, tmp_path, planner) -> None:
    state, page = two_trials[0], tmp_path / "report.html"
    before = state.read_text()

    done = planner("tune", "--resume", str(state), "--show", "--html", str(page), "--json")

    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["trials"]) == 2
    assert state.read_text() == before
    assert page.read_text().count("<tr>") > 3
    assert "<script" not in page.read_text()


def test_a_trial_without_operators_is_said_to_be_left_out_of_the_profile(recorded, tmp_path) -> None:
    found = add_trials(
        [trial(recorded.candidates, 0, 0.5, directory=str(tmp_path / "trial-001"))], tmp_path / "profile.json"
    )

    assert len(found) == 1
    assert "left out" in found[0]


def test_trials_that_all_fail_end_a_tuning_before_its_budget(small) -> None:
    """Then it is not the plans: a library is missing, or the machine is broken."""
    _, plans = small
    broken = {one.key: Recorded(step_s=None, status=Status.FAILED) for one in plans.plans}

    view = tune(plans, RecordedTrials(recorded=broken), Limits(budget_s=math.inf))

    assert view.best is None
    assert len(view.trials) == MOST_FAILED
    assert "none was measured" in view.reason


def test_a_tuning_for_another_machine_is_stale(small) -> None:
    question, _ = small
    asked = TuningRequest(
        **{name: getattr(question, name) for name in ("model", "cluster", "workload", "runtime")},
        framework="meshwright",
        gpus=8,
        budget_s=60.0,
        within=0.01,
    )
    four = make_cluster(gpus_per_node=4)

    with pytest.raises(Stale, match="another machine"):
        require_here(asked, four, diagnose(four), allow_busy=False)


def test_a_network_that_torchtitan_has_not_is_refused_before_any_trial(small) -> None:
    """Its Llama ties no embedding to the head: each trial of such a model would start processes to say so."""
    question, _ = small
    parts = {name: getattr(question, name) for name in ("cluster", "workload", "runtime")}
    asked = TuningRequest(
        **parts, model=load_model("llama3.2-1b"), framework="torchtitan", gpus=8, budget_s=60.0, within=0.01
    )

    with pytest.raises(BadPlan, match="this model ties them"):
        require_device(asked)
    assert [torchtitan_family(load_model(name)) for name in ("llama3-8b", "qwen3-8b")] == ["llama3", "qwen3"]


def test_candidates_are_the_fastest_plans_and_the_fastest_of_every_family(small) -> None:
    """So that something is left to try where a whole family of plans fails."""
    question, plans = small
    found = candidates_of(question, fastest=5)
    steps = [one.estimate.step_s.value for one in found.plans]

    def degrees(one):
        return tuple(getattr(one.plan, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp"))

    assert steps == sorted(steps)
    assert {degrees(one) for one in plans.plans} <= {degrees(one) for one in found.plans}
    assert len({degrees(one) for one in found.plans}) > 5
    assert all(question.legal(one.plan) for one in found.plans)
