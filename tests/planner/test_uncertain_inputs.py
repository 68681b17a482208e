"""What cannot work is refused by every command that plans, and what is in doubt is said: links, MIG, nodes,
profiles.
"""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from planner.serving.candidates import deployments
from planner.serving.question.question import ServingQuestion
from planner.serving.stated import problems_of
from planner.sharding.frontends.decoder import decoder_case
from planner.sharding.plans.report import planned_case
from simulator.config.hf_config import load_model
from simulator.fitting.calibrations import MAX_AGE_DAYS, Calibrations, doubts_of
from simulator.serving.deployment import Pool
from simulator.serving.traffic import Lengths, Traffic
from topology.catalog.cluster_file import save_cluster
from topology.catalog.clusters import cluster
from topology.cluster import LinkKind, LinkState, NodeGroup
from topology.codec import to_json
from topology.errors import Stale
from topology.finding import INFO, WARNING, finding
from topology.probe.from_text import probe_text
from topology.profile.profile import CollectiveSample, Profile
from topology.rates.reach import cluster_caveats, reach


@pytest.fixture
def ageless_profiles():
    """Here profiles grow old."""


def with_node(machine, *, count=None, **changes):
    group = machine.groups[0]
    return replace(
        machine,
        groups=(NodeGroup(node=replace(group.node, **changes), count=count or group.count), *machine.groups[1:]),
    )


TWO = cluster("dgx-h100", 16)
NICS = TWO.groups[0].node.nics
ABSENT = tuple(replace(link, state=LinkState.ABSENT) for link in TWO.groups[0].node.links)
LABELS = {nic.label for nic in NICS}
PORTLESS = tuple(link for link in TWO.groups[0].node.links if not {link.a, link.b} & LABELS)
SLICED = finding("mig", WARNING, "MIG is enabled on GPUs 0-7", "", "", "", gpus=range(8))
APART = {
    "no port": (with_node(TWO, nics=(), closest_nics={}, links=PORTLESS), 8, "no network port"),
    "ports down": (with_node(TWO, nics=tuple(replace(nic, up=False) for nic in NICS)), 8, "are down"),
    "rate zero": (with_node(TWO, nics=tuple(replace(nic, bytes_per_s=0.0) for nic in NICS)), 8, "a rate of zero"),
    "no fabric": (replace(TWO, fabric=None), 8, "no network joins them"),
    "one node's ports down": (
        replace(
            TWO,
            groups=(
                NodeGroup(node=TWO.groups[0].node),
                NodeGroup(node=replace(TWO.groups[0].node, nics=tuple(replace(nic, up=False) for nic in NICS))),
            ),
        ),
        8,
        "of node group 1 are down",
    ),
    "all links absent": (with_node(cluster("dgx-h100"), links=ABSENT), 1, "working links"),
    "MIG": (replace(TWO, findings=(SLICED,)), 0, "MIG is enabled"),
}
PLANS = {
    "suggest": ("--model", "tiny-llama", "--seq-len", "256", "--global-batch", "16", "--no-simulate"),
    "explain": ("--model", "tiny-llama", "--seq-len", "256", "--global-batch", "16", "--no-flips"),
    "estimate": ("--model", "tiny-llama", "--seq-len", "256", "--global-batch", "16"),
    "trace": ("--model", "tiny-llama", "--seq-len", "256", "--global-batch", "16", "--out", "trace.json"),
    "collective": (),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("command", PLANS)
def test_gpus_without_a_path_are_no_plan(planner, tmp_path, monkeypatch, name, command) -> None:
    monkeypatch.chdir(tmp_path)
    machine, _, why = APART[name]
    save_cluster(machine, tmp_path / "machine.json")

    done = planner(command, *PLANS[command], "--cluster", "machine.json", "--json")

    assert done.returncode == 3
    assert why in done.stdout + done.stderr
    assert "nan" not in done.stdout


@pytest.mark.parametrize("name", APART)
def test_engines_that_serve_have_a_path_between_their_gpus(name) -> None:
    machine, gpus, why = APART[name]
    traffic = Traffic(prompt=Lengths(mean=64), output=Lengths(mean=8), concurrency=2, requests=4)
    asked = ServingQuestion(model=load_model("llama3-8b"), cluster=machine, traffic=traffic, separate=True)

    found, rejected = deployments(asked)

    assert all(one.pool.gpus <= gpus and one.prefill is None for one in found)
    assert bool(found) is (gpus > 0)
    assert any(why in reason for reason in rejected)
    wide = asked.deployment(Pool(tp=8, pp=machine.node_count))
    assert any(why in problem for problem in problems_of(asked, wide))


@pytest.mark.parametrize("name", APART)
def test_tensors_are_placed_on_gpus_with_a_path_only(name) -> None:
    machine, _, why = APART[name]
    case = decoder_case(load_model("tiny-llama"), {"data": machine.gpu_count}, layers=1, batch=16, seq_len=256)

    assert why in planned_case(case, 0, machine)[0]["rejected"]
    assert planned_case(case | {"policy": "min_ring_bytes"}, 0, machine)[1] is None


@pytest.mark.parametrize("name", APART)
def test_links_reach_as_far_as_they_carry(name) -> None:
    machine, gpus, why = APART[name]

    assert reach(machine).gpus == gpus
    assert why in reach(machine).why
    assert reach(TWO).gpus == 16


def test_one_gpu_that_is_cut_off_leaves_seven() -> None:
    machine = cluster("dgx-h100")
    links = tuple(
        replace(link, state=LinkState.ABSENT) if "gpu3" in {link.a, link.b} else link
        for link in machine.groups[0].node.links
    )

    assert reach(with_node(machine, links=links)).gpus == 7


def test_a_node_of_eight_still_answers_where_nodes_are_apart(planner, tmp_path) -> None:
    save_cluster(APART["ports down"][0], tmp_path / "machine.json")

    done = planner("suggest", *PLANS["suggest"], "--cluster", tmp_path / "machine.json", "--gpus", "8", "--json")

    assert done.returncode == 0


def test_mig_instances_hidden_by_the_user_do_not_matter() -> None:
    sliced = finding("mig", WARNING, "MIG is enabled on GPU 9", "", "", "", gpus=(9,))

    assert reach(replace(TWO, findings=(sliced,))).gpus == 16


def test_a_probed_machine_with_mig_is_not_planned_whole() -> None:
    text = "index, uuid, name, memory.total [MiB], pci.bus_id, mig.mode.current\n"
    row = "{0}, GPU-{0}0000000-0000-0000-0000-000000000000, NVIDIA H100 80GB HBM3, 81559, 00000000:{0}B:00.0, Enabled\n"

    machine = probe_text([("query", text + row.format(1) + row.format(2))])

    assert reach(machine).gpus == 0


def test_what_is_assumed_of_links_and_nodes_is_said() -> None:
    node = TWO.groups[0].node
    bare = tuple(link for link in node.links if link.kind is not LinkKind.PCIE)
    slow = replace(node, nics=tuple(replace(nic, bytes_per_s=1.25e9) for nic in node.nics))
    mixed = replace(TWO, groups=(NodeGroup(node=node), NodeGroup(node=slow)))

    assert "not listed" in " ".join(cluster_caveats(with_node(TWO, links=bare)))
    assert "different network ports" in " ".join(cluster_caveats(mixed))
    assert cluster_caveats(TWO) == []


SAMPLE = CollectiveSample(op="all_reduce", ranks=8, nodes=1, nbytes=1 << 20, time_s=55e-6)
NOW = datetime.now(UTC)
FRESH = Profile(machine="m", gpu="h100-sxm", driver="570.1", taken_at=NOW.isoformat(), collectives=(SAMPLE,))
OLD = replace(FRESH, taken_at=(NOW - timedelta(days=MAX_AGE_DAYS + 2)).isoformat())
DRIVER = replace(TWO, findings=(finding("driver", INFO, "driver 580.9", "", "", ""),))


@pytest.mark.parametrize(
    ("profile", "machine", "said"),
    [
        (OLD, TWO, "days ago"),
        (replace(FRESH, taken_at="yesterday"), TWO, "does not say when"),
        (FRESH, DRIVER, "driver 580.9"),
        (replace(FRESH, gpu="h200-sxm"), TWO, "not used"),
        (replace(FRESH, gpu="cpu"), TWO, "not used"),
    ],
)
def test_a_profile_in_doubt_is_said_and_refused_when_strict(profile, machine, said) -> None:
    assert said in " ".join(doubts_of(profile, machine))
    with pytest.raises(Stale, match=said):
        Calibrations(profile, strict=True).on(machine)
    assert doubts_of(FRESH, TWO) == []
    assert doubts_of(FRESH, replace(DRIVER, findings=(finding("driver", INFO, "driver 570.1", "", "", ""),))) == []


@pytest.mark.parametrize("command", [*PLANS, "validate", "compare", "check"])
def test_every_command_that_takes_a_profile_holds_it_against_the_cluster(
    planner, tmp_path, monkeypatch, command
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text(to_json(OLD))
    case = {
        "id": "one",
        "model": "tiny-llama",
        "cluster": "dgx-h100",
        "plan": {"dp_shard": 8},
        "measured": {"step_s": 1},
    }
    case |= {"workload": {"seq_len": 256, "global_batch_size": 8}, "runtime": {"name": "torchtitan"}}
    (tmp_path / "case.json").write_text(json.dumps(case))
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b\n"
    )
    arguments = PLANS | {
        "validate": ("case.json",),
        "compare": ("case.json", "case.json"),
        "check": ("run.sh", "--no-search"),
    }

    strict = planner(command, *arguments[command], "--profile", "old.json", "--strict", "--json")
    said = planner(command, *arguments[command], "--profile", "old.json")

    assert said.returncode == 0
    assert "days ago" in said.stdout.replace("\n", " ") + said.stderr
    assert strict.returncode == (3 if command == "validate" else 1)  # whose rows are all skipped, with that reason
    assert "days ago" in strict.stdout + strict.stderr
