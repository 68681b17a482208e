"""Predicted and measured for case files: the table that later work must lower.

`python tests/bench/case_table.py OUT.json FILE...` prints the tables and writes OUT.json with every row, or with those
of its own files if there is one. With `--page`, the table of files, the day and the commit of a page become those of
today. examples/validation/published.md, and cases.json, which the explorer shows:

    python tests/bench/case_table.py examples/validation/cases.json FILE... --page examples/validation/published.md
"""

import argparse
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def main(out: Path, files: list[str], page: Path | None) -> None:
    """Run `planner validate` over all files and write its summary and rows."""
    kept = (
        set(json.loads(out.read_text())["summary"]["by_file"]) if out.exists() else {Path(name).name for name in files}
    )
    answer = validated(files)
    by_file = answer["summary"]["by_file"]
    lines = [
        "| file | rows | step: mean absolute | bias | worst | held | memory: mean absolute | bias | held | fit |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(summary_line(name.removesuffix(".json"), summary) for name, summary in by_file.items()),
    ]
    print("\n".join([*lines, summary_line("all", answer["summary"]), "", *peer_lines(files, answer["rows"])]))
    if kept < set(by_file):
        answer = validated([name for name in files if Path(name).name in kept])
    out.write_text(json.dumps(answer, indent=1) + "\n")
    if page is not None:
        page.write_text(brought_up(page.read_text(), lines))


def validated(files: list[str]) -> dict:
    """Return the answer of `planner validate`."""
    command = [sys.executable, "-m", "planner", "validate", *files, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def brought_up(text: str, lines: list[str]) -> str:
    """Return a page with the lines of its table, its day and its commit replaced."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()
    table = r"^\| file \| rows \| step: .*\n(\|.*\n)+"
    text, tables = re.subn(table, lambda _: "\n".join(lines) + "\n", text, count=1, flags=re.MULTILINE)
    stated = r"on \d{4}-\d\d-\d\d \(commit \w+\)"
    text, dates = re.subn(stated, f"on {datetime.now(tz=UTC).date()} (commit {commit})", text, count=1)
    if not (tables and dates):
        raise SystemExit(f"the page has no table of files, or no `on YYYY-MM-DD (commit ...)`: {tables}, {dates}")
    return text


def summary_line(name: str, summary: dict) -> str:
    """One row of the table of files."""
    step, memory, outcome = summary["step"] or {}, summary["memory"] or {}, summary["outcomes"]
    cells = [
        name,
        str(summary["rows"]),
        plain(step.get("mean_abs")),
        percent(step.get("bias")),
        percent(step.get("worst")),
        plain(step.get("coverage")),
        plain(memory.get("mean_abs")),
        percent(memory.get("bias")),
        plain(memory.get("coverage")),
        f"{outcome['right']}/{outcome['right'] + outcome['wrong']}",
    ]
    return "| " + " | ".join(cells) + " |"


def plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def peer_lines(files: list[str], rows: list[dict]) -> list[str]:
    """What other predictors said of the same rows, where the case files hold it."""
    ours = {row["id"]: (row["error"] or {}).get("step") for row in rows}
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name in files:
        for case in json.loads(Path(name).read_text()):
            for peer, said in (case.get("peers") or {}).items():
                theirs = said.get("time_err_pct", said.get("error_pct"))
                if theirs is not None and ours.get(case["id"]) is not None:
                    errors.setdefault((Path(name).name, peer), []).append((abs(theirs) / 100, abs(ours[case["id"]])))
    lines = [
        "Other predictors on the same rows:",
        "",
        "| file | predictor | rows | theirs | ours |",
        "|---|---|--:|--:|--:|",
    ]
    for (name, peer), pairs in errors.items():
        theirs, mine = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        lines.append(f"| {name} | {peer} | {len(pairs)} | {theirs:.1%} | {mine:.1%} |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    main(options.out, options.files, options.page)
