"""Overlap modes where they will run: fresh inputs against float64, ranks delayed at random, graphs replayed. By hand:

pytest -m "gpu or multigpu" tests/executor/test_overlap_on_gpus.py
"""

from pathlib import Path

import pytest

from executor.launch.local_ranks import launch
from executor.launch.records import read_records

torch = pytest.importorskip("torch", reason="torch is not installed")

GPUS = torch.cuda.device_count()
ITERATIONS = 1000  # of each of a dozen operations
SHARED_ITERATIONS = 20  # where ranks take turns on one GPU, and every wait costs milliseconds
CAPTURED = 3  # sums


def wrong(checks: list[dict]) -> dict[str, tuple[float, float]]:
    """Return the largest difference and the tolerance of each check that failed."""
    return {
        f"{r['operation']} {r['mode']} {r['dtype']} {r['shape']}": (r["difference"], r["tolerance"])
        for r in checks
        if not r["ok"]
    }


@pytest.mark.multigpu
@pytest.mark.skipif(GPUS < 2, reason="there are not two CUDA GPUs")
@pytest.mark.parametrize("ranks", [2, *([4] if GPUS >= 4 else [])])
def test_every_mode_is_right_on_gpus(tmp_path: Path, ranks: int) -> None:
    """Odd shapes, every type, poisoned buffers; thousands of calls with delays; captured sums equal eager calls."""
    out = tmp_path / "checks.jsonl"
    arguments = [str(out), "--seconds=230", "--stages=check", f"--iterations={ITERATIONS}"]
    done = launch(
        "tests.executor.workers.overlap_checks_worker", arguments, ranks=ranks, budget_s=240, directory=tmp_path
    )

    assert done.ok, done.failure or done.stderr_tail[-3000:]
    records = list(read_records(out))
    assert [r for r in records if r["kind"] == "missing"] == []
    checks = [r for r in records if r["kind"] == "check"]
    assert len(checks) > 100
    assert sum("captured" in r["operation"] for r in checks) == CAPTURED
    assert wrong(checks) == {}


@pytest.mark.gpu
@pytest.mark.skipif(GPUS != 1, reason="there is not one CUDA GPU alone, which ranks would share")
@pytest.mark.parametrize("ranks", [4, 2])
def test_our_modes_are_right_on_a_shared_gpu(tmp_path: Path, ranks: int) -> None:
    """The same for the modes that move data themselves; the others would test gloo, or wait without a limit."""
    out = tmp_path / "checks.jsonl"
    arguments = [str(out), "--share-gpu", "--seconds=140", "--stages=check", f"--iterations={SHARED_ITERATIONS}"]
    done = launch(
        "tests.executor.workers.overlap_checks_worker", arguments, ranks=ranks, budget_s=150, directory=tmp_path
    )

    records = list(read_records(out))
    checks = [r for r in records if r["kind"] == "check"]
    assert wrong(checks) == {}  # what was wrong tells more than how it ended
    assert done.ok, done.failure or done.stderr_tail[-3000:]
    assert [r for r in records if r["kind"] == "missing"] == []
    assert next(r for r in records if r["kind"] == "modes")["left_out"] == [
        "nccl",
        "chunked",
    ]
    products, sums, many = 3 * 2 * 12, 4 + 8 + 8, 9  # operations, modes, shapes and types; ways to sum; long runs
    assert len(checks) == products + sums + many + CAPTURED
    assert sum("captured" in r["operation"] for r in checks) == CAPTURED
