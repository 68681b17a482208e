"""Plan files: the same bytes every time, refused when newer, edited or stale, never half written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.question.plan_file import fingerprints, load_plan, plan_file, require_fresh, save_plan
from tests.planner.conftest import make_cluster
from topology import codec
from topology.errors import BadInput, BadPlan, Stale
from topology.profile.profile import Profile


def test_a_saved_plan_is_read_back_whole(content, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(content, path)

    assert load_plan(path) == content
    require_fresh(load_plan(path), model=content.model, cluster=content.cluster, workload=content.workload)


def test_overlap_by_site_is_kept(content, tmp_path):
    plan = content.plan.with_(tp_overlap="mlp_out=chunked,mlp_in=fused")
    sited = plan_file(content.question(), plan, content.estimate)
    save_plan(sited, tmp_path / "plan.json")

    read = load_plan(tmp_path / "plan.json").plan.tp_overlap
    assert read == "attention_in=none,attention_out=none,mlp_in=fused,mlp_out=chunked"


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
    codec.write_text(path, codec.to_json(content))
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
        (lambda d: d["plan"].update(recompute="full" if d["plan"]["recompute"] != "full" else "none"), "edited"),
        (lambda d: d["runtime"].update(compile=not d["runtime"]["compile"]), "edited"),
        (lambda d: d["estimate"].update(mfu=0.99), "edited"),
        (lambda d: d.update(framework="megatron-lm"), "edited"),
        (lambda d: d["fingerprints"].pop("plan"), "edited"),
        (lambda d: d["plan"].update(tp="8"), "not a valid plan file"),
        (lambda d: d["plan"].update(colour=1), "an unknown key"),
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


@pytest.mark.parametrize(
    ("part", "field", "value", "allowed"),
    [
        ("plan", "tp", -1, "from 1 to"),
        ("plan", "pp", 0, "from 1 to"),
        ("plan", "ep", -2, "from 1 to"),
        ("plan", "virtual_stages", 0, "from 1 to"),
        ("plan", "dp_shard", 10**18, "from 1 to"),
        ("plan", "micro_batch_size", 10**12, "from 1 to"),
        ("plan", "zero_stage", 4, "from 0 to 3"),
        ("plan", "capacity_factor", -1.0, "above zero"),
        ("plan", "layers_per_stage", (1, 2, 3), "stages"),
        ("plan", "placement", (0, 0), "each on its own GPU"),
        ("plan", "placement", tuple(range(1, 9)), "from 0 to 7"),
        ("plan", "recompute_per_stage", ("none",) * 3, "stages"),
        ("plan", "schedule", "x" * 65, "64 characters"),
        ("workload", "global_batch_size", -64, "from 1 to"),
        ("workload", "seq_len", 0, "from 1 to"),
        ("workload", "expert_imbalance", 0.5, "from 1 on"),
        ("workload", "task", "serve", "only train"),
        ("runtime", "param_dtype", "float64", "known: float32"),
        ("runtime", "reduce_dtype", "int8", "known: float32"),
    ],
)
def test_values_out_of_range_are_refused_by_field(content, tmp_path, part, field, value, allowed):
    """Also in a file whose fingerprints were made anew: every value has its range."""
    odd = replace(content, **{part: replace(getattr(content, part), **{field: value})})
    codec.write_text(tmp_path / "plan.json", codec.to_json(replace(odd, fingerprints=fingerprints(odd))))
    with pytest.raises(BadPlan, match=f"{part}.{field}") as caught:
        load_plan(tmp_path / "plan.json")

    assert caught.value.exit_code == 2
    assert allowed in caught.value.why


def test_a_file_of_a_release_with_fewer_fields_is_not_taken_for_an_edited_one(planner, tmp_path):
    """As files were before plans could be offloaded: without the field, in their fingerprints too."""
    path = tmp_path / "plan.json"
    planner("estimate", "--model", "llama3.2-1b", "--gpus", 8, "--micro-batch", 1, "--out", path)
    content = json.loads(path.read_text())
    del content["plan"]["offload"], content["estimate"]["memory"]["host_bytes"]
    content["fingerprints"] |= {name: codec.fingerprint(content[name]) for name in ("plan", "estimate")}
    path.write_text(json.dumps(content))
    read = planner("estimate", "--plan", path, "--json")
    content["plan"]["micro_batch_size"] = 2
    path.write_text(json.dumps(content))
    edited = planner("estimate", "--plan", path)

    assert json.loads(read.stdout)["plan"]["offload"] == "none"
    assert edited.returncode == 2
    assert "was edited" in edited.stderr


def test_rates_follow_from_the_step_and_a_file_that_has_rates_alone_is_read() -> None:
    path = Path(__file__).parents[1] / "data/plan_rates_alone.json"
    stated = json.loads(path.read_text())["estimate"]
    read = load_plan(path).estimate
    slower = replace(read, step_s=read.step_s.at(2 * read.step_s.value))

    assert "tokens_per_gpu" not in stated
    for name in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"):
        assert getattr(read, name) == pytest.approx(stated[name], rel=1e-9)
        assert getattr(slower, name) == pytest.approx(stated[name] / 2, rel=1e-9)
    assert slower.step_s.high / slower.step_s.value == pytest.approx(
        stated["step_s"]["high"] / stated["step_s"]["value"]
    )
