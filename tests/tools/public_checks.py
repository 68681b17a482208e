"""`planner check` of the public files of `examples/check/public.json`, as the tables of examples/check/README.md.

    python -m tests.tools.public_checks CLONES [--write] [--only WORD]

CLONES has a git repository OWNER/NAME for each that is named, with the commit. A row is `repo`, `commit`, `path`, the
`flags` of the command, and `stated`: seconds of a step or tokens a second a GPU, as its source says. Where
`changes` is false, none are looked for.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from planner.configs.answer import Checked, check_text
from planner.configs.formats.configuration import CheckFlags
from planner.configs.stated_rate import StatedRate
from topology.errors import PlannerError

ROOT = Path(__file__).resolve().parents[2]
LIST, README = (ROOT / "examples" / "check" / name for name in ("public.json", "README.md"))
FILES = "| project | file | read as | model | verdict | asked | changes |\n|---|---|---|---|---|---|---|\n"
RATES = "| file | asked with | stated | predicted, tokens/s a GPU | error | range | likely cause |\n|---|---|--:|--:|--:|---|---|\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("clones", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    files, rates = "", ""
    for row in json.loads(LIST.read_text()):
        if asked.only not in row["path"]:
            continue
        found = _checked(row, _text(asked.clones, row))
        files += _file_row(row, found)
        if "stated" in row:
            rates += _rate_row(row, found)
        print(_file_row(row, found), end="", flush=True)
    print(rates, end="")
    if asked.write:
        text = README.read_text()
        for head, rows in ((FILES, files), (RATES, rates)):
            text = re.sub(rf"{re.escape(head)}(\|.*\n)*", lambda _, new=head + rows: new, text)
        README.write_text(text)


def _text(clones: Path, row: dict[str, Any]) -> str:
    command = ["git", "-C", str(clones / row["repo"]), "show", f"{row['commit']}:{row['path']}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _checked(row: dict[str, Any], text: str) -> Checked | str:
    rate = None
    stated, flags = row.get("stated"), CheckFlags(**row.get("flags", {}))
    if stated:
        gpus = stated["gpus"]
        rate = StatedRate(
            step_s=stated.get("step_s"), tokens_per_s=stated.get("tokens_per_s_per_gpu", 0) * gpus or None
        )
    try:
        return check_text(text, row["path"], flags, stated_rate=rate, search=False, changes=row.get("changes", True))
    except PlannerError as error:
        return str(error).splitlines()[0]


def _file_row(row: dict[str, Any], found: Checked | str) -> str:
    place = f"| {row['repo']} @ {row['commit']} | `{row['path']}` "
    if isinstance(found, str):
        return f"{place}| - | - | open | {_cell(found)} | - |\n"
    configuration, model = found.configuration, found.configuration.model
    named = "-" if model is None or configuration.no_cost else f"{model.name}, {model.parameters / 1e9:.2f} B"
    verdict = (
        "open" if found.legal is None else "legal" if found.legal else f"not legal: {_cell(found.problems[0].message)}"
    )
    asked = "; ".join(_cell(question.what) for question in found.questions) or "-"
    changes = str(len(found.changes)) if found.found is not None and row.get("changes", True) else "-"
    return f"{place}| {configuration.framework} | {_cell(named)} | {verdict} | {asked} | {changes} |\n"


def _rate_row(row: dict[str, Any], found: Checked | str) -> str:
    stated = row["stated"]
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in row.get("flags", {}).items())
    place = f"| `{row['path'].rpartition('/')[2]}` ({stated['source']}) | {_cell(flags)} "
    if isinstance(found, str) or found.against is None or found.found is None or found.found.estimate is None:
        why = found if isinstance(found, str) else "; ".join(question.what for question in found.questions)
        return f"{place}| {_said(stated)} | - | - | - | {_cell(why)} |\n"
    against, estimate = found.against, found.found.estimate
    causes = "-" if not against.causes else _cell(against.causes[0], 160)
    rate = estimate.tokens_per_s_per_gpu
    return f"{place}| {_said(stated)} | {rate:,.0f} | {-against.error / (1 + against.error):+.0%} | {against.side} | {causes} |\n"


def _said(stated: dict[str, Any]) -> str:
    step = stated.get("step_s")
    return f"{stated['tokens_per_s_per_gpu']:,}" if step is None else f"{step} s a step"


def _cell(text: str, most: int = 110) -> str:
    short = re.sub(r"\s+", " ", text).replace("|", "/")
    return short if len(short) <= most else f"{short[:most]}..."


if __name__ == "__main__":
    main()
