"""What choosing by prediction costs: in groups of measured runs of one question, the predicted best against the best.

Run as `python tests/bench/regret.py OUT.md FILE...` with case files. A group shares model, cluster and workload; runs
differ in plan, and where the source varied it in the runtime too. Where runs of the very same plan and runtime differ,
the source varied something that only its notes say (float8), and the group is listed apart. Regret is how much longer
the run that an answer lists first took than the fastest, both as measured: of plans that the model cannot tell apart
the simplest. Next to it is that of the run predicted to be fastest; Kendall's tau compares the two orders.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planner.question.cases import Case, load_case, read_cases
from planner.search.finalists import TIE, Finalist, in_order
from planner.validate.validation import measured_step_s
from simulator.legality.rules import is_legal
from topology import codec
from topology.errors import PlannerError

NOISE = 1.05  # runs of one plan and runtime are within this factor
Run = tuple[Case, float]  # and its measured step


def groups(files: list[str]) -> dict[tuple[str, ...], list[Run]]:
    """Return runs by (file, model, cluster, workload); those that cannot be compared are left out."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for name in files:
        for raw in read_cases(name)[0]:
            try:
                case = load_case(raw)
            except PlannerError:
                continue
            step, _ = measured_step_s(case)
            problems = case.question.problems(case.plan)
            if step is None or not is_legal(problems):
                continue
            # Names are the cases' own: what makes a question the same is what they describe.
            model = codec.fingerprint(replace(case.question.model, name="", assumed=()))
            cluster = codec.fingerprint(replace(case.question.cluster, name=""))
            key = (Path(name).name, model, cluster, codec.fingerprint(case.question.workload))
            found.setdefault(key, []).append((case, step))
    return {key: runs for key, runs in found.items() if len(runs) > 1}


def confounded(runs: list[Run]) -> bool:
    """Return whether runs of one stated plan and runtime differ: what they varied is in a note, not in the case."""
    same: dict[str, list[float]] = {}
    for case, step in runs:
        same.setdefault(codec.fingerprint(case.plan) + codec.fingerprint(case.question.runtime), []).append(step)
    return any(max(steps) > NOISE * min(steps) for steps in same.values())


def regrets(runs: list[Run], finalists: list[Finalist]) -> tuple[float, float]:
    """Return the regret of the plan that an answer lists first, and of the one predicted to be fastest."""
    measured = [step for _, step in runs]
    fastest = min(finalists, key=lambda one: one.estimate.step_s.value)
    first = in_order(finalists, "step")[0]
    places = [
        next(i for i, one in enumerate(finalists) if one.estimate is chosen.estimate) for chosen in (first, fastest)
    ]
    listed, of_fastest = (measured[i] / min(measured) - 1 for i in places)
    return listed, of_fastest


def kendall(first: list[float], second: list[float]) -> float:
    """Return Kendall's tau-a of two lists of values."""
    pairs = list(itertools.combinations(range(len(first)), 2))
    agree = sum((first[i] - first[j]) * (second[i] - second[j]) > 0 for i, j in pairs)
    against = sum((first[i] - first[j]) * (second[i] - second[j]) < 0 for i, j in pairs)
    return (agree - against) / len(pairs)


def main(out: Path, files: list[str]) -> None:
    """Write the table of all groups."""
    rows = []
    for (name, *_), runs in groups(files).items():
        measured = [step for _, step in runs]
        finalists = [
            Finalist(plan=case.plan, estimate=case.question.estimate([case.plan]).estimate(0)) for case, _ in runs
        ]
        listed, of_fastest = regrets(runs, finalists)
        rows.append(
            {
                "file": name,
                "first": runs[0][0].id,
                "runs": len(runs),
                "confounded": confounded(runs),
                "regret": listed,
                "of_fastest": of_fastest,
                "tau": kendall([one.estimate.step_s.value for one in finalists], measured),
            }
        )
    names = ", ".join(Path(f).name for f in files)
    said = (
        f"Made on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by `python tests/bench/regret.py {out} FILE...` over {names}. A"
        " group is all runs of one model, cluster and global batch. Regret is how much longer the run took that an answer"
        f" from datasheets lists first: of plans within {TIE:.0%} of the fastest, which the model cannot tell apart, the"
        " simplest. The next two columns are of the run predicted to be fastest; tau is Kendall's, over all runs of the"
        " group."
    )
    lines = [
        "# Regret: the plan that an answer lists first against the best measured",
        "",
        textwrap.fill(said, 120, break_on_hyphens=False),
        "",
        "| groups | number | mean regret | worst | of the fastest | worst | mean tau |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for title, some in (
        ("groups of plans", [row for row in rows if not row["confounded"]]),
        ("groups that vary what no field of the case states (float8, compiled)", [r for r in rows if r["confounded"]]),
        ("all", rows),
        *((name, [row for row in rows if row["file"] == name]) for name in dict.fromkeys(row["file"] for row in rows)),
    ):
        if some:
            n = len(some)
            shown = [
                f"{sum(row[name] for row in some) / n:.1%} | {max(row[name] for row in some):.1%}"
                for name in ("regret", "of_fastest")
            ]
            tau = sum(row["tau"] for row in some) / n
            lines.append(f"| {title} | {n} | {' | '.join(shown)} | {tau:.2f} |")
    lines += [
        "",
        "| file | first run of the group | runs | regret | of the fastest | tau |",
        "|---|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {r['file']} | {r['first']} | {r['runs']} | {r['regret']:.1%} | {r['of_fastest']:.1%} | {r['tau']:.2f} |"
        for r in rows
    ]
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    main(options.out, options.files)
