"""`planner report` and `planner runs`: signed errors, the term to blame, timelines side by side, and exit codes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from defusedxml.ElementTree import fromstring
from hypothesis import given
from hypothesis import strategies as st

from planner.commands.report import side_by_side, without_crossing_spans
from planner.pictures.timelines import timelines
from planner.question.plan_file import plan_file
from planner.question.question import question_of
from planner.runs.comparison import collective_kind, collectives, compare_terms, main_cause, quantities, step_terms
from planner.runs.runs_store import run_id, save_run
from planner.search.search import SearchOptions, suggest
from simulator.analytical.scenario import Scenario
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.fitting.calibration_fit import calibrated
from simulator.lowering.simulation import simulate_plan
from simulator.program import trace as tr
from simulator.program.trace import Span, Trace
from tests.planner.conftest import TINY, make_cluster
from topology import codec
from topology.catalog.cluster_file import load_cluster
from topology.profile.profile import read_profile

PROFILES = Path(__file__).parents[2] / "examples" / "profiles"

# --- terms ------------------------------------------------------------------------------------------------------------


def measured_trace() -> Trace:
    """A step of 10 s: 2 s host alone, a kernel 2..6, NCCL 5..8 (2 s of it exposed), Adam 8..9, then nothing."""
    return Trace(
        source="measured",
        spans=(
            Span(0, "host 1", "aten::mm", 0.0, 3.0, tr.HOST),
            Span(0, "stream 7", "sm90_gemm", 2.0, 5.5, tr.COMPUTE),
            Span(0, "stream 7", "split_with_sizes_copy_out", 5.5, 6.0, tr.COMPUTE),
            Span(0, "stream 20", "ncclDevKernel_AllGather_RING_LL", 5.0, 8.0, tr.COMMUNICATION),
            Span(0, "stream 7", "FusedAdamMathFunctor", 8.0, 9.0, tr.COMPUTE),
            Span(0, "host 1", "end", 9.0, 10.0, tr.HOST),
        ),
    )


def test_each_moment_of_a_step_counts_once() -> None:
    terms = step_terms(measured_trace())

    assert terms == pytest.approx(
        {"compute": 3.5, "copies": 0.5, "communication and waiting": 2.0, "host": 3.0, "optimizer": 1.0}
    )
    assert sum(terms.values()) == pytest.approx(10.0)


def test_the_parts_of_a_simulated_step_add_up_to_it() -> None:
    simulated = simulate_plan(
        Scenario(
            model=TINY,
            cluster=make_cluster(),
            workload=Workload(seq_len=1024, global_batch_size=16),
            runtime=suggest_runtime(),
        ),
        Plan(pp=2, dp_shard=4),
    )

    assert sum(step_terms(simulated.run.trace).values()) == pytest.approx(simulated.run.trace.end_s)


def suggest_runtime():
    from simulator.config.runtime import Runtime

    return Runtime()


def test_the_term_that_makes_most_of_the_difference_is_to_blame() -> None:
    """Predicted 6 s, measured 10 s; of the 4 s communication makes 1, the host 3, compute -0.5 and copies 0.5."""
    predicted = Trace(
        spans=(
            Span(0, "compute", "layer", 0.0, 4.0, tr.COMPUTE),
            Span(0, "fsdp comm", "all_gather fsdp", 4.0, 5.0, tr.COMMUNICATION),
            Span(0, "compute", "optimizer", 5.0, 6.0, tr.COMPUTE),
        )
    )
    terms = compare_terms(predicted, measured_trace())

    assert {t.name: t.difference_s for t in terms} == pytest.approx(
        {"compute": 0.5, "communication and waiting": -1.0, "copies": -0.5, "host": -3.0, "optimizer": 0.0}
    )
    assert main_cause(terms) == "host took 3 s longer than predicted, of 4 s longer in all"


def test_collectives_are_known_by_their_kernels_and_timed_by_unions() -> None:
    for kernel, kind in (
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send and receive"),
        ("all_gather fsdp", "all_gather"),
        ("send pp 1 0F", "send and receive"),
    ):
        assert collective_kind(kernel) == kind
    assert collectives(measured_trace()) == {"all_gather": {"calls": 1.0, "seconds": 3.0, "exposed_s": 2.0}}
    assert collectives(Trace(spans=())) == {}


# --- timelines --------------------------------------------------------------------------------------------------------


spans = st.lists(
    st.builds(
        lambda stream, start, length: Span(0, f"stream {stream}", "k", float(start), float(start + length)),
        st.integers(0, 1),
        st.integers(0, 30),
        st.integers(1, 12),
    ),
    max_size=12,
)


@given(spans)
def test_spans_never_cross_and_cover_the_same_time(listed: list[Span]) -> None:
    found = without_crossing_spans(Trace(spans=tuple(listed)))

    assert tr.crossing(found.spans) is None
    for stream in ("stream 0", "stream 1"):
        before = tr.union((s.start_s, s.end_s) for s in listed if s.stream == stream)
        assert tr.union((s.start_s, s.end_s) for s in found.of(stream=stream)) == before


def test_both_sides_are_processes_of_one_file() -> None:
    document = side_by_side(measured_trace(), [replace(measured_trace(), source="measured")])

    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "predicted rank 0", 1: "measured rank 0"}
    assert sum(e["ph"] == "X" and e["pid"] == 1 for e in document["traceEvents"]) == 6


def test_the_picture_is_an_image_with_a_lane_for_each_category() -> None:
    root = fromstring(timelines(measured_trace(), measured_trace(), title='a <b> "c" & d'))

    words = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert 'a <b> "c" & d' in words
    assert sum(w.startswith("compute") for w in words) == 2
    assert "communication 30%" in words
    fromstring(timelines(None, measured_trace(), title="one side"))


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content():
    result = suggest(
        question_of(TINY, make_cluster(), Workload(seq_len=1024, global_batch_size=16)), SearchOptions(top=1)
    )
    best = result.plans[0]
    return plan_file(result.question, best.plan, best.estimate)


def write_run(content, folder, *, factor: float = 1.0, status: str = "finished") -> dict:
    """Write a run's directory whose step is `factor` of the prediction; the timeline is the simulated one, as
    kernels.
    """
    value = content.estimate.step_s.value
    document = {
        "schema_version": 1,
        "status": status,
        "complete": status == "finished",
        "exit_code": 0,
        "taken_at": "2026-01-01T00:00:00+00:00",
        "device": "cuda",
        "plan": content.plan,
        "model": content.model,
        "workload": content.workload,
        "runtime": content.runtime,
        "cluster": content.cluster,
        "predicted": content.estimate,
        "measured": {
            "step_s": {"median": factor * value, "spread": 0.01, "all": [factor * value]},
            "tokens_per_s": 5.0,
            "tokens_per_s_per_gpu": content.estimate.tokens_per_s_per_gpu / factor,
            "tflops_per_gpu": content.estimate.tflops_per_gpu / factor,
            "mfu": None,
            "memory_by_rank": [{"peak_allocated_bytes": 2**30, "peak_reserved_bytes": 2**31}],
        },
        "effects": [{"what": "mesh", "requested": "dp_shard 8", "effective": "dp_shard 8", "ok": True}],
    }
    simulated = simulate_plan(
        Scenario(model=content.model, cluster=content.cluster, workload=content.workload, runtime=content.runtime),
        content.plan,
    ).run.trace
    kernels = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": span.name if span.category != tr.COMMUNICATION else f"ncclDevKernel {span.name}",
            "tid": index,
            "ts": 1e6 + span.start_s * 1e6,
            "dur": span.duration_s * 1e6,
            "args": {"stream": span.stream},
        }
        for index, span in enumerate(simulated.of(0))
        if span.category in {tr.COMPUTE, tr.COMMUNICATION}
    ]
    (folder / "records").mkdir(parents=True)
    (folder / "records" / "rank0.trace.json").write_text(json.dumps({"traceEvents": kernels}))
    codec.write_text(folder / "run.json", codec.to_json(document))
    return json.loads((folder / "run.json").read_text())


def test_every_quantity_has_a_signed_error(content, tmp_path) -> None:
    document = write_run(content, tmp_path / "run", factor=2.0)

    found = {q.name: q for q in quantities(document)}

    assert found["step"].error == pytest.approx(-0.5)
    assert found["tokens per GPU"].error == pytest.approx(1.0)
    assert found["peak allocated memory"].error == pytest.approx(content.estimate.memory.peak_bytes.value / 2**30 - 1)
    assert found["MFU"].error is None


def test_a_run_as_predicted_is_0_and_explained(planner, content, tmp_path) -> None:
    write_run(content, tmp_path / "run")

    done = planner("report", tmp_path / "run", "--json")

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["within"] is True
    step = next(row for row in said["quantities"] if row["name"] == "step")
    assert step["error"] == pytest.approx(0.0)
    assert {t["name"] for t in said["terms"]} >= {"compute", "communication and waiting", "host"}
    compute = next(t for t in said["terms"] if t["name"] == "compute")
    assert compute["measured_s"] == pytest.approx(compute["predicted_s"], rel=1e-3)
    assert said["collectives"]["measured"].keys() == said["collectives"]["predicted"].keys()
    assert said["blame"]


@pytest.mark.parametrize(
    ("factor", "arguments", "code"),
    [
        (10.0, (), 4),
        (1.04, ("--tolerance", "5"), 0),
        (1.04, ("--tolerance", "5%"), 0),
        (1.0, ("--tolerance", "five"), 2),
        (1.0, ("--tolerance", "nan"), 2),
        (1.0, ("--tolerance", "inf"), 2),
        (1.08, ("--tolerance", "5"), 4),
        (1.0, ("--tolerance", "-1"), 2),
    ],
)
def test_exit_codes(planner, content, tmp_path, factor, arguments, code) -> None:
    write_run(content, tmp_path / "run", factor=factor)

    assert planner("report", tmp_path / "run", *arguments).returncode == code


def test_a_tolerance_without_anything_to_hold_fails(planner, content, tmp_path) -> None:
    write_run(content, tmp_path / "run", status="failed")

    assert planner("report", tmp_path / "run").returncode == 0
    done = planner("report", tmp_path / "run", "--tolerance", "5")
    assert done.returncode == 1
    assert "nothing could be compared" in done.stderr


def test_a_run_teaches_a_profile_its_operators(planner, content, tmp_path) -> None:
    """Operators as the profile has them, a tenth quicker for a step's clocks; and one shape that nobody measured."""
    path = tmp_path / "profile.json"
    # Without its layers, which take seconds to fit and of which nothing is learned here.
    path.write_text(json.dumps(json.loads((PROFILES / "h200x4.json").read_text()) | {"layers": []}))
    before = read_profile(path)
    known = [s for s in before.operators if s.kind == "matmul" and s.regime == "sustained" and not s.invalid][:5]
    document = write_run(content, tmp_path / "run")
    document["cluster"] = codec.to_builtins(load_cluster("h200x4"))
    document["versions"] = {"device": "NVIDIA H200", "torch": "2.11.0+cu130"}
    seen = [{**codec.to_builtins(s), "seconds": 0.9 * s.seconds, "regime": "step", "run": ""} for s in known]
    fresh = {**seen[0], "shape": {"m": 4099, "n": 4099, "k": 4099}, "direction": "forward", "seconds": 9e-4}
    document["operator_samples"] = [*seen, fresh]
    codec.write_text(tmp_path / "run" / "run.json", codec.to_json(document))

    done = planner("report", tmp_path / "run", "--learn", path, "--json")

    assert done.returncode == 0, done.stderr
    lesson = json.loads(done.stdout)["learned"]
    assert (lesson["samples"], lesson["fresh"]) == (6, 6)
    assert lesson["in_step_ratio"] == pytest.approx(0.9)
    after = read_profile(path)
    assert len(after.operators) == len(before.operators) + 6
    calibration = calibrated(after, load_cluster("h200x4"))
    assert calibration.operators.exact["matmul", "bfloat16", "forward", 1.0, 4099.0, 4099.0, 4099.0] == pytest.approx(
        1e-3
    )

    document["versions"]["torch"] = "2.9.0"
    codec.write_text(tmp_path / "run" / "run.json", codec.to_json(document))
    refused = planner("report", tmp_path / "run", "--learn", path)
    assert refused.returncode == 1
    assert "torch 2.9.0" in refused.stderr


def test_a_kept_run_is_found_by_its_id(planner, content, tmp_path) -> None:
    document = write_run(content, tmp_path / "run")
    save_run(document, tmp_path / "run")

    done = planner("report", run_id(document)[:8])
    assert done.returncode == 0, done.stderr
    assert "to blame" in done.stdout

    listed = planner("runs", "--json")
    (row,) = json.loads(listed.stdout)["runs"]
    assert row["id"] == run_id(document)
    assert row["step_error"] == pytest.approx(0.0)
    assert "tiny" in planner("runs").stdout

    (tmp_path / "run").rename(tmp_path / "moved")
    moved = planner("report", run_id(document))
    assert moved.returncode == 0
    assert "its directory does not exist" in moved.stdout


def test_a_run_made_elsewhere_is_kept_when_asked(planner, content, tmp_path) -> None:
    """Several nodes leave a directory that was collected afterwards; nothing has put it into the store."""
    document = write_run(content, tmp_path / "collected")

    done = planner("runs", "--add", tmp_path / "collected", "--json")

    assert done.returncode == 0, done.stderr
    kept = {run["id"]: run for run in json.loads(done.stdout)["runs"]}
    assert kept[run_id(document)]["directory"] == str(tmp_path / "collected")


def test_no_runs_is_an_answer(planner) -> None:
    assert planner("runs").stdout == "no runs yet: planner apply makes one\n"
    assert json.loads(planner("runs", "--json").stdout)["runs"] == []


@pytest.mark.parametrize("name", ["nothing", "../etc", ""])
def test_what_is_no_run_is_bad_input(planner, name) -> None:
    assert planner("report", name).returncode == 2


def test_pages_and_pictures_need_nothing_else(planner, content, tmp_path) -> None:
    document = write_run(content, tmp_path / "run")
    document["model"]["name"] = "<script>alert(1)</script>"
    (tmp_path / "run" / "run.json").write_text(json.dumps(document))
    page, image, timeline = (tmp_path / name for name in ("r.html", "t.svg", "t.json"))

    done = planner("report", tmp_path / "run", "--html", page, "--picture", image, "--trace", timeline)

    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "<script" not in text
    assert not re.search(r"(src|href)=", text)
    assert "<svg" in text
    fromstring(image.read_text())
    loaded = json.loads(timeline.read_text())
    assert {e["args"]["name"] for e in loaded["traceEvents"] if e["name"] == "process_name"} >= {
        "predicted rank 0",
        "measured rank 0",
    }
    assert planner("report", tmp_path / "run", "--html", page).returncode == 2
