"""Profiles are put together without loss, and the store keeps what it has."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.errors import BadInput, NewerSchema, PlannerError
from topology.profile.profile import PROFILE_SCHEMA_VERSION, CollectiveSample, Profile, check_profile, read_profile
from topology.profile.samples import Conditions, LayerSample, OperatorSample, Provenance
from topology.profile.store import (
    add_to_store,
    current_samples,
    merge,
    profile_from_records,
    read_stored,
    store_path,
    with_named_runs,
)


def operator(m: int = 64, **changes) -> OperatorSample:
    fields = {"kind": "matmul", "name": "matmul", "shape": {"m": m, "n": 8, "k": 8}, "dtype": "bfloat16"}
    return OperatorSample(**{**fields, "seconds": 1e-5, **changes})


def profile(*operators: OperatorSample, driver: str = "1", torch: str = "2.11.0", **changes) -> Profile:
    return Profile(
        machine="m", gpu="h200-sxm", driver=driver, versions={"torch": torch}, operators=operators, **changes
    )


def test_a_newer_sample_of_the_same_thing_replaces_the_older() -> None:
    both = merge(profile(operator(seconds=1e-5)), profile(operator(seconds=2e-5)))

    assert [s.seconds for s in both.operators] == [2e-5]


def test_samples_of_another_driver_stay_beside_and_are_not_used() -> None:
    both = merge(profile(operator(seconds=1e-5), driver="1"), profile(operator(seconds=2e-5), driver="2"))

    assert [s.seconds for s in both.operators] == [1e-5, 2e-5]
    assert [s.seconds for s in current_samples(both).operators] == [2e-5]


def test_a_build_of_the_same_library_is_the_same_library() -> None:
    both = merge(profile(operator(), torch="2.11.0"), profile(operator(128), torch="2.11.0+cu130"))

    assert len(current_samples(both).operators) == 2


def test_a_throttled_sample_does_not_drive_out_a_good_one() -> None:
    hot = operator(
        seconds=9e-5, invalid="the GPU was slowed down", conditions=Conditions(throttle=("hardware slowdown",))
    )

    assert [s.seconds for s in merge(profile(operator()), profile(hot)).operators] == [1e-5]


def test_profiles_of_two_gpus_are_not_mixed() -> None:
    with pytest.raises(BadInput, match="does not go with"):
        merge(profile(operator()), dataclasses.replace(profile(operator()), gpu="a100-sxm-80gb"))


@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["1", "2"])), max_size=12))
def test_merging_is_idempotent_and_keeps_every_key(samples) -> None:
    whole = profile()
    for m, driver in samples:
        whole = merge(whole, profile(operator(m), driver=driver))

    again = merge(whole, whole)

    assert {(s.key, s.run) for s in again.operators} == {(s.key, s.run) for s in whole.operators}
    assert len(whole.operators) == len(set(samples))


def test_the_store_keeps_old_samples_and_writes_valid_files(tmp_path) -> None:
    add_to_store(profile(operator(1)), tmp_path)
    path = add_to_store(profile(operator(2)), tmp_path)

    assert path.parent == tmp_path
    assert {s.shape["m"] for s in read_profile(path).operators} == {1, 2}
    assert read_stored("H200-SXM", tmp_path) is not None
    assert read_stored("l40s", tmp_path) is None


def test_four_writers_at_once_lose_no_sample(tmp_path) -> None:
    code = """
import sys
from pathlib import Path
from topology.profile.profile import Profile
from topology.profile.samples import HostSample
from topology.profile.store import add_to_store
for turn in range(10):
    sample = HostSample(name=f"call {turn} of {sys.argv[2]}", seconds=1e-5)
    add_to_store(Profile(machine="m", gpu="h200-sxm", host=(sample,)), Path(sys.argv[1]))
"""
    root = Path(__file__).resolve().parents[2]
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(one)], cwd=root) for one in range(4)]

    assert [writer.wait(300) for writer in writers] == [0] * 4
    kept = read_stored("h200-sxm", tmp_path)
    assert kept is not None
    assert len(kept.host) == 40


def test_a_damaged_file_is_set_aside_and_one_of_a_newer_release_left_alone(tmp_path) -> None:
    path = store_path("h200-sxm", tmp_path)
    path.write_text('{"machine": "m", "gpu": "h200-s')
    said: list[str] = []

    add_to_store(profile(operator(1)), tmp_path, tell=said.append)

    assert (tmp_path / f"{path.name}.damaged-1").read_text() == '{"machine": "m", "gpu": "h200-s'
    assert "damaged-1" in said[0]
    assert len(read_profile(path).operators) == 1

    newer = json.dumps(
        {**json.loads(path.read_text()), "schema_version": PROFILE_SCHEMA_VERSION + 1, "of_the_future": 1}
    )
    path.write_text(newer)
    with pytest.raises(NewerSchema, match=f"schema {PROFILE_SCHEMA_VERSION + 1}"):
        add_to_store(profile(operator(2)), tmp_path)
    assert path.read_text() == newer


def test_a_folder_that_cannot_be_written_is_no_damage(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlannerError, match="cannot write"):
        add_to_store(profile(operator(1)), tmp_path / "file" / "profiles")


@pytest.mark.parametrize("gpu", ["../../etc/passwd", "a/b", "", "..", "x" * 3 + "\n"])
def test_no_gpu_name_leaves_the_folder(gpu: str, tmp_path) -> None:
    assert store_path(gpu, tmp_path).parent == tmp_path


def test_schema_1_is_read_and_its_samples_get_the_provenance_of_its_head(tmp_path) -> None:
    path = tmp_path / "old.json"
    path.write_text(
        '{"machine": "m", "gpu": "h200-sxm", "schema_version": 1, "driver": "7", "collectives": '
        '[{"op": "all_reduce", "ranks": 2, "nodes": 1, "nbytes": 1024, "time_s": 1e-5}]}',
        encoding="utf-8",
    )

    named = with_named_runs(read_profile(path))

    (sample,) = named.collectives
    assert named.runs[sample.run].driver == "7"


def test_no_run_of_full_depth_calibrates_anything() -> None:
    deep = LayerSample(model={"layers": 32}, plan={}, workload={}, runtime={}, step_s=1.0)

    with pytest.raises(BadInput, match=r"layers\[0\] has 32 layers"):
        check_profile(profile(layers=(deep,)))


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": 0.0},
        {"seconds": float("nan")},
        {"kind": "gossip"},
        {"direction": "up"},
        {"shape": {}},
        {"regime": "x"},
    ],
)
def test_operators_that_cannot_be_are_refused(changes) -> None:
    with pytest.raises(BadInput, match=r"\$\.operators\[0\]"):
        check_profile(profile(operator(**changes)))


def test_faster_than_the_gpu_is_refused() -> None:
    from topology.catalog.cluster_file import load_cluster

    impossible = operator(shape={"m": 8192, "n": 8192, "k": 8192}, seconds=1e-5)
    with pytest.raises(BadInput, match="TFLOP/s"):
        check_profile(profile(impossible), cluster=load_cluster("h200x4"))


def test_records_become_a_profile_with_provenance_for_every_sample() -> None:
    head = {"kind": "header", "machine": "m", "gpu": "h200-sxm", "driver": "5", "versions": {"python": "3"}}
    sample = {
        "kind": "matmul",
        "name": "matmul",
        "shape": {"m": 1, "n": 1, "k": 1},
        "dtype": "bfloat16",
        "seconds": 1e-6,
    }
    group = {"op": "all_reduce", "ranks": 2, "nodes": 1, "nbytes": 64, "time_s": 1e-5}
    found = profile_from_records(
        [
            head,
            {"kind": "header", "versions": {"torch": "2"}},
            {"kind": "operator", "sample": sample},
            {"kind": "group", "sample": group, "gpus": [0, 1], "iterations": 3, "alongside": 0},
            {"kind": "group", "sample": group, "gpus": [0, 1], "iterations": 3, "alongside": 1},
            {"kind": "missing", "what": "tea"},
        ]
    )

    (run,) = found.runs.values()
    assert isinstance(run, Provenance)
    assert run.versions == {"python": "3", "torch": "2"}
    assert found.operators[0].run in found.runs
    assert found.collectives == (CollectiveSample(**group, run=found.operators[0].run),), (
        "what ran alongside others is left out"
    )
    assert found.missing == ("tea",)


@pytest.mark.parametrize("records", [[], [{"kind": "operator", "sample": {}}], [{"kind": "tea"}]])
def test_records_without_a_header_or_of_unknown_kinds_are_refused(records) -> None:
    with pytest.raises(BadInput):
        profile_from_records(records)
