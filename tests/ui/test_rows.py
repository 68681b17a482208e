"""What pages say of a machine and its plans: no more than is known, and where it comes from."""

from __future__ import annotations

import pytest

from planner.io.inputs import read_cluster
from planner.runs.runs_store import RunSummary
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT
from topology.health.diagnose import diagnose
from ui import rows
from ui.panels import in_words
from ui.rows import run_names

TOPO = ROOT / "tests" / "data" / "topo"


def figures(name):
    cluster = read_cluster(name)
    return {label: (value, about) for label, value, about in rows.machine_figures(cluster, diagnose(cluster))}


def test_what_a_matrix_does_not_say_is_unknown_and_not_none():
    """Eight GPUs on NV12, six ports, no rate and no GPU model in the text."""
    found = figures(str(TOPO / "33_a100_8gpu_4numa_odd_6nic.txt"))

    assert found["NVLink"][0] == "rate unknown"
    assert "NV12" in found["NVLink"][1]
    assert found["Network"][0] == "rate unknown"
    assert "6 ports" in found["Network"][1]
    assert found["GPU memory"][0] == "unknown"


def test_health_that_nobody_measured_is_not_called_healthy():
    assert figures("dgx-h100")["Health"][0] == "not measured"


def test_what_is_not_there_is_none():
    found = figures(str(TOPO / "27_2gpu_phb_consumer_numa_na.txt"))

    assert found["NVLink"][0] == "none"
    assert found["Network"][0] == "none"


def test_a_measured_machine_shows_what_was_measured_with_its_source():
    """The report of the same session says 376.6 to 379.5 GB/s over NVLink."""
    found = figures(str(ROOT / "examples" / "clusters" / "h200x4_measured" / "cluster.json"))

    value, about = found["NVLink"]
    assert value == "377 to 380 GB/s"
    assert about.startswith("Measured on this machine")
    assert "nominal 450 GB/s" in about
    assert "datasheet" in about


@pytest.mark.parametrize("name", ["dgx-h100", "h200x4", "dgx-1v"])
def test_a_machine_of_the_catalogue_says_datasheet(name):
    value, about = figures(name)["NVLink"]

    assert value.endswith("GB/s")
    assert "datasheet" in about
    assert "Measured" not in about


@pytest.mark.parametrize(
    ("remedy", "shown"),
    [
        ("--gpus 128", "128 GPUs"),
        ("a longer --time-limit 60; or --framework megatron-lm ", "a longer time limit 60; or framework megatron-lm "),
        ("planner probe --out here.json", "planner probe --out here.json"),
        ("--gpus 8; planner doctor --json says more", "8 GPUs; planner doctor --json says more"),
    ],
)
def test_flags_are_shown_as_fields_and_command_lines_keep_their_dashes(remedy, shown):
    assert in_words(remedy) == shown


def test_runs_are_named_by_what_tells_them_apart():
    def kept(number, plan, model="llama3-8b"):
        about = {"status": "finished", "complete": True, "framework": "torchtitan", "gpus": 1, "device": "NVIDIA H200"}
        known = dict.fromkeys(
            (*(f"{how}_{what}" for how in ("predicted", "measured") for what in ("step_s", "peak_bytes")),)
        )
        return RunSummary(
            **about,
            **known,
            id=f"{number}" * 12,
            taken_at="2026-11-29T06:20:25+00:00",
            model=model,
            plan=plan,
            seq_len=2048,
            global_batch_size=8,
            measured_tokens_per_s=None,
            directory="",
        )

    assert run_names([kept(1, "fsdp 2"), kept(2, "tp 2")]) == ["fsdp 2", "tp 2"]
    assert run_names([kept(1, "fsdp 2"), kept(2, "fsdp 2", "qwen3-8b"), kept(3, "fsdp 2")]) == [
        "llama3-8b (111111)",
        "qwen3-8b (222222)",
        "llama3-8b (333333)",
    ]
    assert run_names([kept(1, "fsdp 2")]) == ["(111111)"]
