"""Several runs with one start: each has its own report, and one that fails takes none of the others with it."""

import json
from dataclasses import replace

import pytest

from executor import apply_many
from executor.apply_many import Run, batches, run_many
from executor.request import Request
from simulator.hf_config import load_model
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology import codec

torch = pytest.importorskip("torch", reason="torch is not installed: plans cannot be run")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
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


def test_runs_share_processes_where_ranks_and_environment_are_the_same(tmp_path) -> None:
    plans = {"a": Plan(dp_shard=2), "b": Plan(), "c": Plan(tp=2), "d": Plan(cp=2)}
    runs = [run_of(tmp_path, name, plan) for name, plan in plans.items()]

    assert [[run.request.model.name for run in batch] for batch in batches(runs)] == [["a", "c"], ["b"], ["d"]]


def test_a_run_that_fails_takes_none_of_the_others_with_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(apply_many, "MODULE", "tests.executor.workers.one_fails_worker")
    plans = {
        "first": Plan(dp_shard=2),
        "again": Plan(dp_shard=2, recompute="full"),
        "bad": Plan(dp_shard=2),
        "last": Plan(tp=2, micro_batch_size=2),
    }
    runs = [run_of(tmp_path, name, plan) for name, plan in plans.items()]
    told = []

    documents = run_many(runs, 120, lambda run, document: told.append((run.out.name, document["status"])))

    assert told == [("first", "finished"), ("again", "finished"), ("bad", "failed"), ("last", "finished")]
    assert "this one ends its processes" in documents[2]["failure"]["message"]
    kept = json.loads((tmp_path / "last" / "run.json").read_text())
    assert kept["measured"]["steps"] == 2
    assert kept["mesh"]["effective"]["axes"]["tp"] == 2
    # The same weights and batches: what shares a process computes what it would alone.
    losses = [document["measured"]["losses"] for document in documents]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_plans_of_other_meshes_join_anew_and_leave_no_group_behind(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(apply_many, "MODULE", "tests.executor.workers.groups_worker")
    plans = {
        "tensor": Plan(tp=2),
        "sharded": Plan(dp_shard=2),
        "equal": Plan(dp_shard=2, recompute="full"),
        "pipeline": Plan(pp=2, micro_batch_size=1),
        "tensor-again": Plan(tp=2),
    }
    runs = [run_of(tmp_path, name, plan) for name, plan in plans.items()]

    documents = run_many(runs, 240)

    assert [document["status"] for document in documents] == ["finished"] * 5
    assert all(document["verified"]["ok"] for document in documents)
    losses = [document["measured"]["losses"] for document in documents]
    assert all(other == pytest.approx(losses[0], rel=1e-5) for other in losses[1:])
    # A run alone, in a process of its own, has as many groups: those of all earlier plans are gone.
    (alone,) = run_many([run_of(tmp_path, "alone", Plan(pp=2, micro_batch_size=1))], 120)
    assert alone["measured"]["losses"] == losses[3]
    for rank in range(2):
        left = {
            name: json.loads((tmp_path / name / "records" / f"groups{rank}.json").read_text())
            for name in [*plans, "alone"]
        }
        names = {name: set(found["names"]) for name, found in left.items()}
        assert names["sharded"] == names["equal"]
        apart = [names[name] for name in ("tensor", "sharded", "pipeline", "tensor-again")]
        assert sum(map(len, apart)) == len(set.union(*apart))
        assert {len(found["names"]) for found in left.values()} == {len(names["alone"])}
        if TORCH >= (2, 12):  # 2.11 closes gloo's connections only at the end of the process
            assert {found["sockets"] for found in left.values()} == {left["alone"]["sockets"]}


def test_a_run_that_fails_after_joining_anew_takes_none_of_the_others_with_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(apply_many, "MODULE", "tests.executor.workers.one_fails_worker")
    plans = {"first": Plan(dp_shard=2), "bad": Plan(tp=2), "last": Plan(pp=2, micro_batch_size=1)}
    runs = [run_of(tmp_path, name, plan) for name, plan in plans.items()]

    documents = run_many(runs, 120)

    assert [document["status"] for document in documents] == ["finished", "failed", "finished"]
    assert "this one ends its processes" in documents[1]["failure"]["message"]


def test_what_there_is_no_time_for_has_no_report(tmp_path) -> None:
    runs = [run_of(tmp_path, name, Plan(dp_shard=2)) for name in ("one", "two")]

    documents = run_many(runs, 0.5)

    assert [document["status"] for document in documents] == ["timeout"]
    assert not (tmp_path / "two" / "run.json").exists()
