"""Groups and sizes that are timed; and under gloo, that the whole path runs and adds up."""

import importlib.util

import pytest

from executor.measure import doctor_worker
from executor.measure.doctor_worker import main
from executor.measure.probe_collectives import OPS, group_sets, rounded_bytes, sizes
from topology.profile.measurement import profile_from_measurement, read_measurement
from topology.profile.profile import check_profile

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (1, []),
        (2, [((0, 1),)]),
        (3, [((0, 1, 2),), ((0, 1),)]),
        (4, [((0, 1, 2, 3),), ((0, 1),), ((0, 1), (2, 3))]),
    ],
)
def test_groups(world: int, expected: list) -> None:
    assert group_sets(world) == expected


def test_eight_ranks_have_groups_of_two_four_and_eight() -> None:
    assert [len(together[0]) for together in group_sets(8)] == [8, 2, 4, 2]


def test_powers_of_four_come_first() -> None:
    first, second = sizes(2**30)

    assert first == [4**k for k in range(5, 16)]
    assert sorted(first + second) == [2**k for k in range(10, 31)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_shares_are_whole_elements(op: str, ranks: int) -> None:
    for nbytes in (1024, 4096, 2**20):
        got = rounded_bytes(op, nbytes, ranks, 2)

        assert got % 2 == 0
        assert nbytes - 2 * ranks < got <= nbytes
        if op in {"all_gather", "reduce_scatter", "all_to_all"}:
            assert got % (2 * ranks) == 0


@needs_torch
def test_the_whole_measurement_runs_on_gloo(tmp_path) -> None:
    out = tmp_path / "measured.json"

    code = main([f"--out={out}", "--budget=60", "--device=cpu", "--indices=0,1", "--pieces=flows,compute,collectives"])

    assert code == 0
    measured = read_measurement(out)
    assert measured.device == "cpu"
    assert measured.complete, measured.missing
    assert {group.sample.op for group in measured.groups} == set(OPS)
    assert {sample.gpu for sample in measured.compute} == {0, 1}
    assert measured.versions
    assert "torch" in measured.versions
    check_profile(profile_from_measurement(measured, gpu="none"))


def test_without_a_gpu_there_is_nothing_to_measure(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert main([f"--out={tmp_path / 'm.json'}", "--budget=5"]) == 1
    assert "there is no GPU to measure" in capsys.readouterr().err


def test_pieces_that_need_no_torch(tmp_path) -> None:
    out = tmp_path / "measured.json"

    code = main([f"--out={out}", "--budget=20", "--device=cpu", "--indices=0,1,2", "--pieces=flows,compute"])

    assert code == 0
    measured = read_measurement(out)
    assert len(measured.pairs()) == 6
    assert measured.groups == ()


def test_a_piece_that_fails_is_named_and_the_rest_is_kept(tmp_path, monkeypatch) -> None:
    """Without torch the collectives cannot start; with it, they find no network interface of that name."""
    monkeypatch.setattr(doctor_worker, "loopback_environment", lambda: {"GLOO_SOCKET_IFNAME": "absent0"})
    out = tmp_path / "measured.json"

    code = main([f"--out={out}", "--budget=60", "--device=cpu", "--indices=0,1", "--pieces=flows,collectives"])

    assert code == 0
    measured = read_measurement(out)
    assert measured.flows
    assert any(what.startswith("collectives") for what in measured.missing)
