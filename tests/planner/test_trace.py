"""`planner trace` writes what a viewer can open: events of every rank and stream, nested or disjoint, in one file."""

from __future__ import annotations

import json

import pytest

from planner.cli import main
from tests.planner.conftest import CASES, ROOT

FLAGS = ("--model", "llama3.2-1b", "--cluster", "dgx-h100", "--gpus", "4", "--seq-len", "2048", "--global-batch", "8")


def spans_by_track(path):
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    return events, tracks


@pytest.mark.parametrize(
    "flags", [("--pp", "2", "--schedule", "1F1B"), ("--tp", "2", "--tp-overlap", "async"), ("--dp-replicate", "4")]
)
def test_trace_by_flags_is_nested_or_disjoint_on_every_track(tmp_path, flags, capsys) -> None:
    out = tmp_path / "trace.json"

    assert main(["trace", *FLAGS, *flags, "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    events, tracks = spans_by_track(out)
    assert answer["spans"] == sum(map(len, tracks.values())) > 50
    for spans in tracks.values():
        open_ends = []
        for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= start + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-6
            open_ends.append(end)
    named = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert {rank for rank, _ in tracks} <= named
    assert max(end for spans in tracks.values() for _, end in spans) == pytest.approx(answer["step_s"] * 1e6, rel=1e-6)


def test_trace_of_a_case_names_the_case(tmp_path, capsys) -> None:
    file = CASES / "torchtitan_h200x4.json"
    name = json.loads(file.read_text())[1]["id"]
    out = tmp_path / "trace.json"

    assert main(["trace", "--case", str(file), "--id", name, "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["id"] == name
    assert sum(answer["breakdown_s"].values()) == pytest.approx(answer["step_s"])


def test_trace_refuses_to_replace_a_file_and_illegal_plans(tmp_path) -> None:
    out = tmp_path / "trace.json"
    out.write_text("mine")

    assert main(["trace", *FLAGS, "--out", str(out)]) == 2
    assert out.read_text() == "mine"
    assert main(["trace", *FLAGS, "--tp", "3", "--out", str(tmp_path / "other.json")]) in {2, 3}


def test_trace_prices_with_the_profile_given(tmp_path, capsys) -> None:
    question = ("--model", "llama3-8b", "--cluster", "h200x4", "--tp", "2", "--seq-len", "4096", "--global-batch", "8")
    known = json.loads((ROOT / "examples" / "profiles" / "h200x4.json").read_text())
    titan = (one for one in known["layers"] if one["runtime"]["name"] == "torchtitan" and not one["runtime"]["compile"])
    (tmp_path / "profile.json").write_text(json.dumps(known | {"layers": list(titan)[:8]}))
    profile = ("--profile", str(tmp_path / "profile.json"))

    def step_s(command: str, *more: str) -> float:
        assert main([command, *question, *more, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        return answer["step_s"] if command == "trace" else answer["estimate"]["step_s"]["value"]

    datasheet, measured = (step_s("trace", *more, "--out", str(tmp_path / f"{len(more)}")) for more in ((), profile))
    assert measured / datasheet == pytest.approx(step_s("estimate", *profile) / step_s("estimate"), abs=0.02)
    assert measured != pytest.approx(datasheet, rel=1e-3)


def test_a_timeline_that_is_too_long_is_refused_at_once(planner, tmp_path) -> None:
    flags = ("--model", "llama3-405b", "--cluster", "dgx-h100", "--gpus", "1008", "--tp", "8", "--seq-len", "4096")
    out = tmp_path / "trace.json"

    done = planner("trace", *flags, "--pp", "126", "--micro-batch", "1", "--global-batch", "1008", "--out", str(out))

    assert done.returncode == 2
    assert "--pp" in done.stderr
    assert not out.exists()


def test_a_long_timeline_is_drawn_with_the_micro_batches_that_show_it(tmp_path, capsys) -> None:
    flags = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--dp-shard", "8", "--micro-batch", "1")
    out = tmp_path / "trace.json"

    assert main(["trace", *flags, "--global-batch", str(1 << 20), "--out", str(out), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)

    assert (written["drawn_micro_batches"], written["micro_batches"]) == (3, 1 << 17)
    assert main(["trace", *flags, "--global-batch", "16", "--out", str(out), "--force"]) == 0
    assert "micro batches" not in capsys.readouterr().out
