"""The one-go script survives pieces that fail or hang, and its table shows what was measured."""

import json
import sys
import time

from tests.bench.measure_machine import main, piece, table


def test_a_piece_that_hangs_is_ended(tmp_path):
    started = time.monotonic()

    done = piece("slow", [sys.executable, "-c", "import time; time.sleep(60)"], 1.0, tmp_path)

    assert done["ended"] == "timeout"
    assert time.monotonic() - started < 10


def test_a_program_that_is_not_there(tmp_path):
    assert piece("none", ["/nonexistent/program"], 1.0, tmp_path)["exit_code"] is None


def test_without_a_gpu_every_piece_is_tried_and_the_table_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert main([str(tmp_path / "out"), "--budget", "45"]) == 0

    out = capsys.readouterr().out
    assert "there is no GPU here to judge" in out
    assert "no measurement" in out
    names = [done["name"] for done in json.loads((tmp_path / "out" / "pieces.json").read_text())]
    assert names[:2] == ["probe", "doctor"]


def test_the_table_has_bus_bandwidth(tmp_path):
    """256 MiB all-reduced by four in 1.1 ms is 2 x 3/4 x 2^28 / 1.1e-3 = 366 GB/s."""
    sample = {"op": "all_reduce", "ranks": 4, "nodes": 1, "nbytes": 2**28, "time_s": 1.1e-3, "launch": "queued"}
    flow = {"src": "gpu0", "dst": "gpu1", "bytes_per_s": 390e9, "spread": 0.0, "correct": False, "peer": True}
    measured = {
        "gpus": ["NVIDIA H200"],
        "driver": "580.1",
        "versions": {"torch": "2.11.0"},
        "flows": [{"pattern": "pair", "nbytes": 1, "flows": [flow]}],
        "compute": [{"gpu": 0, "sustained_flops": 7e14, "memory_bytes_per_s": 4.2e12}],
        "groups": [{"sample": sample, "gpus": [0, 1, 2, 3], "alongside": 0, "iterations": 20, "spread": 0.02}],
        "missing": ["something: out of time"],
    }
    (tmp_path / "measured.json").write_text(json.dumps(measured))

    lines = table(tmp_path, [])

    assert any("366.0" in line and "1100.0" in line for line in lines)
    assert any("390.0" in line and "WRONG BYTES" in line for line in lines)
    assert any("4.20" in line and "700" in line for line in lines)
    assert lines[-1] == "missing: something: out of time"
