"""A finished answer is shown although its file cannot be written, and the exit code says that it was not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from executor.launch.records import Recorder
from topology import codec
from topology.errors import BadInput, ProbeError

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--model", "tiny-llama", "--cluster", "dgx-h100", "--gpus", "1", "--seq-len", "256", "--no-simulate")


@pytest.fixture
def full_disk(monkeypatch):
    def refuse(path, _text):
        raise BadInput(f"cannot write {path}", why="No space left on device")

    monkeypatch.setattr(codec, "write_text", refuse)
    for module in ("planner.commands.probe.save_cluster", "planner.commands.doctor.save_cluster"):
        monkeypatch.setattr(module, lambda _cluster, path: refuse(path, ""))


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("suggest", *SMALL, "--out", "plan.json"), "plans"),
        (("explain", *SMALL[:-1], "--no-flips", "--svg", "x.svg"), "plan"),
        (("probe", "--from", "dgx-h100", "--out", "x.json"), "gpus"),
        (("doctor", "--cluster", "dgx-h100", "--out", "x.json"), "machine"),
    ],
)
def test_the_answer_is_shown_and_the_exit_code_tells(
    planner, full_disk, tmp_path, monkeypatch, arguments, answer
) -> None:
    monkeypatch.chdir(tmp_path)

    done = planner(*arguments, "--json")

    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert json.loads(done.stdout)[answer]
    assert planner(*arguments).stdout


@pytest.mark.parametrize(
    ("free", "folder", "code", "said"), [(2**20, None, 1, "1 MiB free"), (2**40, "/proc/self", 2, "cannot write")]
)
def test_a_calibration_that_could_not_be_kept_is_not_begun(
    planner, tmp_path, monkeypatch, free, folder, code, said
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr("planner.commands.calibrate.run", lambda *_args, **_kwargs: pytest.fail("started"))

    done = planner("calibrate", "--device", "cpu", "--no-store", "--out", f"{folder or tmp_path}/p.json")

    assert done.returncode == code
    assert said in done.stderr


def test_a_record_that_finds_no_room_says_so() -> None:
    recorder = Recorder("/dev/full")
    with pytest.raises(ProbeError, match="No space left on device"):
        recorder.write("header")
    recorder.close()


def test_what_could_not_be_read_again_is_shown_and_not_written(planner, tmp_path) -> None:
    """A micro batch of 2^28 sequences needs more bytes than a plan file may say."""
    out = tmp_path / "plan.json"
    flags = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--dp-shard", "8", "--recompute", "full")

    done = planner("estimate", *flags, "--global-batch", str(1 << 31), "--out", str(out), "--json")

    assert done.returncode == 2
    assert "estimate.memory" in done.stderr
    assert json.loads(done.stdout)["legal"]
    assert not out.exists()


# In namespaces of its own, where mounting needs no rights of the system.
ON_TMPFS = 'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"'


@pytest.fixture
def on_tmpfs(tmp_path):
    """Return what runs the command line with a file system of so many bytes at `tmp_path / "small"`."""
    small = tmp_path / "small"
    small.mkdir()

    def run(size, *words):
        command = [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            ON_TMPFS,
            "sh",
            size,
            str(small),
            *words,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(small / "data")}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)

    if shutil.which("unshare") is None:
        pytest.skip("unshare (util-linux) is not installed")
    tried = run("4k", "true")
    if tried.returncode:
        pytest.skip(f"no file system can be mounted in a namespace here: {tried.stderr.strip()[:100]}")
    return run


def test_a_full_file_system_takes_no_plan_and_keeps_no_piece_of_one(on_tmpfs, tmp_path) -> None:
    script = f'"$@" --out "{tmp_path}/small/plan.json" --json; code=$?; ls -A "{tmp_path}/small" >&2; exit $code'
    suggest = (sys.executable, "-m", "planner", "suggest", *SMALL)

    full, enough = (on_tmpfs(size, "sh", "-c", script, "sh", *suggest) for size in ("4k", "1m"))

    assert full.returncode == 2
    assert json.loads(full.stdout)["plans"]
    assert "No space left on device" in full.stderr
    assert full.stderr.endswith("do: choose another path\n")  # and the folder is empty
    assert enough.returncode == 0
    assert enough.stderr.endswith("plan.json\n")
