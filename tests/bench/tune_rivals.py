"""What other ways of choosing trials find in recorded runs, compared with `tune`: regret after so many trials.

Regret is how much longer the best plan measured so far takes than the best recorded. Before any trial a plan is chosen
by prediction, or at random where a method has none. Trials that fail count as trials. While nothing was measured, the
regret is that of the slowest recorded plan. TPE (Optuna) chooses among the plans that were recorded: its point is moved
to the nearest one that is untried, and it begins with three random ones instead of its ten. Successive halving spends
the GPU seconds of as many whole trials: a first round of two steps each on random plans, half of which go on with twice
as many steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import mean

from planner.tune.loop import Limits, tune
from planner.tune.runners.recorded_trials import START_S, STEPS, RecordedQuestion, RecordedTrials
from simulator.config.plan import Plan

COUNTS = (0, 1, 2, 4, 8)
DRAWS = 200  # of methods that are random
TPE_DRAWS = 20
FIELDS = ("dp_replicate", "dp_shard", "zero_stage", "tp", "cp", "pp", "ep", "virtual_stages", "micro_batch_size")
WORDS = ("recompute", "schedule", "tp_overlap", "reshard_after_forward", "cp_method", "sequence_parallel")

Curve = dict[int, float]  # regret after so many trials


def curves(question: RecordedQuestion) -> dict[str, Curve]:
    """Return the regret of each method on a question."""
    return {name: method(question) for name, method in METHODS.items()}


def _steps(question: RecordedQuestion) -> list[float | None]:
    """Return the recorded steps in the order of prediction; None where a run failed."""
    return [question.recorded[one.key].step_s for one in question.candidates.plans]


def _regret(question: RecordedQuestion, tried: Sequence[float | None], count: int) -> float:
    """Return the regret after the first `count` of the trials."""
    timed = [step for step in tried[:count] if step is not None]
    worst = max(step for step in _steps(question) if step is not None)
    return (min(timed) if timed else worst) / question.best_s - 1


def _curve(question: RecordedQuestion, tried: Sequence[float | None], first: float) -> Curve:
    return {count: first if count == 0 else _regret(question, tried, count) for count in COUNTS}


def _averaged(found: Sequence[Curve]) -> Curve:
    return {count: mean(one[count] for one in found) for count in COUNTS}


def by_tune(question: RecordedQuestion) -> Curve:
    """Run the loop itself, without its stop."""
    view = tune(
        question.candidates,
        RecordedTrials(recorded=question.recorded),
        Limits(budget_s=float("inf"), trials=max(COUNTS), within=-1e9),
    )
    return _curve(question, [trial.step_s for trial in view.trials], _regret(question, _steps(question), 1))


def by_prediction(question: RecordedQuestion) -> Curve:
    """Take the best predicted and run nothing: the same after any number of trials."""
    return dict.fromkeys(COUNTS, _regret(question, _steps(question), 1))


def in_predicted_order(question: RecordedQuestion) -> Curve:
    """Try the plans in the order of their prediction."""
    return _curve(question, _steps(question), _regret(question, _steps(question), 1))


def by_chance(question: RecordedQuestion) -> Curve:
    """Try plans at random."""
    steps = _steps(question)
    draws = [random.Random(seed).sample(steps, len(steps)) for seed in range(DRAWS)]
    return _averaged([_curve(question, tried, _regret(question, tried, 1)) for tried in draws])


def by_tpe(question: RecordedQuestion) -> Curve:
    """Let Optuna's tree-structured Parzen estimator choose."""
    return _averaged([_tpe(question, seed) for seed in range(TPE_DRAWS)])


def _tpe(question: RecordedQuestion, seed: int) -> Curve:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    plans = [one.plan for one in question.candidates.plans]
    steps = _steps(question)
    worst = max(step for step in steps if step is not None)
    choices = {name: sorted({str(getattr(plan, name)) for plan in plans}) for name in (*FIELDS, *WORDS)}
    varied = {name: values for name, values in choices.items() if len(values) > 1}
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=3)
    study = optuna.create_study(sampler=sampler)
    left, tried = list(range(len(plans))), []
    draw = random.Random(seed)
    while left and len(tried) < max(COUNTS):
        asked = study.ask({name: optuna.distributions.CategoricalDistribution(v) for name, v in varied.items()})
        row = min(left, key=lambda one: (_away(plans[one], asked.params), draw.random()))
        left.remove(row)
        tried.append(steps[row])
        # It learns of the plan that was run, not of the point that it asked for.
        study.add_trial(
            optuna.trial.create_trial(
                params={name: str(getattr(plans[row], name)) for name in varied},
                distributions={name: optuna.distributions.CategoricalDistribution(v) for name, v in varied.items()},
                value=steps[row] or 2 * worst,
            )
        )
        study.tell(asked, state=optuna.trial.TrialState.FAIL)
    return _curve(question, tried, _regret(question, [draw.choice(steps)], 1))


def _away(plan: Plan, point: dict[str, str]) -> int:
    return sum(str(getattr(plan, name)) != value for name, value in point.items())


def by_halving(question: RecordedQuestion) -> Curve:
    """Successive halving with the GPU seconds of as many whole trials."""
    steps = _steps(question)
    typical = mean(step for step in steps if step is not None)
    found = []
    for seed in range(DRAWS):
        order = random.Random(seed).sample(steps, len(steps))
        one = {0: _regret(question, order, 1)}
        for count in COUNTS[1:]:
            one[count] = _regret(question, order, _first_round(count, len(order), typical))
        found.append(one)
    return _averaged(found)


def _first_round(count: int, most: int, step_s: float) -> int:
    """Return how many plans a first round may have, so that all rounds take no more than `count` whole trials."""
    budget = count * (START_S + STEPS * step_s)
    fitting = 1
    for number in range(1, most + 1):
        cost, left, taken = 0.0, number, 2
        while left >= 1:
            cost += left * (START_S + taken * step_s)
            if taken >= STEPS:
                break
            left, taken = left // 2, 2 * taken
        if cost <= budget:
            fitting = number
    return fitting


METHODS: dict[str, Callable[[RecordedQuestion], Curve]] = {
    "tune": by_tune,
    "prediction alone": by_prediction,
    "in predicted order": in_predicted_order,
    "random search": by_chance,
    "Optuna TPE": by_tpe,
    "successive halving": by_halving,
}
