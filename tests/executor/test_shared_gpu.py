"""What ranks that share one GPU are asked to check, and what they refuse. The checks themselves need that GPU."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch
import torch.distributed as dist

from executor.launch.local_ranks import Failure, LaunchResult
from executor.overlap import fused
from tests.executor.shared_gpu import gather_plainly
from tests.executor.test_on_gpus import ON_TWO, needs_more, reported, verify_all
from tests.executor.workers.overlap_checks_worker import parser, read


def test_a_shared_gpu_checks_the_modes_that_move_data_themselves() -> None:
    assert read(parser(), ["out", "--share-gpu"]).modes == ("copy_engine", "fused")
    assert len(read(parser(), ["out"]).modes) == 4


@pytest.mark.parametrize(
    "given", ["--stages=check,sums", "--modes=fused,chunked", "--modes=nccl", "--stages=everything"]
)
def test_times_and_other_modes_are_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(parser(), ["out", "--share-gpu", given], timed={"sums"})
    assert given.split("=")[1].rsplit(",", maxsplit=1)[-1] in capsys.readouterr().err


def test_plans_that_send_and_receive_do_not_share_a_gpu() -> None:
    left_out = {name for name, (_, plan) in ON_TWO.items() if needs_more(plan)}
    assert left_out == {
        *("pp-zbv", "pp-zbv-own-table", "pp-dualpipev", "bf16-pp-1f1b", "bf16-cp"),
    }
    assert len(ON_TWO) - len(left_out) == 22


def test_fused_products_leave_multiprocessors_to_copies_where_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "processors", lambda _: 132)
    assert fused.programs_on(torch.device("cuda", 0)) == 132

    monkeypatch.setattr(fused, "UNUSED_PROCESSORS", 33)
    assert fused.programs_on(torch.device("cuda", 0)) == 99


def test_functional_all_gathers_are_carried_out_by_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    called, plain = [], dist.all_gather_into_tensor
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda *a, **more: called.append(a) or plain(*a, **more))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    served = gather_plainly("CPU")
    try:
        x = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
        functional = torch.ops._c10d_functional
        moving = functional.all_gather_into_tensor.default(x, 1, dist.group.WORLD.group_name)
        found = functional.wait_tensor.default(moving)
    finally:
        served._destroy()
        dist.destroy_process_group()

    assert len(called) == 1
    assert found.data_ptr() != x.data_ptr()
    assert torch.equal(found, x)


def launched(outcome: str, seconds: float = 1.0) -> LaunchResult:
    failure = Failure(rank=1, exit_code=None, signal="SIGSEGV", message="") if outcome == "failed" else None
    return LaunchResult(
        outcome=outcome, exit_code=None, seconds=seconds, failure=failure, stdout_tail="", stderr_tail=""
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "outcome", "begun", "left"),
    [
        (1.0, "failed", ["abcdef", "cdef", "ef"], {"b", "d"}),
        (60.0, "failed", ["abcdef"], set("bcdef")),  # no time for another launch
        (1.0, "timeout", ["abcdef"], set("bcdef")),
    ],
)
def test_a_plan_that_ends_its_processes_costs_its_own_verdict(
    tmp_path: Path, seconds: float, outcome: str, begun: list[str], left: set[str]
) -> None:
    """The second and the fourth end their processes; the third raises."""
    launches = []

    def run(cases: list[dict], left_s: float) -> LaunchResult:
        launches.append("".join(case["id"] for case in cases))
        assert left_s == 75.0 - seconds * (len(launches) - 1)
        for case in cases:
            if case["id"] in "bd":
                return launched(outcome, seconds)
            (tmp_path / (case["id"] + (".rank1.txt" if case["id"] == "c" else ".json"))).write_text(json.dumps(case))
        return launched("finished", seconds)

    ended = verify_all([{"id": name} for name in "abcdef"], tmp_path, run, 75.0)

    assert launches == begun
    assert {name for name in ended if not reported(tmp_path, name)} == left
    assert all(ended[name].outcome == outcome for name in left)
