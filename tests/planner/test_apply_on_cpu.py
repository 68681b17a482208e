"""planner apply as a process, on CPU ranks: a run, an interrupt, a plan that cannot be run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from planner.question.plan_file import plan_file, save_plan
from planner.question.question import question_of
from planner.search.search import SearchOptions, suggest
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from tests.planner.conftest import ROOT, TINY, make_cluster
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


def start(*arguments: object, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "planner", "apply", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def small_plan_file(content, tmp_path):
    """A plan of two ranks for a model that a CPU runs."""
    model = replace(TINY, hidden=32, head_dim=8, heads=4, kv_heads=2, ffn=64, vocab=128, layers=2)
    result = suggest(
        question_of(model, make_cluster(gpus_per_node=2), Workload(seq_len=64, global_batch_size=4)),
        SearchOptions(top=1),
    )
    small = plan_file(result.question, Plan(pp=2, schedule="1F1B", micro_batch_size=1), result.plans[0].estimate)
    path = tmp_path / "small.json"
    save_plan(small, path)
    return path


def test_a_saved_plan_runs_on_a_cpu(small_plan_file, tmp_path) -> None:
    """Ranks meet at a port that is free, whatever the environment suggests."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        words = ("--device", "cpu", "--steps", "2", "--budget", "200s", "--out", tmp_path / "run", "--json")
        process = start(small_plan_file, *words, **port)
        out, err = process.communicate(timeout=220)

    assert process.returncode == 0, err
    said = json.loads(out)
    assert said["verified"]["ok"]
    assert said["measured"]["steps"] == 2
    assert said["measured"]["tokens_per_s"] > 0
    assert said["measured"]["mfu"] is None
    assert said["mesh"]["effective"]["as_requested"]
    assert said["mesh"]["effective"]["axes"]["pp"] == 2
    assert said["comparison"] is None
    assert said["plan"]["schedule"] == "1F1B"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_one_ctrl_c_ends_it_and_shows_what_there_is(small_plan_file, tmp_path) -> None:
    folder = tmp_path / "run"
    process = start(small_plan_file, "--device", "cpu", "--steps", "1000", "--budget", "200s", "--out", folder)
    beat = folder / "records" / "rank0.beat"
    # Of steps 5, 50 to 59 and 500 to 599 one is seen, however short they are.
    wait_until(lambda: beat.is_file() and '"step 5' in beat.read_text(), 150)

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=90)

    assert process.returncode == 130, err
    assert "interrupted" in out
    assert "partial" in out
    report = json.loads((folder / "run.json").read_text())
    assert (report["status"], report["complete"]) == ("interrupted", False)
    for path in folder.glob("records/rank*.beat"):
        assert not psutil.pid_exists(json.loads(path.read_text())["pid"])


def test_a_plan_that_cannot_be_run_is_bad_input(content, tmp_path) -> None:
    path = tmp_path / "odd.json"
    odd = replace(content.plan, tp=1, pp=1, dp_shard=8, dp_replicate=1, cp=1, virtual_stages=1, recompute="block")
    small = replace(TINY, layers=2, hidden=64, head_dim=8, vocab=128)
    save_plan(plan_file(replace(content.question(), model=small), odd, content.estimate), path)
    process = start(path, "--device", "cpu", "--out", tmp_path / "run")
    _, err = process.communicate(timeout=60)

    assert process.returncode == 2
    assert "recompute 'block'" in err
