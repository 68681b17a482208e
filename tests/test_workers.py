"""`pytest -n` counts every test once, wherever it ran and however its process ended."""

import subprocess
import sys

FILES = {
    "conftest.py": """
import os, pytest

@pytest.fixture(scope="session")
def once():
    return os.getpid()
""",
    "test_a.py": """
import os, warnings

def test_warns():
    warnings.warn("of one")

def test_dies():
    os._exit(3)

def test_after():
    pass
""",
    "test_b.py": """
import pytest

def test_fails():
    assert 1 == 2

@pytest.mark.skip(reason="as it says")
def test_skipped():
    pass
""",
    "test_c.py": """
import os

def test_one(once):
    assert once == os.getpid()

def test_other(once):
    assert once == os.getpid()
""",
}


def run(folder, *options: str) -> subprocess.CompletedProcess[str]:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.workers", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["--rootdir", folder, *options, folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_test_has_one_result(tmp_path) -> None:
    done = run(tmp_path, "-n", "2", "-ra")

    assert "2 failed, 4 passed, 1 skipped, 1 warning" in done.stdout
    assert "the process of this test died, exit code 3" in done.stdout
    assert "as it says" in done.stdout
    assert "of one" in done.stdout
    assert done.returncode == 1


def test_the_first_failure_ends_the_run_if_asked(tmp_path) -> None:
    done = run(tmp_path, "-n", "1", "-x")

    assert "stopping after 1 failures" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
