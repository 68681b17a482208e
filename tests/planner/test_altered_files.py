"""Values that decode but cannot be are refused with their field: models, estimates, layers of a profile."""

import json

import pytest

from planner.question.plan_file import load_plan, save_plan
from planner.runs.run_document import verify_run
from simulator.config.hf_config import load_model
from simulator.config.model import Model
from simulator.config.verify import verify_model
from tests.planner.conftest import make_cluster, planned
from topology import codec
from topology.errors import BadModel, UserError


def altered(document, at, value):
    """Return a copy of plain data with the value at the path `at` (keys and indices, joined by points) replaced."""
    copy = spot = json.loads(json.dumps(document))
    *path, last = [int(key) if key.isdigit() else key for key in at.split(".")]
    for key in path:
        spot = spot[key]
    spot[last] = value
    return copy


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ("layers", 0),
        ("layers", 10**9),
        ("hidden", -4096),
        ("heads", 0),
        ("kv_heads", 3),
        ("vocab", 2**40),
        ("norm", "batchnorm"),
        ("norms_per_layer", -1),
        ("moe.experts", 0),
        ("moe.experts_per_token", 10**6),
        ("moe.dense_layers", 10**4),
        ("sliding_layers", 10**4),
        ("name", "x" * 10**6),
    ],
)
def test_a_model_that_cannot_be_is_refused(at, value) -> None:
    model = codec.to_builtins(load_model("qwen3-30b-a3b"))
    verify_model(codec.convert(model, Model, where="file"), where="file")

    with pytest.raises(BadModel, match=at.rpartition(".")[2]):
        verify_model(codec.convert(altered(model, at, value), Model, where="file"), where="file")


@pytest.fixture(scope="module")
def plan_document(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(planned(make_cluster()), path)
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ("plan.tp", -1),
        ("plan.pp", 1024),
        ("model.layers", -32),
        ("cluster.gpu_kinds.0.memory_bytes", 1),
        ("cluster.gpu_kinds.0.compute_capability", -1),
        ("workload.global_batch_size", -64),
        ("runtime.param_dtype", "float64"),
        ("estimate.model_flops_per_gpu", -1.0),
        ("estimate.step_s.low", 1e6),
        ("estimate.step_s.value", -0.14),
        ("estimate.memory.capacity_bytes", -1.5e9),
        ("estimate.memory.reserved_bytes", -4.0e10),
    ],
)
def test_a_plan_file_with_an_impossible_part_names_it(plan_document, tmp_path, at, value) -> None:
    document = altered(plan_document, at, value)
    path = tmp_path / "altered.json"
    path.write_text(json.dumps(document))

    with pytest.raises(UserError) as caught:
        load_plan(path)

    assert at.rpartition(".")[2].removesuffix("low").removesuffix("value") in str(caught.value)
    assert "edited" not in str(caught.value)


def run_document(plan_document) -> dict:
    part = {key: plan_document[key] for key in ("plan", "model", "workload", "runtime", "cluster")}
    measured = {"steps": 3, "step_s": {"median": 1.0, "spread": 0.1, "all": [1.0]}, "memory_by_rank": [{}]}
    more = {"measured": measured, "predicted": plan_document["estimate"], "versions": {"torch": "2.11"}}
    effects = [{"what": "tp", "requested": 1, "effective": 1, "ok": True}]
    head = {"schema_version": 1, "status": "finished", "taken_at": "2026-01-01", "complete": True, "exit_code": 0}
    return {**head, **part, **more, "effects": effects, "gpus": [{"throttle": []}], "survivors": []}


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ("status", 7),
        ("plan.pp", 0),
        ("model.hidden", 0),
        ("runtime.reduce_dtype", "float64"),
        ("cluster.groups.0.count", -1),
        ("predicted.step_s.value", -1.0),
        ("predicted.memory.peak_bytes", [1]),
        ("predicted.memory.by_category", {"weights": "many"}),
        ("measured.step_s.median", "soon"),
        ("measured.step_s.all", [-1.0]),
        ("measured.memory_by_rank", [{"peak_allocated_bytes": -1}]),
        ("effects.0.ok", "yes"),
        ("effects.0", 3),
        ("gpus.0.throttle", 3),
        ("versions.torch", 2),
    ],
)
def test_a_report_with_an_impossible_part_is_refused(plan_document, at, value) -> None:
    document = run_document(plan_document)
    verify_run(document, where="run.json")

    with pytest.raises(UserError) as caught:
        verify_run(altered(document, at, value), where="run.json")

    assert at.split(".")[-1] in str(caught.value) or at.split(".")[0] in str(caught.value)
