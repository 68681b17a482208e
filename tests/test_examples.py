"""The examples run as they stand."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli import main

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
LONG = {"3_pairs_of_gpus.sh", "5_too_large.sh", "6_how_many_gpus.sh"}  # seconds of search each


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [pytest.param(path, marks=[pytest.mark.nightly] * (path.name in LONG), id=path.name) for path in SCRIPTS]
)
def test_example_runs(script: Path, monkeypatch, capsys) -> None:
    """Its commands one by one in this process; a script has nothing else but the code that the last of them ends
    with.
    """
    monkeypatch.chdir(ROOT)
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    commands = [shlex.split(line) for line in lines if line.startswith("planner ")]
    tested = [re.fullmatch(r"test \$\? -eq (\d+)", line) for line in lines if not line.startswith("planner ")]
    assert all(tested)
    assert len(commands) + len(tested) == len(lines)

    codes = [main(words[1:]) for words in commands]

    assert codes == [0] * len(codes) if not tested else codes == [int(tested[0][1])], capsys.readouterr().err
    assert capsys.readouterr().out or tested


def test_a_script_runs_by_itself(tmp_path) -> None:
    """With a `planner` on the path that is this checkout's, installed or not; by the fastest script."""
    command = tmp_path / "planner"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m planner "$@"\n')
    command.chmod(0o755)
    run = subprocess.run(
        ["sh", str(next(script for script in SCRIPTS if script.name.startswith("7_")))],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    assert run.stdout


def test_every_example_is_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()

    assert SCRIPTS
    assert all(f"`{script.name}`" in listed for script in SCRIPTS)
