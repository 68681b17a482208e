"""What ranks that share one GPU are asked to check, and what they refuse. The checks themselves need that GPU."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tests.bench.overlap_worker import arguments
from tests.executor.test_on_gpus import ON_TWO, needs_more


def test_a_shared_gpu_checks_the_modes_that_move_data_themselves() -> None:
    assert arguments(["out", "--share-gpu"]).modes == ("copy_engine", "fused")
    assert len(arguments(["out"]).modes) == 6


@pytest.mark.parametrize("given", ["--stages=check,sums", "--modes=fused,ring", "--modes=nccl", "--stages=chek"])
def test_times_and_other_modes_are_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["out", "--share-gpu", given])
    assert given.split("=")[1].rsplit(",", maxsplit=1)[-1] in capsys.readouterr().err


def test_plans_that_send_and_receive_do_not_share_a_gpu() -> None:
    left_out = {name for name, (_, plan) in ON_TWO.items() if needs_more(plan)}
    assert left_out == {
        *("pp-zbv", "pp-zbv-own-table", "pp-dualpipev", "bf16-pp-1f1b", "bf16-cp"),
        *("tp-overlap-ring", "tp-overlap-mixed", "tp-overlap-one-gather", "tp-overlap-async"),
    }
    assert len(ON_TWO) - len(left_out) == 14
