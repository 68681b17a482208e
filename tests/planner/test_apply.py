"""`planner apply`: what is refused before anything starts, what is handed to the executor, and what is said after."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from executor.launch.local_ranks import LaunchResult
from executor.launch.request import Request
from executor.run.apply import report
from planner.question.plan_file import save_plan
from planner.runs import apply_process
from planner.runs.apply_report import lines
from planner.runs.comparison import compare
from planner.runs.planned_run import cpu_run, cuda_numbers, cuda_run, default_run, require_machine
from planner.runs.runs_store import list_runs
from simulator.config.plan import Plan
from tests.planner.conftest import make_cluster
from topology import codec
from topology.cluster import Finding
from topology.errors import BadPlan, Infeasible, PlannerError, Stale
from topology.finding import INFO, WARNING, finding
from topology.health.diagnose import diagnose


@pytest.fixture
def saved(content, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(content, path)
    return path


def busy(cluster):
    finding = Finding(
        code="busy",
        severity=WARNING,
        what="GPU 0 is in use by other processes",
        why="pid 7",
        consequence="slower",
        remedy="wait",
    )
    return replace(cluster, findings=(finding,))


def test_a_request_is_what_the_executor_reads(content) -> None:
    here = make_cluster()
    for question in (default_run(2), default_run(8), cuda_run(content, here, diagnose(here), allow_busy=False)):
        data = json.loads(codec.to_json(question.request(steps=5, budget_s=60, own_table=False)))

        request = codec.convert(data, Request, where="request")

        assert request.plan == question.plan
        assert request.model == question.model
        assert request.runtime == question.runtime
        assert request.steps == 5
        assert 0 < request.collective_timeout_s <= 60


def test_the_built_in_run_suits_the_machine() -> None:
    assert default_run(2).plan.gpus == 2
    assert default_run(64).plan.gpus == 4


def test_mfu_is_counted_against_the_datasheet_of_the_machine_at_hand(content) -> None:
    here = make_cluster()

    question = cuda_run(content, here, diagnose(here), allow_busy=False)

    assert question.peak_flops == 989e12
    assert "datasheet" in question.peak_flops_source
    assert question.predicted["step_s"]["value"] == content.estimate.step_s.value


def test_ranks_go_to_the_gpus_of_the_placement_as_cuda_counts_them() -> None:
    """With GPUs 2, 3, 6, 7 visible, CUDA calls GPU 6 number 2."""
    here = make_cluster()
    group = here.groups[0]
    seen = tuple(gpu for gpu in group.node.gpus if gpu.index in {2, 3, 6, 7})
    here = replace(here, groups=(replace(group, node=replace(group.node, gpus=seen)),))

    assert cuda_numbers(Plan(dp_shard=2, placement=(6, 3)), here) == (2, 1)
    assert cuda_numbers(Plan(dp_shard=4), here) == (0, 1, 2, 3)
    with pytest.raises(BadPlan, match="GPU 0"):
        cuda_numbers(Plan(placement=(0,)), here)


def test_the_machine_it_was_made_for_is_accepted(content) -> None:
    require_machine(content, content.cluster)
    require_machine(content, replace(content.cluster, name="the same, probed"))


def test_fewer_gpus_or_others_are_stale(content) -> None:
    with pytest.raises(Stale, match="another machine") as caught:
        require_machine(content, make_cluster(gpus_per_node=4))
    assert "8 GPUs planned, 4 here" in str(caught.value)

    other = make_cluster()
    kind = replace(other.gpu_kinds[0], name="a100-sxm-80")
    node = other.groups[0].node
    gpus = tuple(replace(gpu, kind="a100-sxm-80") for gpu in node.gpus)
    other = replace(other, gpu_kinds=(kind,), groups=(replace(other.groups[0], node=replace(node, gpus=gpus)),))
    with pytest.raises(Stale) as caught:
        require_machine(content, other)
    assert "planned for h100-sxm, here is a100-sxm-80" in str(caught.value)


def test_a_driver_that_was_changed_since_the_plan_was_made_is_said(content) -> None:
    def under(version: str | None):
        said = ((INFO, f"driver {version}"),) if version else ()
        return replace(
            make_cluster(), findings=tuple(finding("driver", level, what, "x", "x", "x") for level, what in said)
        )

    planned, here = replace(content, cluster=under("570.86.15")), under("580.65.06")

    run = cuda_run(planned, here, diagnose(here), allow_busy=False)

    (note,) = run.notes
    assert "under driver 570.86.15, this machine has driver 580.65.06" in note
    asked = codec.convert(run.request(steps=1, budget_s=60, own_table=False), Request, where="request")
    done = LaunchResult(outcome="finished", exit_code=0, seconds=1.0, failure=None, stdout_tail="", stderr_tail="")
    assert report(asked, done, Path("/nonexistent"), [])["notes"] == [note]
    for same in (under("570.86.15"), under(None)):
        assert cuda_run(planned, same, diagnose(same), allow_busy=False).notes == ()


def test_a_busy_machine_is_refused_unless_allowed(content) -> None:
    here = busy(make_cluster())

    with pytest.raises(PlannerError, match="not healthy") as caught:
        cuda_run(content, here, diagnose(here), allow_busy=False)
    assert caught.value.exit_code == 1
    assert "--allow-busy" in str(caught.value)

    assert cuda_run(content, here, diagnose(here), allow_busy=True).device == "cuda"


def test_a_model_that_does_not_fit_a_cpu_is_refused(content) -> None:
    """Llama-3-8B with AdamW in float32: 16 bytes for each of 8.03e9 parameters is 120 GiB."""
    sharded = replace(content, plan=Plan(dp_shard=8))

    with pytest.raises(Infeasible, match="120 GiB"):
        cpu_run(sharded, 100 * 2**30)
    assert cpu_run(sharded, 200 * 2**30).runtime.compute_dtype == "float32"
    with pytest.raises(Infeasible, match="957 GiB"):
        cpu_run(replace(content, plan=Plan(dp_replicate=8)), 200 * 2**30)


def test_a_machine_without_the_gpus_ends_with_1_and_starts_nothing(planner, saved, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("planner.commands.apply.probe_machine", lambda: make_cluster(gpus_per_node=2))

    done = planner("apply", saved, "--out", tmp_path / "run")

    assert done.returncode == 1
    assert "8 GPUs planned, 2 here" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--device", "tpu"), 2),
        (("--device", "cuda"), 2),
        (("--budget", "1s"), 2),
        (("nothing.json",), 2),
        (("--steps", "0"), 2),
    ],
)
def test_questions_that_cannot_be_read(planner, arguments, code) -> None:
    assert planner("apply", *arguments).returncode == code


def test_a_directory_with_something_in_it_is_not_overwritten(planner, tmp_path) -> None:
    (tmp_path / "precious").write_text("")

    done = planner("apply", "--out", tmp_path)

    assert done.returncode == 2
    assert "not empty" in done.stderr


def test_without_torch_the_remedy_is_named(planner, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(apply_process.importlib.util, "find_spec", lambda name: None)

    done = planner("apply", "--out", tmp_path / "run")

    assert done.returncode == 1
    assert 'pip install "meshwright[exec]"' in done.stderr


def test_a_dry_run_shows_command_mesh_and_placement_and_starts_nothing(
    planner, saved, content, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("planner.commands.apply.probe_machine", make_cluster)
    monkeypatch.setattr(apply_process, "run", lambda *_: pytest.fail("started"))

    done = planner("apply", saved, "--dry-run", "--json", "--out", tmp_path / "run")

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["command"][1:3] == ["-m", "executor.run.apply"]
    assert "--nproc-per-node=8" in said["ranks_command"]
    axes = said["mesh"]["axes"]
    product = 1
    for degree in axes.values():
        product *= degree
    assert product == 8
    assert [place["device"] for place in said["placement"]] == [f"cuda:{i}" for i in range(8)]
    assert said["placement"][-1]["dp_shard"] == content.plan.dp_shard - 1
    assert not (tmp_path / "run").exists()


def test_a_dry_run_as_text(planner) -> None:
    done = planner("apply", "--dry-run")

    assert done.returncode == 0
    assert "executor.run.apply" in done.stdout
    assert "rank 0" in done.stdout


def document(content, step_s: float, *, status: str = "finished", code: int = 0) -> dict:
    return {
        "taken_at": "2026-01-01T00:00:00+00:00",
        "device": "cuda",
        "plan": codec.to_builtins(content.plan),
        "model": codec.to_builtins(content.model),
        "workload": codec.to_builtins(content.workload),
        "runtime": codec.to_builtins(content.runtime),
        "status": status,
        "complete": status == "finished",
        "exit_code": code,
        "failure": None,
        "survivors": [],
        "predicted": codec.to_builtins(content.estimate),
        "verified": None,
        "measured": {
            "steps": 5,
            "steps_asked": 5,
            "step_s": {"median": step_s, "spread": 0.01, "all": [step_s] * 5},
            "tokens_per_s": 1.0,
            "tokens_per_s_per_gpu": 1.0,
            "tflops_per_gpu": 1.0,
            "mfu": 0.4,
            "mfu_denominator": {"peak_flops": 989e12, "source": "datasheet"},
            "memory_by_rank": [{"peak_allocated_bytes": 2**30, "peak_reserved_bytes": 2**31}],
        },
    }


def test_the_error_is_predicted_over_measured(content) -> None:
    value = content.estimate.step_s.value

    assert compare(document(content, value), None)["step_error"] == pytest.approx(0)
    assert compare(document(content, 2 * value), None)["step_error"] == pytest.approx(-0.5)
    assert compare(document(content, 1.05 * value), 10)["within"]
    assert not compare(document(content, 1.5 * value), 10)["within"]
    assert compare(document(content, value, status="failed", code=1), None) is None


@pytest.mark.parametrize(
    ("factor", "status", "given", "code"),
    [(1.0, "finished", 0, 0), (10.0, "finished", 0, 4), (1.0, "failed", 1, 1), (1.0, "out_of_memory", 4, 4)],
)
def test_exit_codes_tell_how_it_went(
    planner, saved, content, tmp_path, monkeypatch, factor, status, given, code
) -> None:
    monkeypatch.setattr("planner.commands.apply.probe_machine", make_cluster)
    monkeypatch.setattr(apply_process, "require_torch", lambda: None)
    ran = document(content, factor * content.estimate.step_s.value, status=status, code=given)
    monkeypatch.setattr(apply_process, "run", lambda *_: ran)

    done = planner("apply", saved, "--out", tmp_path / "run")

    assert done.returncode == code
    assert "step " in done.stdout
    saved_run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert saved_run["comparison"] == compare(ran, None)
    (kept,) = list_runs()
    assert (kept.id, kept.status, kept.directory) == (saved_run["id"], status, str(tmp_path / "run"))


def test_a_tolerance_that_has_nothing_to_hold_is_refused_before_anything_starts(planner, tmp_path) -> None:
    done = planner("apply", "--tolerance", "10", "--out", tmp_path / "run")

    assert done.returncode == 2
    assert "nothing to hold" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_finished_run_that_cannot_be_compared_is_not_as_predicted(
    planner, saved, content, tmp_path, monkeypatch
) -> None:
    """A prediction was asked for and none could be held: that is no success."""
    monkeypatch.setattr("planner.commands.apply.probe_machine", make_cluster)
    monkeypatch.setattr(apply_process, "require_torch", lambda: None)
    ran = document(content, 1.0)
    ran["measured"]["step_s"] = None
    monkeypatch.setattr(apply_process, "run", lambda *_: ran)

    assert planner("apply", saved, "--out", tmp_path / "run", "--tolerance", "5").returncode == 4


def test_a_run_that_cannot_be_kept_is_shown_all_the_same(planner, saved, content, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("planner.commands.apply.probe_machine", make_cluster)
    monkeypatch.setattr(apply_process, "require_torch", lambda: None)
    monkeypatch.setattr(apply_process, "run", lambda *_: document(content, content.estimate.step_s.value))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))

    done = planner("apply", saved, "--out", tmp_path / "run")

    assert done.returncode == 0
    assert "cannot make" in done.stderr
    assert "step " in done.stdout
    assert (tmp_path / "run" / "run.json").is_file()


def test_memory_that_nobody_knows_is_said_and_not_invented(content) -> None:
    small = replace(content, plan=Plan(dp_shard=2))

    assert any("does not say how much memory" in note for note in cpu_run(small, None).notes)
    assert not any("does not say" in note for note in cpu_run(small, 1 << 50).notes)


@pytest.mark.parametrize("place", ["/proc/self/run", "/dev/null/run"])
def test_a_directory_that_cannot_be_written_is_told_before_anything_starts(planner, monkeypatch, place) -> None:
    monkeypatch.setattr(apply_process, "require_torch", lambda: None)
    monkeypatch.setattr(apply_process, "run", lambda *_: pytest.fail("started"))

    done = planner("apply", "--out", place)

    assert done.returncode == 2
    assert "cannot write" in done.stderr


def test_a_disk_without_room_is_told_before_anything_starts(planner, tmp_path, monkeypatch) -> None:
    import shutil

    full = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    monkeypatch.setattr(apply_process, "require_torch", lambda: None)
    monkeypatch.setattr(apply_process, "run", lambda *_: pytest.fail("started"))

    done = planner("apply", "--out", tmp_path / "run")

    assert done.returncode == 1
    assert "1 MiB free" in done.stderr


def test_a_full_memory_is_shown_with_what_was_held_and_what_was_predicted(content) -> None:
    ran = document(content, 1.0, status="out_of_memory", code=4)
    held = {"phase": "step 1", "peak_allocated_bytes": 3 * 2**30, "peak_reserved_bytes": 4 * 2**30}
    ran["failure"] = {"rank": 1, "message": "memory is full", "memory": {"1": held}}

    said = "\n".join(lines(ran, None))

    assert "rank 1 had reached 3.00 GiB allocated, 4.00 GiB reserved, in step 1" in said
    name, size = max(content.estimate.memory.by_category.items(), key=lambda item: item[1])
    assert f"{name} {size / 2**30:.2f}" in said


def test_the_clock_of_steps_is_said_where_processors_counted_it() -> None:
    step = {"median": 0.5, "spread": 0.01, "all": [0.5]}
    measured = {
        "steps": 1,
        "steps_asked": 1,
        "step_s": step,
        "tokens_per_s": 1.0,
        "tokens_per_s_per_gpu": 1.0,
        "tflops_per_gpu": 1.0,
        "mfu": None,
        "mfu_denominator": {"peak_flops": None, "source": "none"},
        "memory_by_rank": [],
        "losses": [],
    }
    ran = {
        "status": "finished",
        "complete": True,
        "failure": None,
        "survivors": [],
        "measured": measured,
        "verified": None,
    }

    assert "clocks    1.53 GHz" in "\n".join(lines({**ran, "measured": {**measured, "sm_clock_hz": 1.53e9}}, None))
    for others, shown in ((1.0, False), (9.0, True)):
        host = {"cores": 32.0, "others": others, "stolen": 0.0}
        assert (
            "32 cores ran other" in "\n".join(lines({**ran, "measured": {**measured, "host": host}}, None))
        ) == shown
    assert "GHz" not in "\n".join(lines(ran, None))
