"""Ranges widen with what was never measured, and say so."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from simulator.calibration.distance import distance
from simulator.calibration.intervals import interval_table
from simulator.calibration.published_mfu import exceeded, highest_published
from simulator.config.adapter import Adapter
from simulator.config.runtime import Runtime
from topology.catalog.clusters import cluster

MEASURED = Runtime(name="torchtitan")


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "dgx-h200"])
def test_what_was_measured_has_its_own_range(name):
    assert cluster(name).slowest_kind.architecture in interval_table().measured_on.architectures
    assert distance(cluster(name), MEASURED, 64) == (1.0, ())


def test_blackwells_16_bit_products_have_the_spread_of_their_published_hosts():
    """SimuMax's host reaches 1,125 TFLOP/s of large products, the middle of nine tables of aiconfigurator 1,470."""
    upper = interval_table().factors["node"].high
    wide, names = distance(cluster("dgx-b200"), MEASURED, 8)
    low = Runtime(name="torchtitan", compute_dtype="float8")

    assert upper**wide > 1470 / 1125 * 0.97
    assert len(names) == 1
    assert distance(cluster("dgx-b200"), low, 8) == (1.0, ())


def test_each_thing_that_was_never_measured_widens_it():
    far = [
        distance(cluster("dgx-h100"), MEASURED, 8)[0],
        distance(cluster("dgx-h100"), Runtime(name="deepspeed"), 8)[0],
        distance(cluster("l40s-x8"), MEASURED, 8)[0],
        distance(cluster("l40s-x8"), Runtime(name="deepspeed"), 8)[0],
        distance(cluster("l40s-x8"), Runtime(name="deepspeed"), 2 * interval_table().measured_on.gpus)[0],
    ]

    assert far == sorted(far)
    assert len(set(far)) == len(far)


def test_an_mfu_that_no_published_run_reached_is_said_with_the_highest(planner):
    """The published rows of runs on 64 to 512 A100s reach 53 %: 2.6 B parameters on 64, by llm-foundry's table."""
    asked = ("--model", "llama2-7b", "--cluster", "dgx-a100", "--gpus", "128", "--framework", "llm-foundry")
    plan = ("--micro-batch", "2", "--global-batch", "1024")
    above, below = (
        " ".join(planner("estimate", *asked, *plan, "--recompute", mode).stdout.split()) for mode in ("none", "full")
    )

    assert highest_published(cluster("dgx-a100"), 312e12, 1 << 20) is None
    assert "; 54% is the most that the published runs on about as many of these GPUs reached (2.6 B" in above
    assert "published runs" not in below
    document = json.loads(planner("estimate", *asked, *plan, "--recompute", "none", "--json").stdout)
    assert document["above_published"]["source"] in above


def test_adapters_are_not_held_against_runs_that_trained_all_weights():
    high = SimpleNamespace(mfu=0.9, peak_flops=312e12)
    lora = Runtime(name="llm-foundry", adapter=Adapter(rank=16, target_modules=("q_proj",)))

    assert exceeded(high, cluster("dgx-a100"), Runtime(name="llm-foundry"), 128).parameters == 2_646_594_560
    assert exceeded(high, cluster("dgx-a100"), lora, 128) is None


def test_the_range_of_another_vendor_is_wider_and_the_answer_says_so(planner):
    flags = ("--model", "llama3-8b", "--gpus", "8", "--seq-len", "8192", "--global-batch", "8", "--recompute", "full")
    steps = {}
    for gpu in ("8xMI300X", "dgx-h100"):
        document = json.loads(planner("estimate", "--cluster", gpu, *flags, "--json").stdout)
        step = document["estimate"]["step_s"]
        steps[gpu] = math.log(step["high"] / step["value"])
        assert any("GPUs of AMD" in line for line in document["assumed"]) == (gpu == "8xMI300X")

    assert steps["8xMI300X"] > 3 * steps["dgx-h100"]
