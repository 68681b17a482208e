"""How soon `tune` finds the best of recorded runs, compared with other ways of choosing trials.

    python3 tests/bench/tune_regret.py OUT.md CASES.json...        needs Optuna (the dev extra), no GPU

Every file's runs are put together by question (model, cluster, workload, number of GPUs); questions of which fewer than
eight plans were recorded or fewer than four measured are left out. Methods and regret are those of
tests/bench/tune_rivals.py. Nothing of what tune believes was adjusted on these runs one by one; its prior ranges were
learned from whole sources, some of them among these (examples/validation/intervals.md).
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from planner.question.cases import read_cases  # noqa: E402 - the path comes first
from planner.tune.runners.recorded_trials import RecordedQuestion, recorded_questions  # noqa: E402
from tests.bench.tune_rivals import COUNTS, METHODS, Curve, curves  # noqa: E402

LEAST_PLANS, LEAST_MEASURED = 8, 4
CAPTION = """Regret is how much longer a step of the best plan tried so far takes than that of the best recorded plan of its question. Before
any trial a plan is taken by prediction, or at random where a method has none. A trial that fails counts as one; while nothing
was measured, the regret is that of the slowest recorded plan. TPE is Optuna's, with three random trials first, mean of 20
seeds; random search and successive halving are means of 200 draws. Successive halving spends the GPU seconds of as many whole
trials, of which most are the start of processes. Files hold more of the published runs than tests/data/cases does."""


def questions(name: str) -> list[RecordedQuestion]:
    """Return the questions of a file that have enough plans."""
    return [
        one
        for one in recorded_questions(read_cases(name)[0])
        if len(one.recorded) >= LEAST_PLANS
        and sum(seen.step_s is not None for seen in one.recorded.values()) >= LEAST_MEASURED
    ]


def rows(found: dict[str, dict[str, Curve]], how: str) -> list[str]:
    """Return a line a method: the mean or the median over questions."""
    reduce = mean if how == "mean" else median
    return [
        f"| {method} | {' | '.join(f'{reduce([one[method][count] for one in found.values()]):.1%}' for count in COUNTS)} |"
        for method in METHODS
    ]


def main(out: Path, files: list[str]) -> None:
    head = [f"| method | {' | '.join(f'after {count}' for count in COUNTS)} |", f"|---|{'--:|' * len(COUNTS)}"]
    names = ", ".join(Path(name).name for name in files)
    lines = [
        "# Tuning over recorded runs: regret by trials",
        "",
        f"Made on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by `python tests/bench/tune_regret.py FILE...` over {names}.",
        "",
        CAPTION,
    ]
    each = []
    for name in files:
        found: dict[str, dict[str, Curve]] = {}
        for one in questions(name):
            found[one.name] = curves(one)
            failed = sum(seen.step_s is None for seen in one.recorded.values())
            each += [
                f"| {one.name} | {len(one.recorded)} | {failed} | {method} "
                f"| {' | '.join(f'{found[one.name][method][count]:.1%}' for count in COUNTS)} |"
                for method in METHODS
            ]
            print(
                one.name, {method: curve for method, curve in found[one.name].items() if method == "tune"}, flush=True
            )
        lines += ["", f"## {Path(name).name}", ""]
        if not found:
            lines += [f"No question has {LEAST_PLANS} recorded plans of which {LEAST_MEASURED} were measured."]
            continue
        lines += [f"Mean over {len(found)} questions:", "", *head, *rows(found, "mean")]
        lines += ["", "Median:", "", *head, *rows(found, "median")]
    lines += ["", "## Every question", ""]
    lines += [f"| question | plans | failed | method | {' | '.join(f'after {count}' for count in COUNTS)} |"]
    lines += [f"|---|--:|--:|---|{'--:|' * len(COUNTS)}", *each]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    main(options.out, options.files)
