"""What people ask and how they are told no: the command line as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli import main
from tests.planner.conftest import CASES, ROOT

SMALL = ("--model", "llama3.2-1b", "--seq-len", "2048", "--gpus", "8", "--global-batch", "64")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved plan on eight GPUs."""
    path = tmp_path_factory.mktemp("saved") / "plan.json"
    assert main(["suggest", *SMALL, "--top", "1", "--out", str(path)]) == 0
    return path


# --- edges --------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_modules_are_imported_is_130():
    """Ctrl-C before the command has begun ends quietly: here at the import of the command line itself."""
    code = """
import os, signal, sys
from planner import __main__

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "planner.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.exit(__main__.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_no_internal_error(planner, planner_process):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = planner_process("estimate", *SMALL, stdout=full, stderr=subprocess.PIPE)
    saved = planner("suggest", *SMALL, "--top", "1", "--out", "/dev/full")

    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "internal error" not in done.stderr
    assert saved.returncode == 2
    assert "No space left on device" in saved.stderr


def test_a_device_is_written_to_not_replaced(planner, tmp_path):
    """--out /dev/stdout and a named pipe take the plan; they are not exchanged for a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert planner("suggest", *SMALL, "--top", "1", "--out", pipe).returncode == 0

    assert pipe.is_fifo()
    assert json.loads(os.read(reader, 1 << 20))["plan"]
    os.close(reader)


@pytest.mark.parametrize(
    "command", [("suggest", "--out"), ("trace", "--out"), ("explain", "--svg"), ("probe", "--out")]
)
def test_a_missing_folder_is_refused_before_the_work(planner, tmp_path, command):
    """A misspelt folder is neither made in silence nor noticed only after a long search."""
    done = planner(command[0], command[1], tmp_path / "no" / "such" / "file.json")

    assert done.returncode == 2
    assert "there is no folder" in done.stderr
    assert "mkdir -p" in done.stderr
    assert not (tmp_path / "no").exists()


def test_a_validation_that_compared_nothing_has_not_succeeded(planner, tmp_path):
    """Rows that all were skipped, or no rows at all, are no answer."""
    row = json.loads((CASES / "torchtitan_h200x4.json").read_text(encoding="utf-8"))[0]
    row["runtime"]["compute_dtype"] = "float8"
    for name, rows in (("skipped.json", [row]), ("empty.json", [])):
        path = tmp_path / name
        path.write_text(json.dumps(rows), encoding="utf-8")

        assert planner("validate", path).returncode == 3
        assert planner("validate", path, "--tolerance", "10").returncode == 3


@pytest.mark.parametrize("degree", ["dp_shard", "tp", "pp", "micro_batch_size"])
@pytest.mark.parametrize("value", [-1, 0, 10**18])
def test_impossible_numbers_in_files_are_bad_input(planner, tmp_path, saved, degree, value):
    """In a case and in a saved plan, whose numbers are looked at before its fingerprints."""
    plan = json.loads(saved.read_text(encoding="utf-8"))
    plan["plan"][degree] = value
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    case = json.loads((CASES / "torchtitan_h200x4.json").read_text(encoding="utf-8"))[0]
    case["plan"][degree] = value
    (tmp_path / "case.json").write_text(json.dumps(case), encoding="utf-8")

    for arguments in (("--plan", tmp_path / "plan.json"), ("--case", tmp_path / "case.json")):
        done = planner("estimate", *arguments)
        assert done.returncode == 2, done.stderr
        assert degree in done.stderr
