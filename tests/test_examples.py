"""The examples run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))


@pytest.fixture(scope="module")
def path_with_planner(tmp_path_factory) -> str:
    """A folder whose `planner` is this checkout's, whether or not it is installed."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "planner"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m planner "$@"\n')
    command.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_example_runs(script: Path, path_with_planner: str) -> None:
    run = subprocess.run(
        ["sh", str(script)],
        cwd=ROOT,
        env={**os.environ, "PATH": path_with_planner, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    assert run.stdout or script.name.startswith("5_")


def test_every_example_is_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()

    assert SCRIPTS
    assert all(f"`{script.name}`" in listed for script in SCRIPTS)
