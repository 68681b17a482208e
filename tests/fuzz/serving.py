"""What serving and learning read from files: requests, saved deployments, published points, logs and tables of
runs.
"""

from __future__ import annotations

import csv
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from planner.learn.logs import measured_in, read_runs
from planner.question.cases import load_case
from planner.question.learned_runtime import LearnedCalibrations, in_place, read_learned
from planner.serving.answer import answer_deployment
from planner.serving.plan_file import load_serving, serving_file
from planner.serving.question.from_flags import ServingFlags, serving_question
from planner.serving.question.trace_file import read_trace
from planner.serving.reports.documents import estimate_document
from planner.serving.stated import pool_word, read_pool
from planner.validate.serving_points import validate_point
from planner.validate.serving_report import read_points
from simulator.fitting.calibrations import UNMEASURED
from simulator.legality.rules import is_legal
from simulator.serving.deployment import Pool
from tests.fuzz.format import Format, json_inputs, text_inputs
from tests.fuzz.mutations import damaged_json, damaged_text
from tests.fuzz.structure import rearranged_json, rearranged_text
from topology import codec

DATA = Path(__file__).resolve().parents[1] / "data"
REQUESTS = [{"arrival_s": 0.1 * n, "prompt": 20 + n, "output": 4} for n in range(6)]
POINT = {
    "id": "a",
    "source_group": "g",
    "hardware": "H100",
    "model": "Llama-3.1-8B",
    "backend": "vllm",
    "precision": "fp8",
    "metric_kind": "median",
    "n_gpus": 2,
    "tp": 2,
    "isl": 64,
    "osl": 8,
    "concurrency": 4,
    "ttft_ms": 30.0,
    "tpot_ms": 8.0,
    "output_tok_s_per_gpu": 100.0,
    "disagg": False,
}
LEARNED = {
    "name": "mine",
    "like": "pytorch",
    "rows": 8,
    "compile": False,
    "left_out": {"step": 0.1, "memory": None},
    "schema_version": 1,
    "fitted": {
        "kernel_factor": {"value": 1.1, "low": 1.0, "high": 1.2},
        "launch_s": {"value": 5e-6, "low": 4e-6, "high": 6e-6},
    },
}
RUN = {
    "id": "r",
    "model": "tiny-llama",
    "cluster": "dgx-h100",
    "workload": {"seq_len": 256, "global_batch_size": 8},
    "plan": {"dp_shard": 8},
    "runtime": {"name": "torchtitan"},
    "measured": {"step_s": 0.5, "peak_memory_gib": 3.0},
}
TABLE_ROW = {
    "id": "a", "model": "tiny-llama", "cluster": "dgx-h100", "workload.seq_len": 256, "workload.global_batch_size": 8,
    "plan.dp_shard": 8, "runtime.name": "fsdp2", "measured.step_s": 0.5,
}  # fmt: skip


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _damaged_lines(document: Any) -> st.SearchStrategy[str]:
    one = st.one_of(damaged_json([document]), rearranged_json([document]))
    lines = [_lines([document] * 3)]
    return st.one_of(st.lists(one, min_size=1, max_size=3).map("\n".join), damaged_text(lines), rearranged_text(lines))


def _read_requests(text: str, path: Path) -> list[Any]:
    path = path.with_suffix(".jsonl" if text.startswith("{") else ".csv")
    path.write_text(text, "utf-8")
    return [codec.to_builtins(one) for one in read_trace(str(path))]


def _read_deployment(text: str, path: Path) -> list[Any]:
    """Fingerprints are made again, so that what lies behind them is read, too."""
    document = codec.parse_json(text, where="plan")
    if isinstance(document, dict) and isinstance(document.get("fingerprints"), dict):
        document["fingerprints"] |= {name: codec.fingerprint(document.get(name)) for name in ("question", "deployment")}
    path.write_text(json.dumps(document), "utf-8")
    found = load_serving(path)
    return [estimate_document(str(path), answer_deployment(found.question, found.deployment))]


def _read_points(text: str, path: Path) -> list[Any]:
    path = path.with_suffix(".jsonl")
    path.write_text(text, "utf-8")
    return [validate_point(row) for row in read_points(path)[:2]]


def _read_log(text: str, _path: Path) -> list[Any]:
    return [measured_in(text, where="log", global_batch=64.0)]


def _read_table(text: str, path: Path) -> list[Any]:
    path = path.with_suffix(".jsonl" if text.startswith("{") else ".csv")
    path.write_text(text, "utf-8")
    shown = []
    for row in read_runs(path)[:3]:
        case = load_case(row)
        if is_legal(case.question.problems(case.plan)):
            shown.append(codec.to_builtins(case.question.estimate([case.plan]).estimate(0)))
    return shown


def _read_learned(text: str, path: Path) -> list[Any]:
    path.write_text(text, "utf-8")
    learned = read_learned(path)
    known = LearnedCalibrations(UNMEASURED, learned)
    case = load_case(in_place(RUN, learned), known)
    shown = [codec.to_builtins(learned)]
    if is_legal(case.question.problems(case.plan)):
        shown.append(codec.to_builtins(case.question.estimate([case.plan]).estimate(0)))
    return shown


def _read_pool(text: str, _path: Path) -> list[Any]:
    found = read_pool(text, "--prefill")
    assert read_pool(pool_word(found), "--prefill") == found
    return []


@cache
def deployments() -> list[Any]:
    flags = ServingFlags(model="llama3-8b", cluster="dgx-h100", gpus=2, isl=64, osl=8, concurrency=4)
    question = serving_question(flags)
    pools = ((Pool(tp=2), None), (Pool(), Pool()))
    files = [serving_file(question, question.deployment(pool, apart)) for pool, apart in pools]
    return [codec.to_builtins(one) for one in files]


SERVING = {
    "requests to serve": Format(
        inputs=lambda: st.one_of(_damaged_lines(REQUESTS[0]), damaged_text([_csv(REQUESTS), _lines(REQUESTS)])),
        read=_read_requests,
    ),
    "serving plan": Format(inputs=json_inputs(deployments), read=_read_deployment),
    "serving point": Format(inputs=lambda: _damaged_lines(POINT), read=_read_points),
    "pool of engines": Format(inputs=text_inputs(lambda: ["2xtp4", "1xdp8-ep8", "4xtp2-pp2", "tp4"]), read=_read_pool),
    "training log": Format(
        inputs=text_inputs(lambda: [path.read_text("utf-8") for path in sorted((DATA / "logs").glob("*.log"))]),
        read=_read_log,
    ),
    "runs to learn from": Format(
        inputs=lambda: st.one_of(_damaged_lines(RUN), damaged_text([_csv([TABLE_ROW] * 2)])), read=_read_table
    ),
    "learned runtime": Format(inputs=json_inputs(lambda: [LEARNED]), read=_read_learned),
}
