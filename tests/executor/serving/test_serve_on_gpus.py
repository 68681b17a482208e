"""The bench of served GPUs, rehearsed on two ranks of gloo: predicted first, right, every request answered, side by
side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.nightly  # served numbers of one rank are in the gate
def test_two_ranks_serve_what_one_process_computes_and_the_table_has_every_figure(tmp_path: Path) -> None:
    """Torch's own all-reduce on gloo; CUDA graphs and our kernels need GPUs."""
    run = subprocess.run(
        [sys.executable, "tests/bench/serve_on_gpus.py", str(tmp_path), "--device=cpu", "--ranks=2", "--budget=240"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads((tmp_path / "tp2" / "serve.json").read_text())

    assert report["status"] == "finished", report["failure"]
    assert [check["ok"] for check in report["checks"]] == [True]
    assert [(step["phase"], step["batch"]) for step in report["steps"]] == [("decode", 2), ("prefill", 1)]
    assert [(load["complete"], len(load["answers"])) for load in report["loads"]] == [(True, 6), (True, 5)]
    assert report["missing"] == []
    predicted = json.loads((tmp_path / "tp2" / "request.json").read_text())["predicted"]
    assert report["request"]["predicted"] == predicted
    assert "Poisson, 20 requests/s" in (tmp_path / "serving_run.md").read_text()
