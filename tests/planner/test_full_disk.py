"""A finished answer is shown although its file cannot be written, and the exit code says that it was not."""

import json

import pytest

from topology import codec
from topology.errors import BadInput

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


def test_what_could_not_be_read_again_is_shown_and_not_written(planner, tmp_path) -> None:
    """A micro batch of 2^28 sequences needs more bytes than a plan file may say."""
    out = tmp_path / "plan.json"
    flags = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--dp-shard", "8", "--recompute", "full")

    done = planner("estimate", *flags, "--global-batch", str(1 << 31), "--out", str(out), "--json")

    assert done.returncode == 2
    assert "estimate.memory" in done.stderr
    assert json.loads(done.stdout)["legal"]
    assert not out.exists()
