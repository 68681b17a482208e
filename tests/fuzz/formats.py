"""The formats that people and other programs hand us: a corpus, a strategy of damaged inputs, and how each is read.

A reader does what the commands do with such a file, so that an input that decodes is also used. It returns the
documents that the user would be shown; it may raise `PlannerError` and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from planner.commands.doctor import budget_s
from planner.explain.plan_answer import answer_plan, plan_document
from planner.io.inputs import parse_bytes
from planner.question.cases import case_of_plan_file, load_case, read_cases
from planner.question.flags import gpu_counts
from planner.question.plan_file import plan_file
from planner.question.question import question_of
from planner.runs import runs_store
from planner.runs.run_report import load_run
from planner.search.plan_space.stated import read_spans, read_words
from planner.sharding.answer import captured_row
from planner.sharding.problem.problem import split_cases
from planner.tune.loop import Limits, tune
from planner.tune.runners.recorded_trials import RecordedTrials, recorded_questions
from planner.tune.sessions.session import cut_short
from planner.tune.state import read_state
from planner.tune.text import lines as text_of_tuning
from planner.tune.text import tune_document
from simulator.config.hf_config import load_model, model_from_config
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.fitting.calibrations import Calibrations
from simulator.program.chrome_trace import from_kineto
from simulator.sharded.program import read_program
from tests.fuzz.configurations import CONFIGURATIONS
from tests.fuzz.format import Format, json_inputs, text_inputs
from tests.fuzz.mutations import damaged_text
from tests.fuzz.serving import SERVING
from tests.planner.sharding.cases import report_case
from topology import codec
from topology.catalog.cluster_file import parse_cluster
from topology.catalog.clusters import cluster
from topology.catalog.verify import verify_cluster
from topology.errors import BadCluster
from topology.health.diagnose import diagnose
from topology.probe.from_text import probe_text
from topology.probe.report import probe_json
from topology.profile.measurement import read_measurement
from topology.profile.profile import read_profile
from topology.rates.reach import cluster_caveats, reach

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
EXAMPLES = ROOT / "examples"


def _json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _texts(*patterns: str) -> list[str]:
    return [path.read_text("utf-8") for pattern in patterns for path in sorted(ROOT.glob(pattern)) if path.is_file()]


# --- corpora ----------------------------------------------------------------------------------------------------------


@cache
def cases() -> list[Any]:
    """A few cases of every table and the shipped plans, as far as they are quick to simulate."""
    found = [case for path in sorted((DATA / "cases").glob("*.json")) for case in _json(path)[:6]]
    found += [_json(path) for path in sorted((EXAMPLES / "plans").glob("*.json"))]
    return [case for case in found if case["plan"].get("pp", 1) == 1]


@cache
def plan_files() -> list[Any]:
    questions = (
        ("tiny-llama", "dgx-h100", 8, Plan(dp_shard=4, tp=2, sequence_parallel=True)),
        ("qwen3-30b-a3b", "dgx-h100", 16, Plan(dp_shard=16, ep=8)),
        ("llama3-8b", "a100-pcie-x4", 4, Plan(pp=2, dp_shard=2, schedule="1F1B")),
    )
    found = []
    for model, machine, gpus, plan in questions:
        workload = Workload(seq_len=512, global_batch_size=32)
        question = question_of(load_model(model), cluster(machine, gpus), workload, gpus=gpus)
        found.append(plan_file(question, plan, question.estimate([plan]).estimate(0)))
    return [codec.to_builtins(one) for one in found]


@cache
def runs() -> list[Any]:
    found = []
    for document in plan_files():
        part = {key: document[key] for key in ("plan", "model", "workload", "runtime", "cluster")}
        seconds = document["estimate"]["step_s"]["value"]
        measured = {"steps": 3, "steps_asked": 3, "step_s": {"median": seconds, "spread": 0.1, "all": [seconds] * 3}}
        measured |= {
            "losses": [1.0],
            "memory_by_rank": [{"peak_allocated_bytes": 10**9}],
            "mfu": 0.3,
            "tokens_per_s": 9.5,
        }
        head = {"schema_version": 1, "status": "finished", "taken_at": "2026-01-01", "complete": True, "exit_code": 0}
        more = {"predicted": document["estimate"], "measured": measured, "versions": {"torch": "2.11"}, "survivors": []}
        effects = [{"what": "tp", "requested": 1, "effective": 1, "ok": True, "certain": True}]
        found.append({**head, **part, **more, "effects": effects, "gpus": [{"throttle": []}], "device": "cuda"})
    return found


@cache
def tunings() -> list[str]:
    """States of tunings: recorded runs with two trials made, one of them cut short."""
    found = []
    for question in recorded_questions(_json(DATA / "tune" / "vtrain_two_questions.json"))[:2]:
        asked = {
            **{name: codec.to_builtins(getattr(question.question, name)) for name in ("model", "cluster", "workload")},
            "runtime": codec.to_builtins(question.question.runtime),
            "framework": question.question.framework.name,
            "gpus": 8,
            "budget_s": 60.0,
            "within": 0.01,
        }
        plans = question.candidates.plans[:4]
        lines = [
            {"kind": "tuning", "schema_version": 1, "asked": asked},
            *({"kind": "candidate", **codec.to_builtins(one)} for one in plans),
            {"kind": "began", "key": plans[0].key, "directory": "trial-001", "machine": "a", "at": "2026-01-01"},
            {"kind": "trial", "key": plans[0].key, "status": "finished", "step_s": 0.5, "seconds": 20.0},
            {"kind": "trial", "key": plans[1].key, "status": "out_of_memory", "cause": "rank 0", "seconds": 9.0},
        ]
        found.append("".join(json.dumps(line) + "\n" for line in lines))
    return found


@cache
def clusters() -> list[Any]:
    small = _json(EXAMPLES / "clusters" / "four_a6000_two_bridges.json")
    named = (("dgx-h100", 16), ("l40s-x8", None), ("a100-pcie-x4", None), ("gb200-nvl72", None))
    return [small, {"gpu": "h100-sxm", "nodes": 2}, *(codec.to_builtins(cluster(*one)) for one in named)]


@cache
def profiles() -> list[Any]:
    whole = _json(EXAMPLES / "profiles" / "h100x4_draw2.json")
    parts = ("collectives", "operators", "host", "contention", "layers", "overlap")
    few = {key: value[:3] if key in parts else value for key, value in whole.items()}
    other = _json(EXAMPLES / "profiles" / "h200x2.json")
    return [few, {key: value[:3] if key in parts else value for key, value in other.items()}]


@cache
def measurements() -> list[Any]:
    """Two measurements with a few of each kind of sample: every draw copies a whole one."""
    whole = [_json(EXAMPLES / "profiles" / f"h200x{gpus}_raw.json") for gpus in (1, 2)]
    return [{key: part[:3] if isinstance(part, list) else part for key, part in one.items()} for one in whole]


@cache
def traces() -> list[Any]:
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": "gemm",
        "ts": 1.0,
        "dur": 2.0,
        "pid": 0,
        "tid": 7,
        "args": {"stream": 7},
    }
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0.0, "dur": 9.0, "pid": 0, "tid": 1}
    return [{"traceEvents": [step, kernel, {**kernel, "ts": 4.0, "name": "ncclDevKernel_AllGather"}]}]


def _configs() -> list[Any]:
    return [_json(path) for path in sorted((ROOT / "simulator" / "models").glob("*.json")) if path.stem != "SOURCES"]


def captured() -> Any:
    return _json(EXAMPLES / "sharding" / "captured.json")


FLAGS = [
    "16",
    "8,16,32",
    "min",
    "1-8",
    "2,4-8",
    "selective,full",
    "32GB",
    "29.8GiB",
    "60s",
    "1.5m",
    "-1",
    "0",
    "9" * 30,
]


# --- readers ----------------------------------------------------------------------------------------------------------


def _read_cases(text: str, path: Path) -> list[Any]:
    path.write_text(text, "utf-8")
    return [plan_document(answer_plan(load_case(case))) for case in read_cases(path)[0][:1]]


def _read_plan_file(text: str, path: Path) -> list[Any]:
    """Fingerprints are made again, so that what lies behind them is read, too."""
    document = codec.parse_json(text, where="plan file")
    with suppress(Exception):
        parts = {name: codec.fingerprint(document[name]) for name in document["fingerprints"] if name != "cluster"}
        document["fingerprints"] = parts | {"cluster": codec.fingerprint({**document["cluster"], "findings": []})}
    path.write_text(json.dumps(document), "utf-8")
    return [plan_document(answer_plan(case_of_plan_file(path)))]


def _read_run(text: str, path: Path) -> list[Any]:
    path.write_text(text, "utf-8")
    found = load_run(str(path), simulate=False)
    store = path.with_name("runs.sqlite3")
    key = runs_store.save_run(found.document, path.parent, store)
    listed = [codec.to_builtins(row) for row in runs_store.list_runs(store)]
    runs_store.remove(key, store)
    return [found.answer(5.0), *listed]


def _read_tuning(text: str, path: Path) -> list[Any]:
    path.write_text(text, "utf-8")
    found = read_state(path)
    limits = Limits(budget_s=0.0)
    view = tune(found.candidates, RecordedTrials(recorded={}), limits, trials=[*found.trials, *cut_short(found)])
    return [tune_document(view, within=0.01, state=None, learned=None), text_of_tuning(view, within=0.01)]


def _read_cluster(text: str, _path: Path) -> list[Any]:
    found = parse_cluster(codec.parse_json(text, where="cluster"), where="cluster")
    assert verify_cluster(found) == []
    cluster_caveats(found)
    count = min(reach(found).gpus, 64)
    shown = [codec.to_builtins(found), codec.to_builtins(diagnose(found))]
    if count and found.gpu_count <= 4096:
        plan = Plan(dp_shard=count)
        workload = Workload(seq_len=256, global_batch_size=count)
        question = question_of(load_model("tiny-llama"), found, workload, gpus=count)
        shown.append(codec.to_builtins(question.estimate([plan]).estimate(0)))
    return shown


def _read_profile(text: str, path: Path) -> list[Any]:
    path.write_text(text, "utf-8")
    found = read_profile(path)
    machine = cluster({"h100-sxm": "dgx-h100"}.get(found.gpu, "h200x4"))
    known = Calibrations(found).on(machine)
    plan, workload = Plan(dp_shard=4), Workload(seq_len=512, global_batch_size=8)
    question = question_of(load_model("tiny-llama"), machine, workload, calibration=known)
    return [codec.to_builtins(found), codec.to_builtins(question.estimate([plan]).estimate(0))]


def _read_measurement(text: str, path: Path) -> list[Any]:
    path.write_text(text, "utf-8")
    found = read_measurement(path)
    return [codec.to_builtins(found), codec.to_builtins(diagnose(cluster("h200x4"), found))]


def _read_capture(text: str, _path: Path) -> list[Any]:
    found = probe_text([("capture", text)], gpu=None if "<" in text[:200] else "h100-sxm")
    with suppress(BadCluster):  # a machine without GPUs is an answer of probe, and none to plan for
        reach(found)
    return [probe_json(found), codec.to_builtins(diagnose(found))]


def _read_config(text: str, _path: Path) -> list[Any]:
    model = model_from_config(codec.parse_json(text, where="config"), name="fuzzed")
    plan, workload = Plan(dp_shard=8), Workload(seq_len=256, global_batch_size=8)
    question = question_of(model, cluster("dgx-h100"), workload, gpus=8)
    return [codec.to_builtins(model), codec.to_builtins(question.estimate([plan]).estimate(0))]


def _read_captured(text: str, _path: Path) -> list[Any]:
    (case, *_) = split_cases(codec.parse_json(text, where="cases"), where="cases")
    row, answer = captured_row(case, 0)
    if answer is not None:
        read_program(codec.to_builtins(answer.written.program), where="the program")
    return [row]


def _read_sharding(text: str, _path: Path) -> list[Any]:
    found = split_cases(codec.parse_json(text, where="cases"), where="cases")
    return [report_case(case, number) for number, case in enumerate(found[:3])]


def _read_trace(text: str, _path: Path) -> list[Any]:
    return [codec.to_builtins(from_kineto(codec.parse_json(text, where="trace"), rank=0).spans)]


def _read_flags(text: str, _path: Path) -> list[Any]:
    for read in (gpu_counts, parse_bytes, budget_s, lambda t: read_spans(t, "--tp"), lambda t: read_words(t, "--x")):
        with suppress(codec.PlannerError):
            read(text)
    return []


FORMATS = {
    "case": Format(inputs=json_inputs(cases), read=_read_cases),
    "plan file": Format(inputs=json_inputs(plan_files), read=_read_plan_file),
    "run report": Format(inputs=json_inputs(runs), read=_read_run),
    "tuning": Format(inputs=text_inputs(tunings), read=_read_tuning),
    "cluster": Format(inputs=json_inputs(clusters), read=_read_cluster),
    "profile": Format(inputs=json_inputs(profiles), read=_read_profile),
    "measurement": Format(inputs=json_inputs(measurements), read=_read_measurement),
    "config.json": Format(inputs=json_inputs(_configs), read=_read_config),
    "captured": Format(inputs=json_inputs(lambda: [captured()]), read=_read_captured),
    "sharding": Format(inputs=json_inputs(lambda: [_json(EXAMPLES / "sharding" / "layer.json")]), read=_read_sharding),
    "trace": Format(inputs=json_inputs(traces), read=_read_trace),
    "topo -m": Format(
        inputs=text_inputs(lambda: _texts("tests/data/topo/*.txt", "tests/data/h200x4/*topo_m.txt")), read=_read_capture
    ),
    "nvidia-smi": Format(
        inputs=text_inputs(
            lambda: [
                *_texts("tests/data/topo/p2p/*.txt", "tests/data/topo/nvlink_status/*.txt", "tests/data/h200x4/*.txt"),
                QUERY,
            ]
        ),
        read=_read_capture,
    ),
    "NCCL XML": Format(
        inputs=text_inputs(lambda: _texts("tests/data/nccl_xml/*.xml", "tests/data/h200x4/*.xml")), read=_read_capture
    ),
    "flags": Format(
        inputs=lambda: st.one_of(damaged_text(FLAGS), st.sampled_from(FLAGS), st.text(max_size=60)), read=_read_flags
    ),
    **CONFIGURATIONS,
    **SERVING,
}
QUERY = (
    "index, uuid, name, memory.total [MiB], pci.bus_id, mig.mode.current\n"
    "0, GPU-1, NVIDIA H100 80GB HBM3, 81559, 00000000:1B:00.0, Disabled\n"
)


# --- what is shown ----------------------------------------------------------------------------------------------------

NEVER_NEGATIVE = ("_s", "_bytes", "_bytes_per_s", "_flops", "_hz", "seconds", "nbytes")
LARGEST = 1e300  # of all quantities that are shown
MAY_BE_NEGATIVE = ("headroom_bytes", "difference_s")


def wrong_numbers(document: Any, path: str = "") -> Iterator[str]:
    """Yield every number of a shown document that is not finite, of the wrong sign, or outside its own range."""
    if isinstance(document, dict):
        if {"value", "low", "high"} <= document.keys() and document["value"] is not None:
            low, value, high = document["low"], document["value"], document["high"]
            if low is not None and high is not None and not low <= value <= high:
                yield f"{path}: {value} is not in {low} to {high}"
        for key, value in document.items():
            yield from wrong_numbers(value, f"{path}.{key}")
    elif isinstance(document, (list, tuple)):
        for index, value in enumerate(document):
            yield from wrong_numbers(value, f"{path}[{index}]")
    elif isinstance(document, (int, float)) and not isinstance(document, bool):
        name = path.rpartition(".")[2].partition("[")[0]
        if (
            abs(document) > LARGEST
            or not math.isfinite(document)
            or (document < 0 and name.endswith(NEVER_NEGATIVE) and name not in MAY_BE_NEGATIVE)
        ):
            yield f"{path} is {document}"
