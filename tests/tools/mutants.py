"""Which faults do the quick tests find? Draws lines of the product, changes a sign, a factor or a comparison in each.

    python tests/tools/mutants.py draw --lines 50 --seed 1 --out mutants.json
    python tests/tools/mutants.py reach mutants.json -- -q tests/simulator tests/planner   # which tests run which line
    python tests/tools/mutants.py find mutants.json --budget-s 60                          # which of these fail

`reach` runs pytest once in a copy of the repository in which every drawn expression reports that it runs. `find` makes
one change after another, each in a process forked after collection, and runs the tests that reach it, the fastest
first, until one fails or the budget of CPU seconds ends. What is evaluated when a module is imported stays unchanged.
Both keep what they found in the file; `find` asks again only for changes that were not found.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ("simulator", "planner")
SWITCH = "__mutant__"
SIGNS = {ast.Add: "-", ast.Sub: "+"}
FACTORS = {ast.Mult: "/", ast.Div: "*"}
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}

# Imported by every Python process of a run: the expression of change K asks `__mutant__(K)` whether it is the changed
# one. A process that only listens notes each change once a test.
LISTENER = """
import builtins, os
_seen, _on, _notes = set(), os.environ.get("MUTANT"), os.environ.get("MUTANT_NOTES")
def _switch(number):
    if _on is not None:
        return _on == str(number)
    test = os.environ.get("MUTANT_TEST", "")
    if _notes and (test, number) not in _seen:
        _seen.add((test, number))
        with open(_notes, "a") as file:
            file.write(f"{number}\\t{test}\\n")
    return False
builtins.__mutant__ = _switch
"""
PLUGIN = """
import builtins, json, os, resource, time, pytest
from _pytest.runner import runtestprotocol
def _cpu():
    return sum(os.times()[:4])
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    os.environ["MUTANT_TEST"] = item.nodeid
    before = _cpu()
    yield
    with open(os.environ["MUTANT_SECONDS"], "a") as file:
        file.write(f"{_cpu() - before:.3f}\\t{item.nodeid}\\n")
def _first_failure(items, seconds):
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    for item, following in zip(items, [*items[1:], None]):
        if any(report.failed for report in runtestprotocol(item, nextitem=following, log=False)):
            return item.nodeid
    return ""
@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    if "MUTANT_TESTS" not in os.environ:
        return None
    known = {item.nodeid: item for item in session.items}
    for number, (seconds, tests) in json.load(open(os.environ["MUTANT_TESTS"])).items():
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            builtins.__mutant__ = lambda asked: asked == int(number)
            os.environ["MUTANT"] = number
            os.write(writer, _first_failure([known[test] for test in tests if test in known], seconds).encode())
            os._exit(0)
        os.close(writer)
        found = open(reader).read()
        status = os.waitpid(child, 0)[1]
        with open(os.environ["MUTANT_FOUND"], "a") as file:
            file.write(json.dumps([number, found or ("its CPU seconds" if status else "")]) + "\\n")
    return True
"""


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def changed(node: ast.AST, source: str) -> str | None:
    """Return the changed text of an expression, or None where there is nothing to change."""

    def text(part: ast.expr) -> str:
        return ast.get_source_segment(source, part) or ""

    if isinstance(node, ast.BinOp) and not (is_text(node.left) or is_text(node.right)):
        operator = {**SIGNS, **FACTORS}.get(type(node.op))
        return operator and f"({text(node.left)}) {operator} ({text(node.right)})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return text(node.operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        return f"({text(node.left)}) {COMPARISONS[type(node.ops[0])]} ({text(node.comparators[0])})"
    return None


def drawn(lines: int, seed: int) -> list[dict]:
    """Return one change for each of some lines, drawn among all that have an expression to change."""
    places = defaultdict(list)
    for package in CORE:
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text("utf-8")
            for node in ast.walk(ast.parse(source)):
                new = changed(node, source)
                if new is not None and node.lineno == node.end_lineno:
                    place = (str(path.relative_to(ROOT)), node.lineno)
                    places[place].append((node.col_offset, node.end_col_offset, new))
    draw = random.Random(seed)
    found = []
    for number, (path, line) in enumerate(draw.sample(sorted(places), lines)):
        start, end, new = draw.choice(sorted(places[path, line]))
        old = (ROOT / path).read_text("utf-8").splitlines()[line - 1].encode()[start:end].decode()
        found.append({"number": number, "path": path, "line": line, "start": start, "end": end, "old": old, "new": new})
    return found


def copied(mutants: list[dict], folder: Path) -> Path:
    """Copy the repository, with a switch around every drawn expression."""
    copy = folder / "repository"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)  # some tests list the files of the repository
    subprocess.run(["git", "add", "."], cwd=copy, check=True)
    for mutant in mutants:
        path = copy / mutant["path"]
        lines = path.read_text("utf-8").split("\n")
        line = lines[mutant["line"] - 1].encode()
        if line[mutant["start"] : mutant["end"]].decode() != mutant["old"]:
            raise SystemExit(f"{mutant['path']} has changed since the lines were drawn")
        switch = f"(({mutant['new']}) if {SWITCH}({mutant['number']}) else ({mutant['old']}))"
        lines[mutant["line"] - 1] = (line[: mutant["start"]] + switch.encode() + line[mutant["end"] :]).decode()
        path.write_text("\n".join(lines), "utf-8")
        ast.parse(path.read_text("utf-8"))
    (copy / "sitecustomize.py").write_text(LISTENER, "utf-8")  # here, since tests start processes with this path alone
    (copy / "mutants_plugin.py").write_text(PLUGIN, "utf-8")
    return copy


def pytest(copy: Path, arguments: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in the copy."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    paths = {"PYTHONPATH": str(copy), "MUTANT_SECONDS": str(copy.parent / "seconds")}
    command = [sys.executable, "-m", "pytest", "-p", "mutants_plugin", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=copy, env={**os.environ, **threads, **paths, **more}, capture_output=True, text=True, check=False
    )


def reach(document: dict, arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(document["mutants"], Path(folder))
        notes = Path(folder) / "notes"
        notes.touch()
        print(pytest(copy, arguments, MUTANT_NOTES=str(notes)).stdout[-3000:])
        seconds = [line.split("\t", 1) for line in (Path(folder) / "seconds").read_text("utf-8").splitlines()]
        document["seconds"] = {test: float(second) for second, test in seconds}
        reached = [line.split("\t", 1) for line in notes.read_text("utf-8").splitlines()]
        for mutant in document["mutants"]:
            mutant["tests"] = sorted({test for number, test in reached if int(number) == mutant["number"]})


def find(document: dict, budget_s: float, only: list[int]) -> None:
    seconds, asked = document["seconds"], {}
    for mutant in document["mutants"]:
        if mutant.get("found") or (only and mutant["number"] not in only):
            continue
        chosen, spent = [], 0.0
        for second, test in sorted((seconds.get(test, 0.0), test) for test in mutant["tests"] if test):
            if chosen and spent + second > budget_s:
                break
            chosen.append(test)
            spent += second
        mutant["asked"] = len(chosen)
        asked[str(mutant["number"])] = (int(60 + 4 * spent), chosen)
    with tempfile.TemporaryDirectory() as folder:
        changes = [mutant for mutant in document["mutants"] if str(mutant["number"]) in asked]
        copy, tests, found = copied(changes, Path(folder)), Path(folder) / "tests", Path(folder) / "found"
        tests.write_text(json.dumps(asked), "utf-8")
        found.touch()
        files = sorted({test.split("::")[0] for _, chosen in asked.values() for test in chosen})
        files = [name for name in files if (copy / name).exists()]
        done = pytest(copy, ["-q", "-p", "no:xdist", *files], MUTANT_TESTS=str(tests), MUTANT_FOUND=str(found))
        print(done.stdout[-1000:])
        answers = dict(json.loads(line) for line in found.read_text("utf-8").splitlines())
    for mutant in document["mutants"]:
        mutant["found"] = answers.get(str(mutant["number"]), mutant.get("found", ""))
        change = f"{mutant['old']} -> {mutant['new']}"
        tried = f"{mutant.get('asked', 0)} of {len(mutant['tests'])}"
        print(mutant["number"], mutant["path"], mutant["line"], change, tried, mutant["found"] or "NOT FOUND", sep="\t")
    print(sum(bool(mutant["found"]) for mutant in document["mutants"]), "of", len(document["mutants"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw")
    draw.add_argument("--lines", type=int, default=50)
    draw.add_argument("--seed", type=int, default=1)
    draw.add_argument("--out", type=Path, required=True)
    for name in ("reach", "find"):
        command = commands.add_parser(name)
        command.add_argument("file", type=Path)
        if name == "reach":
            command.add_argument("arguments", nargs="*", help="of pytest, after --")
        else:
            command.add_argument("--budget-s", type=float, default=60.0, help="CPU seconds of tests for each change")
            command.add_argument("--only", type=int, nargs="*", default=[], help="numbers of changes")
    asked = parser.parse_args()
    if asked.command == "draw":
        document, file = {"seed": asked.seed, "mutants": drawn(asked.lines, asked.seed)}, asked.out
    else:
        document, file = json.loads(asked.file.read_text("utf-8")), asked.file
    try:
        if asked.command == "reach":
            reach(document, asked.arguments)
        elif asked.command == "find":
            find(document, asked.budget_s, asked.only)
    finally:
        file.write_text(json.dumps(document, indent=1), "utf-8")


if __name__ == "__main__":
    main()
