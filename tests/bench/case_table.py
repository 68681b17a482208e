"""Predicted and measured for case files: the table that later work must lower.

`python tests/bench/case_table.py OUT.json FILE...` prints the tables and writes OUT.json with every row; the explorer
shows that of examples/validation/cases.json.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def main(out: Path, files: list[str]) -> None:
    """Run `planner validate` over all files and write its summary and rows."""
    command = [sys.executable, "-m", "planner", "validate", *files, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(run.stdout)
    lines = [
        "| file | rows | step: mean absolute | bias | worst | held | memory: mean absolute | bias | held | fit |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, summary in {**answer["summary"]["by_file"], "all": answer["summary"]}.items():
        lines.append(summary_line(name, summary))
    lines += ["", *peer_lines(files, answer["rows"])]
    print("\n".join(lines))
    out.write_text(json.dumps(answer, indent=1) + "\n")


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
    options = parser.parse_args()
    main(options.out, options.files)
