"""The two commands that look at machines rather than plans."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import pytest

from planner.cli import main

pytest.importorskip("topology.probe.from_text", reason="the readers are a part of their own")
pytest.importorskip("topology.probe.report", reason="the readers are a part of their own")

TOPO = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV4\tSYS\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV4\t X \tSYS\tSYS\tPIX\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV4\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV4\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def test_a_captured_topology_has_the_keys_of_the_contract(planner, tmp_path):
    path = tmp_path / "topo.txt"
    path.write_text(TOPO)
    done = planner("probe", "--from", path, "--gpu", "rtx-a6000", "--json")
    answer = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert {"schema_version", "gpus", "pairs", "islands", "nics", "closest_nics", "links", "findings"} <= set(answer)
    assert answer["pairs"]["0-1"] == "NV4"
    assert answer["pairs"]["0-2"] == "SYS"
    assert answer["islands"] == [[0, 1], [2, 3]]


def test_a_topology_on_standard_input_is_explained_in_words(planner):
    done = planner("probe", "--from", "-", "--gpu", "rtx-a6000", "--explain", stdin=TOPO)

    assert done.returncode == 0, done.stderr
    assert "GPUs 0, 1 are fully connected" in done.stdout
    assert "GPUs 2, 3" in done.stdout


def test_a_probed_machine_can_be_planned_for(planner, tmp_path):
    """From pasted text to a plan; tensor-parallel pairs land on the bridges."""
    path = tmp_path / "cluster.json"
    saved = planner("probe", "--from", "-", "--gpu", "rtx-a6000", "--out", path, stdin=TOPO)
    assert saved.returncode == 0, saved.stderr
    assert f"next: planner suggest --cluster {path}" in saved.stdout
    refused = planner("probe", "--from", "-", "--gpu", "rtx-a6000", "--out", path, stdin=TOPO)
    assert refused.returncode == 2
    asked = ("--seq-len", "2048", "--global-batch", "8", "--param-dtype", "bfloat16", "--tp", "2", "--cp", "1")
    done = planner("suggest", "--cluster", path, *asked, "--virtual-stages", "1", "--top", "2", "--json")

    assert done.returncode == 0, done.stderr
    for ranked in json.loads(done.stdout)["plans"]:
        placement = ranked["plan"]["placement"]
        assert sorted(placement) == [0, 1, 2, 3]
        assert {tuple(sorted(placement[i : i + 2])) for i in (0, 2)} == {(0, 1), (2, 3)}


def test_text_that_is_no_topology_is_refused(planner):
    done = planner("probe", "--from", "-", stdin="hello")

    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", ["1e99", "9" * 20, "a lot", "1.5"])
def test_a_size_that_is_none_names_sizes_that_are(planner, text):
    """What an error offers is taken by the command that printed it."""
    asked = ("collective", "--cluster", "dgx-h100", "--op", "all_reduce", "--gpus", "8", "--bytes")
    refused = planner(*asked, text)
    offered = re.findall(r"\d+(?:e\d+|[GM]i?B)?", refused.stderr.split("do:")[1])

    assert refused.returncode == 2
    assert offered
    assert planner(*asked, ",".join(offered), "--json").document["rows"]


def test_collective_rows_have_the_keys_of_the_contract(planner):
    pytest.importorskip("simulator.collectives.nccl_tables", reason="the collective model is a part of its own")
    done = planner(
        "collective",
        "--cluster",
        "dgx-h100",
        "--op",
        "all_reduce",
        "--gpus",
        "8",
        "--bytes",
        "1024,1MiB,1GB,2e9",
        "--json",
    )
    rows = json.loads(done.stdout)["rows"]

    assert done.returncode == 0, done.stderr
    assert [row["bytes"] for row in rows] == [1024, 1048576, 10**9, 2 * 10**9]
    for row in rows:
        assert {
            "machine",
            "op",
            "gpus",
            "bytes",
            "time_s",
            "algorithm",
            "busbw_bytes_per_s",
            "measured_s",
            "error",
        } <= set(row)
        assert row["time_s"]["low"] <= row["time_s"]["value"] <= row["time_s"]["high"]
        # nccl-tests: bus bandwidth of an all-reduce is size / time * 2 (n - 1) / n.
        assert row["busbw_bytes_per_s"] == pytest.approx(row["bytes"] / row["time_s"]["value"] * 2 * 7 / 8)
    nccl = planner("collective", "--gpus", "8", "--cost-model", "nccl", "--json")
    assert nccl.returncode == 0, nccl.stderr


def test_collective_tables_are_scored(planner, tmp_path):
    pytest.importorskip("simulator.collectives.nccl_tables", reason="the collective model is a part of its own")
    path = tmp_path / "tables.json"
    table = {"machine": "h100_sxm (NVIDIA H100 80GB HBM3)", "gpus": 8, "nodes": 1, "interconnect": "NVSwitch"}
    rows = [{"bytes": 1048576, "time_us": 30.0}]
    path.write_text(json.dumps({"tables": [{**table, "collective": "all_reduce", "rows": rows}]}))
    done = planner("collective", "--tables", path, "--json")
    (row,) = json.loads(done.stdout)["rows"]

    assert row["measured_s"] == pytest.approx(30e-6)
    assert row["error"] == pytest.approx(row["time_s"]["value"] / 30e-6 - 1)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--op", "all_dance"), 2),
        (("--gpus", "64", "--cluster", "h200x4"), 2),
        (("--op", "all_to_all", "--cost-model", "nccl"), 3),
    ],
)
def test_collective_refusals(planner, arguments, code):
    pytest.importorskip("simulator.collectives.nccl_tables", reason="the collective model is a part of its own")
    done = planner("collective", *arguments)

    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_a_profile_goes_before_the_model_and_is_checked(planner, tmp_path):
    """A measured size is answered by its measurement; a profile of other GPUs warns; an impossible one is refused."""
    path = tmp_path / "profile.json"
    sample = {"op": "all_reduce", "ranks": 8, "nodes": 1, "nbytes": 1048576, "time_s": 55e-6}
    today = datetime.now(UTC).isoformat()
    profile = {"machine": "m", "gpu": "h100-sxm", "taken_at": today, "collectives": [sample]}
    asked = ("collective", "--gpus", "8", "--bytes", "1048576", "--json", "--profile", path)
    path.write_text(json.dumps(profile))
    done = planner(*asked)
    path.write_text(json.dumps({**profile, "gpu": "h200-sxm"}))
    other = planner(*asked)
    path.write_text(json.dumps({**profile, "collectives": [{**sample, "time_s": 1e-9}]}))
    refused = planner(*asked)

    assert json.loads(done.stdout)["rows"][0]["time_s"]["value"] == pytest.approx(55e-6, rel=0.02)
    assert done.stderr == ""
    assert "the profile was taken on h200-sxm" in other.stderr
    assert refused.returncode == 2


# --- what the flags reach ---------------------------------------------------------------------------------------------


def test_a_named_cluster_is_written_for_other_tools(capsys) -> None:
    """ASTRA-sim's validated H100 file is one switch of 8; NCCL's XML has eight GPUs; SimAI's list counts its nodes."""
    outputs = {}
    for target in ("astra-sim", "nccl-xml", "simai"):
        assert main(["probe", "--from", "dgx-h100", "--to", target]) == 0
        outputs[target] = capsys.readouterr().out

    assert "topology: [ Switch ]" in outputs["astra-sim"]
    assert "npus_count: [ 8 ]" in outputs["astra-sim"]
    assert outputs["nccl-xml"].count("<gpu ") == 8
    assert outputs["simai"].split()[0].isdigit()


def rows(capsys, *flags: str) -> list[dict]:
    assert main(["collective", "--json", "--gpus", "8", "--bytes", "4096,1048576", *flags]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_algorithm_and_launch_mode_reach_the_model(capsys) -> None:
    """A forced ring is a ring; a loop of eager calls is never faster than a replayed graph."""
    assert all(row["algorithm"].startswith("ring/") for row in rows(capsys, "--algorithm", "ring"))
    eager, graph = rows(capsys, "--launch", "eager"), rows(capsys, "--launch", "graph")
    assert all(e["time_s"]["value"] >= g["time_s"]["value"] for e, g in zip(eager, graph, strict=True))


def test_unknown_algorithm_lists_the_known(capsys) -> None:
    assert main(["collective", "--gpus", "8", "--algorithm", "teleport"]) == 2
    assert "one_shot" in capsys.readouterr().err


def test_known_rows_of_a_table_are_given_away_not_scored(tmp_path, capsys) -> None:
    """Of 9 measured sizes with every 4th known, 6 are predicted; a profile of that GPU goes before the model."""
    sizes = [1 << (12 + 2 * i) for i in range(9)]
    table = {
        "machine": "dgx (NVIDIA H100 80GB HBM3)",
        "gpus": 8,
        "nodes": 1,
        "collective": "all_reduce",
        "rows": [{"bytes": size, "time_us": 20 + size / 4e5} for size in sizes],
    }
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({"tables": [table]}))

    assert main(["collective", "--tables", str(path), "--known-every", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 6
