"""What people ask and how they are refused: the command line as a user meets it."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from planner.cli import main
from planner.question.goal import Goal, goal_of
from planner.question.question import question_of
from planner.requests.training import Suggest
from planner.search.plan_space.candidates import NODE_FIELDS, enumerate_nodes
from planner.search.plan_space.stated import exactly
from planner.search.run_failures import run_time
from simulator.config.estimate import Interval
from simulator.config.hf_config import load_model
from simulator.config.workload import Workload
from tests.planner.conftest import CASES, MIXTRAL, ROOT, make_cluster
from tests.planner.every_plan import UNBOUNDED
from topology.cluster import Source
from topology.errors import Infeasible

SMALL = ("--model", "llama3.2-1b", "--seq-len", "2048", "--gpus", "8", "--global-batch", "64")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved plan on eight GPUs."""
    path = tmp_path_factory.mktemp("saved") / "plan.json"
    assert main(["suggest", *SMALL, "--pp", "1", "--top", "1", "--out", str(path)]) == 0
    return path


# --- edges --------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_modules_are_imported_is_130():
    """Ctrl-C before the command has begun ends quietly: here at the import of the command line itself."""
    code = """
import os, signal, sys
from planner import __main__

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "planner.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.exit(__main__.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_no_internal_error(planner, planner_process):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = planner_process("estimate", *SMALL, stdout=full, stderr=subprocess.PIPE)
    saved = planner("suggest", *SMALL, "--pp", "1", "--top", "1", "--no-simulate", "--out", "/dev/full")

    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "internal error" not in done.stderr
    assert saved.returncode == 2
    assert "No space left on device" in saved.stderr


def test_a_device_is_written_to_not_replaced(planner, tmp_path):
    """--out /dev/stdout and a named pipe take the plan; they are not exchanged for a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert planner("suggest", *SMALL, "--pp", "1", "--top", "1", "--no-simulate", "--out", pipe).returncode == 0

    assert pipe.is_fifo()
    assert json.loads(os.read(reader, 1 << 20))["plan"]
    os.close(reader)


@pytest.mark.parametrize(
    "command", [("suggest", "--out"), ("trace", "--out"), ("explain", "--svg"), ("probe", "--out")]
)
def test_a_missing_folder_is_refused_before_the_work(planner, tmp_path, command):
    """A misspelt folder is neither made in silence nor noticed only after a long search."""
    done = planner(command[0], command[1], tmp_path / "no" / "such" / "file.json")

    assert done.returncode == 2
    assert "there is no folder" in done.stderr
    assert "mkdir -p" in done.stderr
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("said", "numbers"), [("128k", "131072 or 128000"), ("1.5M", "1572864 or 1500000")])
def test_a_rounded_number_of_tokens_is_answered_with_what_it_may_be(planner, said, numbers):
    done = planner("estimate", "--model", "llama3-8b", "--seq-len", said)

    assert done.returncode == 2
    assert f"'{said}' may be {numbers}" in done.stderr


def test_a_path_below_a_file_is_refused_without_advice_that_cannot_help(planner, tmp_path):
    (tmp_path / "plan.json").touch()
    done = planner("probe", "--out", tmp_path / "plan.json" / "below" / "file.json")

    assert done.returncode == 2
    assert f"{tmp_path / 'plan.json'} is not a folder" in done.stderr
    assert "mkdir" not in done.stderr


def test_a_validation_that_compared_nothing_has_not_succeeded(planner, tmp_path):
    """Rows that all were skipped, or no rows at all, are no answer."""
    row = json.loads((CASES / "torchtitan_h200x4.json").read_text(encoding="utf-8"))[0]
    row["runtime"]["optimizer"] = "shampoo"  # not modelled
    for name, rows in (("skipped.json", [row]), ("empty.json", [])):
        path = tmp_path / name
        path.write_text(json.dumps(rows), encoding="utf-8")

        assert planner("validate", path).returncode == 3
        assert planner("validate", path, "--tolerance", "10").returncode == 3


@pytest.mark.parametrize("degree", ["dp_shard", "tp", "pp", "micro_batch_size"])
@pytest.mark.parametrize("value", [-1, 0, 10**18])
def test_impossible_numbers_in_files_are_bad_input(planner, tmp_path, saved, degree, value):
    """In a case and in a saved plan, whose numbers are looked at before its fingerprints."""
    plan = json.loads(saved.read_text(encoding="utf-8"))
    plan["plan"][degree] = value
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    case = json.loads((CASES / "torchtitan_h200x4.json").read_text(encoding="utf-8"))[0]
    case["plan"][degree] = value
    (tmp_path / "case.json").write_text(json.dumps(case), encoding="utf-8")

    for arguments in (("--plan", tmp_path / "plan.json"), ("--case", tmp_path / "case.json")):
        done = planner("estimate", *arguments)
        assert done.returncode == 2, done.stderr
        assert degree in done.stderr


# --- parts of a plan that are fixed -------------------------------------------------------------------------------

PARTS = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "virtual_stages", "micro_batch_size")


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (("--tp", "2-4", "--pp", "2,4", "--schedule", "1f1b"), {"tp": {2, 4}, "pp": {2, 4}, "schedule": {"1F1B"}}),
        (
            ("--gpus", "4", "--dp-shard", "2", "--micro-batch", "1", "--recompute", "full", "--schedule", "1f1b"),
            {"dp_shard": {2}, "recompute": {"full"}, "micro_batch_size": {1}, "schedule": {"", "1F1B"}},
        ),
        (
            ("--gpus", "4", "--virtual-stages", "3", "--pp", "2", "--schedule", "interleaved1f1b"),
            {"virtual_stages": {3}, "pp": {2}},
        ),
    ],
)
def test_fixed_parts_are_kept(planner, flags, kept):
    """Every plan listed has the values said; 3 stages a rank are no power of two, and so not searched unless said."""
    narrow = ("--global-batch", "8", "--cp", "1")
    done = planner("suggest", *SMALL, *narrow, *flags, "--no-simulate", "--json", "--all", "--top", "8")

    assert done.returncode == 0, done.stderr
    for listed in json.loads(done.stdout)["plans"]:
        assert all(listed["plan"][name] in values for name, values in kept.items()), listed["plan"]


@pytest.mark.parametrize("seed", range(12))
def test_fixing_parts_filters_the_legal_plans(seed):
    """Independent truth: enumerate everything without limits, keep the rows that match, compare as sets."""
    rng = random.Random(seed)
    names = rng.sample([*PARTS, "schedule"], rng.randint(1, 3))
    question = question_of(
        MIXTRAL,
        make_cluster(2),
        Workload(seq_len=2048, global_batch_size=32),
        framework=rng.choice(["torchtitan", "megatron-lm"]),
    )
    everything = enumerate_nodes(question, bounds=UNBOUNDED).columns
    row = rng.randrange(len(everything))
    said = {name: {getattr(everything, name)[row].item()} for name in names}
    for name in names:
        said[name] |= {rng.choice(np.unique(getattr(everything, name))).item()}
    said = {name: values - {""} for name, values in said.items() if values - {""}}
    stated = {name: tuple(values) if name == "schedule" else exactly(*values) for name, values in said.items()}

    found = enumerate_nodes(question, bounds=UNBOUNDED.fixing(**stated)).columns

    def rows(columns):
        return set(zip(*(getattr(columns, name).tolist() for name in NODE_FIELDS), strict=True))

    wanted = {
        one for one in rows(everything) if all(one[NODE_FIELDS.index(name)] in values for name, values in said.items())
    }
    assert rows(found) == wanted


@pytest.mark.parametrize(
    ("flags", "why", "remedy"),
    [
        (
            ("--micro-batch", "3"),
            "global batch 64 is not divisible by data parallel 8 x micro batch 3",
            "--micro-batch 1, 2, 4, 8",
        ),
        (("--tp", "3"), "32 query heads are not divisible by tp 3", "--tp 1, 2, 4, 8"),
        (("--ep", "8"), "has no experts", "--ep 1"),
        (("--pp", "1", "--schedule", "1F1B"), "pp is 1", "--pp 2, 4, 8"),
        (("--schedule", "zigzag"), "has no schedule 'zigzag'", "--schedule 1F1B"),
        (("--dp-shard", "3", "--dp-replicate", "2"), "= 6, but there are 8 GPUs", "--dp-shard 1, 2, 4"),
        (("--tp", "8", "--max-tp", "4"), "tensor parallelism over 4", "--tp 1, 2, 4"),
        (("--virtual-stages", "2", "--pp", "1"), "without a pipeline", "--virtual-stages 1"),
    ],
)
def test_what_cannot_be_says_why_and_what_could(planner, flags, why, remedy):
    done = planner("suggest", *SMALL, *flags)

    assert done.returncode == 3
    assert why in done.stderr
    assert remedy in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tp", "2", "--tp=4"), "--tp is given as 2 and as 4: the last is used"),
        (("--seq", "4096"), "--seq-len is given as 2048 and as 4096: the last is used"),
        (("--compile", "--no-compile"), "--compile is given as --compile and as --no-compile: the last is used"),
        (("--pp", "1", "--pp", "1", "--json", "--json"), ""),
    ],
)
def test_a_flag_with_two_values_says_which_is_used(planner, flags, said):
    answer = planner("estimate", *SMALL, "--micro-batch", "1", *flags)

    assert answer.returncode == 0
    assert said in answer.stderr
    assert said or not answer.stderr


@pytest.mark.parametrize(
    ("gpu", "cluster", "said"),
    [
        ("h200-sxm", "dgx-h100", "dgx-h100 has h100-sxm"),
        ("16", "dgx-h100", "--gpus 16"),
        ("h101", "dgx-h100", "unknown GPU 'h101'"),
        ("a100", "8xA100-40GB", ""),
    ],
)
def test_a_gpu_that_the_cluster_contradicts_is_refused_instead_of_ignored(planner, gpu, cluster, said):
    answer = planner("estimate", *SMALL, "--cluster", cluster, "--gpu", gpu, "--micro-batch", "1")

    assert (answer.returncode, said in answer.stderr) == (2 if said else 0, True)


@pytest.mark.parametrize("value", ["x", "0", "4-2", "2,,4", "-3", "1.5", "9999999999", "", "2-"])
def test_parts_that_are_no_numbers_are_refused(planner, value):
    done = planner("suggest", *SMALL, f"--tp={value}")

    assert done.returncode == 2
    assert "--tp 2-8" in done.stderr


# --- bytes by axis and link ---------------------------------------------------------------------------------------


def test_sharding_inside_nodes_is_seen_to_spare_the_network(planner, tmp_path):
    """`compare` of full sharding with hybrid sharding says what each sends between nodes, in text and JSON."""
    nodes = {"gpu": "h100-sxm", "gpus_per_node": 2, "nodes": 2, "interconnect": "nvswitch", "nic_gbit_per_gpu": 400}
    (tmp_path / "cluster.json").write_text(json.dumps(nodes), encoding="utf-8")
    wide = ("--cluster", tmp_path / "cluster.json", "--model", "tiny-llama", "--seq-len", "2048")
    wide = (*wide, "--global-batch", "8", "--micro-batch", "1")
    files = [tmp_path / "fsdp.json", tmp_path / "hsdp.json"]
    for file, degrees in zip(files, (("4", "1"), ("2", "2")), strict=True):
        fixed = ("--dp-shard", degrees[0], "--dp-replicate", degrees[1])
        assert planner("estimate", *wide, *fixed, "--out", file).returncode == 0

    text = planner("compare", *files).stdout
    sides = json.loads(planner("compare", *files, "--json").stdout)
    estimated = json.loads(planner("estimate", "--plan", files[1], "--json").stdout)["traffic"]

    network = [
        {link["link"]: link for link in sides[side]["traffic"]["links"]}["network"] for side in ("first", "second")
    ]
    assert network[1]["total_bytes"] < 0.8 * network[0]["total_bytes"]
    assert 0 < network[1]["busy_share"] < network[0]["busy_share"] < 1
    assert "sent, network" in text
    assert [axis["axis"] for axis in estimated["axes"]][:2] == ["fsdp", "replicate"]
    assert "cross between nodes" in planner("explain", files[0], "--no-flips").stdout


def test_an_answer_about_amd_has_amds_names(planner, tmp_path):
    """AMD's GPUs have no NVLink, CUDA or NCCL: xGMI, HIP and RCCL are there."""
    asked = ("--model", "llama3.2-1b", "--cluster", "8xMI300X", "--seq-len", "2048", "--global-batch", "16")
    file = tmp_path / "plan.json"
    texts = planner("estimate", *asked, "--out", file).stdout + planner("explain", file, "--no-flips").stdout

    assert not re.search("NVLink|CUDA|NCCL", re.sub("RCCL", "", texts), re.IGNORECASE)
    assert re.search(r"joined by xGMI.*xGMI +\S+ GB from the busiest GPU", texts, re.DOTALL)
    assert "HIP's context" in " ".join(texts.split())


# --- time and money -----------------------------------------------------------------------------------------------

SPANS = ("days", "gpu_hours", "cost", "goodput", "checkpoint_interval_s", "lost_s")
RUN = ("--model", "llama3.2-1b", "--seq-len", "2048", "--global-batch", "256", "--no-simulate", "--top", "1")


def test_a_whole_run_has_days_cost_and_energy(planner):
    """By hand: steps times the step over the share of the time that counts, GPU-hours times the price, and 700 W a GPU,
    which is what H100 SXM's datasheet says.
    """
    flags = ("--gpus", "16", "--tokens", "100B", "--gpu-price", "2.5")
    answer = json.loads(planner("suggest", *RUN, *flags, "--json").stdout)
    run, step = answer["run"], answer["plans"][0]["estimate"]["step_s"]
    steps = 100e9 / (2048 * 256)

    alone = run["steps_s"]
    assert all(alone[end] == pytest.approx(steps * step[end]) for end in ("low", "value", "high"))
    assert run["days"]["value"] == pytest.approx(alone["value"] / 86400 / run["goodput"]["value"])
    assert run["lost_s"]["value"] == pytest.approx(run["days"]["value"] * 86400 - alone["value"])
    assert run["gpu_hours"]["value"] == pytest.approx(16 * 24 * run["days"]["value"])
    assert all(run["cost"][end] == pytest.approx(2.5 * run["gpu_hours"][end]) for end in ("low", "value", "high"))
    assert run["energy_j"] == pytest.approx(16 * 700 * 86400 * run["days"]["value"])
    assert all(run[name]["low"] <= run[name]["value"] <= run[name]["high"] for name in SPANS)
    assert run["power_source"]
    text = planner("suggest", *RUN, *flags).stdout
    assert "100B tokens" in text
    assert "700 W a GPU" in text


def test_failures_that_are_stated_make_the_run_longer(planner):
    """200 hours of a node of eight are 1,600 of a GPU; at that rate a run loses more than at published ones."""
    flags = ("--gpus", "16", "--tokens", "100B", "--checkpoint-bandwidth", "10GB/s", "--json")
    asked = {
        name: json.loads(planner("suggest", *RUN, *flags, *more).stdout)["run"]
        for name, more in (
            ("usual", ()),
            ("node", ("--mtbf", "200:node")),
            ("gpu", ("--mtbf", "1600")),
            ("alongside", ("--mtbf", "1600", "--async-checkpoint")),
        )
    }

    assert asked["node"] == asked["gpu"]
    assert asked["gpu"]["days"]["value"] > asked["usual"]["days"]["value"]
    assert asked["alongside"]["goodput"]["value"] > asked["gpu"]["goodput"]["value"]
    # Weights in float32 and two moments.
    parameters = 1_235_814_400
    assert asked["gpu"]["checkpoint_bytes"] == pytest.approx(12 * parameters, rel=1e-3)
    assert planner("suggest", *RUN, "--mtbf", "50000").returncode == 2
    assert planner("suggest", *RUN, "--tokens", "1B", "--mtbf", "often").returncode == 2
    assert planner("suggest", *RUN, "--tokens", "1B", "--checkpoint-bandwidth", "10 Gbit").returncode == 2
    assert planner("suggest", *RUN, "--tokens", "1B", "--checkpoint-bandwidth", "5").returncode == 2  # bytes a second


def test_a_run_that_hardly_progresses_has_no_days():
    """A checkpoint takes 27 hours, and a failure comes every eighth of one."""
    question = question_of(load_model("llama3-8b"), make_cluster(1, 8), Workload(seq_len=2048, global_batch_size=8))
    goal = Goal(tokens=1e9, mtbf_hours=1.0, checkpoint_bytes_per_s=1e6)
    with pytest.raises(Infeasible, match="would not end"):
        run_time(question, goal, 8, Interval(value=1e6, low=1e6, high=1e6, source=Source.ASSUMED))


@pytest.mark.parametrize(
    ("said", "rate"), [("1e11", 1e11), ("100GB/s", 1e11), ("2 TBps", 2e12), ("0.5GiB/s", 2**29), ("250000000.0", 2.5e8)]
)
def test_rates_of_storage_have_units(said, rate):
    assert goal_of(Suggest(model="", cluster="", tokens="1B", checkpoint_bandwidth=said)).checkpoint_bytes_per_s == rate


def test_a_deadline_finds_the_cheapest_count_in_time(planner):
    """Every count tried is listed; of those in time the one with the fewest GPU-hours is the answer."""
    done = planner("suggest", *RUN, "--pp", "1", "--tokens", "300B", "--deadline", "10d", "--json")
    answer = json.loads(done.stdout)
    in_time = [one for one in answer["curve"] if one["plan"] and one["days"]["value"] <= 10]
    odd = [one["gpus"] for one in answer["curve"] if one["plan"] and 256 % one["gpus"]]

    assert done.returncode == 0, done.stderr
    assert answer["run"]["gpus"] == min(in_time, key=lambda one: one["gpu_hours"]["value"])["gpus"]
    assert answer["plans"][0]["plan"] == answer["run"]["plan"]
    assert any(one["plan"] and one["days"]["value"] > 10 for one in answer["curve"]), "a smaller number was tried"
    uneven = [line for line in answer["assumed"] if "do not divide" in line]
    assert all(f" {gpus}" in line for gpus in odd for line in uneven)
    assert bool(uneven) is bool(odd)


def test_a_budget_finds_the_soonest_count_that_it_pays_for(planner):
    flags = (
        "--global-batch",
        "16",
        "--tp",
        "1",
        "--pp",
        "1",
        "--tokens",
        "300B",
        "--gpu-price",
        "2.5",
        "--budget",
        "5k",
        "--json",
    )
    answer = json.loads(planner("suggest", *RUN, *flags).stdout)
    paid = [one for one in answer["curve"] if one["plan"] and one["cost"]["value"] <= 5e3]

    assert answer["run"]["gpus"] == min(paid, key=lambda one: one["days"]["value"])["gpus"]
    assert any(one["plan"] and one["cost"]["value"] > 5e3 for one in answer["curve"]), "a larger number was tried"


@pytest.mark.parametrize(
    ("wanted", "said", "unsaid"),
    [
        (("--budget", "1"), "a larger budget", "deadline"),
        (("--deadline", "2h"), "a later deadline", "budget"),
        (("--budget", "1", "--deadline", "2h"), "a later deadline, a larger budget", None),
    ],
)
def test_a_remedy_relaxes_what_was_asked_for(planner, wanted, said, unsaid):
    counts = ("--gpus", "8,16", "--tp", "1", "--pp", "1", "--tokens", "300B", "--gpu-price", "2")
    failed = planner("suggest", *RUN, *counts, *wanted)

    assert failed.returncode == 3
    assert said in failed.stderr
    assert unsaid is None or unsaid not in failed.stderr.partition("do:")[2]


def test_the_module_of_the_command_line_runs_it():
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "--version"], capture_output=True, text=True, check=True, cwd=ROOT
    )

    assert done.stdout.startswith("planner (meshwright)")


def test_stated_counts_are_compared_over_the_whole_run(planner):
    """A curve over the counts said; the deadline chooses among them, and what no count meets is said with both ends."""
    counts = ("--gpus", "8,16", "--pp", "1", "--tokens", "300B", "--gpu-price", "2")
    answered = json.loads(planner("suggest", *RUN, *counts, "--json").stdout)
    curve = answered["curve"]
    late = planner("suggest", *RUN, *counts, "--deadline", "2h")

    assert [one["gpus"] for one in curve] == [8, 16]
    assert curve[0]["days"]["value"] > 1.5 * curve[1]["days"]["value"]
    assert not any("do not divide" in line for line in answered["assumed"])
    assert late.returncode == 3
    assert "days on 16 GPUs" in late.stderr
    assert "GPUs  days (80% range)" in planner("suggest", *RUN, *counts).stdout


# --- documented values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pcie", ["gen3", "gen4", "gen5", "gen6"])
def test_every_slot_generation_is_planned_for(planner, tmp_path, pcie):
    (tmp_path / "c.json").write_text(json.dumps({"gpu": "l40s", "gpus_per_node": 8, "nodes": 1, "pcie": pcie}))

    assert planner("estimate", "--cluster", tmp_path / "c.json", "--model", "llama3.2-1b", "--json").returncode == 0


@pytest.mark.parametrize("objective", ["time", "throughput", "memory", "cost", "pareto"])
def test_every_objective_has_an_answer(planner, objective):
    flags = ("--objective", objective, "--gpu-price", "2", "--tp", "1", "--pp", "1", "--cp", "1", "--no-simulate")

    assert planner("suggest", *SMALL, *flags).returncode == 0


@pytest.mark.parametrize("word", ["none", "selective", "selective-op", "full"])
def test_every_recomputation_has_an_answer(planner, word):
    done = planner(
        "suggest", *SMALL, "--recompute", word, "--tp", "1", "--pp", "1", "--cp", "1", "--top", "1", "--json"
    )

    assert json.loads(done.stdout)["plans"][0]["plan"]["recompute"] == word
