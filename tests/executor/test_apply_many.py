"""Several runs with one start: each has its own report, and one that fails takes none of the others with it."""

import json
from dataclasses import replace

import pytest

from executor.launch.request import Request
from executor.run import apply_many
from executor.run.apply_many import Run, batches, run_many
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from tests.executor import forked_ranks
from topology import codec

pytest.importorskip("torch", reason="torch is not installed: plans cannot be run")
pytestmark = pytest.mark.slow

SMALL = replace(load_model("tiny-llama"), layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256)


def run_of(tmp_path, name: str, plan: Plan, **changes) -> Run:
    request = Request(
        plan=plan,
        model=replace(SMALL, name=name),
        workload=Workload(seq_len=32, global_batch_size=4),
        runtime=Runtime(param_dtype="float32", compute_dtype="float32"),
        device="cpu",
        steps=2,
        warm_up=1,
        profile=False,
        start_timeout_s=30,
        collective_timeout_s=30,
        **changes,
    )
    path = tmp_path / f"{name}.request.json"
    path.write_text(codec.to_json(request))
    return Run(request=request, path=path, out=tmp_path / name)


def test_runs_of_equal_meshes_share_processes(tmp_path) -> None:
    """Other groups would keep their communicators' memory alongside those of the next."""
    plans = {
        "a": Plan(dp_shard=2),
        "b": Plan(),
        "c": Plan(tp=2),
        "d": Plan(dp_shard=2, recompute="full"),
        "e": Plan(ep=2, dp_shard=2),
    }
    runs = [run_of(tmp_path, name, plan) for name, plan in plans.items()]

    assert [[run.path.name[0] for run in batch] for batch in batches(runs)] == [["a", "d"], ["b"], ["c"], ["e"]]


def test_a_run_that_fails_takes_none_of_the_others_with_it(tmp_path, monkeypatch) -> None:
    """What all ranks found wrong together is no reason to end them: it costs its check and no start of processes.

    Ranks are forked; test_tune_runs.py runs several plans under the agent.
    """
    monkeypatch.setattr(apply_many, "MODULE", "tests.executor.workers.wrong_and_failing_worker")
    launched = []

    def launch(*words, **more):
        launched.append(forked_ranks.launch(*words, **more))
        return launched[-1]

    monkeypatch.setattr(apply_many, "launch", launch)
    plans = {
        "first": Plan(dp_shard=2),
        "wrong": Plan(dp_shard=2),
        "again": Plan(dp_shard=2, recompute="full"),
        "bad": Plan(dp_shard=2),
        "last": Plan(tp=2, micro_batch_size=2),
    }
    runs = [run_of(tmp_path, name, plan) for name, plan in plans.items()]
    reported = []

    documents = run_many(runs, 480, lambda run, document: reported.append((run.out.name, document["status"])))

    ends = ("finished", "wrong_numbers", "finished", "failed", "finished")
    assert reported == list(zip(plans, ends, strict=True))
    assert len(launched) == 2
    assert sum(one["seconds"] for one in documents[:4]) <= launched[0].seconds, "the one that failed counts its own"
    wrong = documents.pop(1)
    assert (wrong["exit_code"], wrong["measured"]["steps"], wrong["missing"]) == (1, 0, [])
    assert "this one ends its processes" in documents[2]["failure"]["message"]
    kept = json.loads((tmp_path / "last" / "run.json").read_text())
    assert kept["measured"]["steps"] == 2
    assert kept["mesh"]["effective"]["axes"]["tp"] == 2
    # The same weights and batches: what shares a process computes what it would alone.
    losses = [document["measured"]["losses"] for document in documents]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_what_there_is_no_time_for_has_no_report(tmp_path) -> None:
    runs = [run_of(tmp_path, name, Plan(dp_shard=2)) for name in ("one", "two")]

    documents = run_many(runs, 0.5)

    assert [document["status"] for document in documents] == ["timeout"]
    assert not (tmp_path / "two" / "run.json").exists()
