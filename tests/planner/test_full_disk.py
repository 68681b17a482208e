"""A finished answer is shown although its file cannot be written, and the exit code says that it was not."""

import json
import shutil

import pytest

from executor.launch.records import Recorder
from topology import codec
from topology.errors import BadInput, ProbeError

SMALL = ("--model", "tiny-llama", "--cluster", "dgx-h100", "--gpus", "2", "--seq-len", "256", "--no-simulate")


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
