"""Plan files: the same bytes every time, refused when newer, edited or stale, never half written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from planner.plan_file import load_plan, plan_file, require_fresh, save_plan
from planner.search import suggest
from simulator.workload import Workload
from tests.planner.conftest import LLAMA8B, make_cluster
from topology import codec
from topology.errors import BadInput, BadPlan, Stale
from topology.profile import Profile


@pytest.fixture(scope="module")
def content():
    result = suggest(LLAMA8B, make_cluster(), Workload(seq_len=4096, global_batch_size=64), top=1)
    return plan_file(
        plan=result.plans[0].plan,
        estimate=result.plans[0].estimate,
        model=result.model,
        cluster=result.cluster,
        workload=result.workload,
        runtime=result.runtime,
        framework="torchtitan",
    )


def test_a_saved_plan_is_read_back_whole(content, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(content, path)

    assert load_plan(path) == content
    require_fresh(load_plan(path), model=content.model, cluster=content.cluster, workload=content.workload)


def test_overlap_by_site_is_kept(content, tmp_path):
    sited = replace(content, plan=content.plan.with_(tp_overlap="mlp_out=ring,mlp_in=fused"))
    save_plan(sited, tmp_path / "plan.json")

    read = load_plan(tmp_path / "plan.json").plan.tp_overlap
    assert read == "attention_in=none,attention_out=none,mlp_in=fused,mlp_out=ring"


def test_equal_questions_write_equal_bytes(content, tmp_path):
    save_plan(content, tmp_path / "a.json")
    save_plan(content, tmp_path / "b.json")

    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_files_are_not_overwritten_by_accident(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("precious")
    with pytest.raises(BadInput, match="exists"):
        save_plan(content, path)

    assert path.read_text() == "precious"
    save_plan(content, path, force=True)
    assert load_plan(path) == content
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_lost_gpu_makes_the_plan_stale(content):
    with pytest.raises(Stale, match="made for something else") as caught:
        require_fresh(content, cluster=make_cluster(1, 7))

    assert caught.value.exit_code == 1
    assert "8 GPUs then, 7 now" in caught.value.why


def test_another_profile_makes_the_plan_stale(content):
    """A plan remembers by which profile it was made; one made without any is stale for none."""
    first, second = (Profile(machine="here", gpu="h100-sxm", driver=driver) for driver in ("570", "580"))
    made = replace(content, fingerprints={**content.fingerprints, "profile": codec.fingerprint(first)})

    require_fresh(made, profile=first)
    with pytest.raises(Stale, match="made for something else") as caught:
        require_fresh(made, profile=second)
    assert "profile" in caught.value.why


def test_a_stale_workload_names_the_field(content):
    with pytest.raises(Stale) as caught:
        require_fresh(content, workload=replace(content.workload, seq_len=content.workload.seq_len * 2))

    assert f"seq_len: {content.workload.seq_len}, now {content.workload.seq_len * 2}" in caught.value.why


def edited(content, tmp_path, change):
    path = tmp_path / "plan.json"
    save_plan(content, path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema_version=99, tool_version="9.9"), "made by meshwright 9.9"),
        (lambda d: d.update(schema_version="1"), "schema_version"),
        (lambda d: d.update(schema_version=True), "schema_version"),
        (lambda d: d["model"].update(layers=33), "edited"),
        (lambda d: d["plan"].update(tp="8"), "not a valid PlanFile"),
        (lambda d: d["plan"].update(colour=1), "unknown keys"),
        (lambda d: d.pop("plan"), "not a plan file"),
    ],
)
def test_newer_edited_and_malformed_files_are_refused(content, tmp_path, change, message):
    with pytest.raises((BadPlan, BadInput), match=message) as caught:
        load_plan(edited(content, tmp_path, change))

    assert caught.value.exit_code == 2


@pytest.mark.parametrize("raw", [b"\x80\x04K\x01.", b"PK\x03\x04", b"[" * 100_000, b"{", b"\xff\xfe", b"3"])
def test_hostile_bytes_are_refused(raw, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(raw)
    with pytest.raises((BadPlan, BadInput)):
        load_plan(path)
