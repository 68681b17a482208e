"""Cluster files: round trips, the hand-written form, and files that are no clusters."""

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from topology.catalog.cluster_file import load_cluster, parse_cluster, save_cluster
from topology.catalog.clusters import catalog_names, cluster
from topology.catalog.verify import verify_cluster
from topology.cluster import Cluster, Link, LinkKind, NodeGroup
from topology.codec import fingerprint, to_builtins
from topology.errors import BadCluster, BadInput


@pytest.mark.parametrize("name", catalog_names())
def test_round_trip(name, tmp_path):
    path = tmp_path / "cluster.json"
    original = cluster(name)
    save_cluster(original, path)
    again = load_cluster(path)
    assert again == original
    assert fingerprint(again) == fingerprint(original)


def _write(tmp_path, document):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_small_form(tmp_path):
    path = _write(
        tmp_path,
        {
            "gpu": "a100-pcie-80gb",
            "gpus_per_node": 4,
            "nodes": 2,
            "interconnect": "nvlink",
            "bridges": [[0, 3], [1, 2]],
            "nic_gbit_per_gpu": 50,
            "fabric": "fat-tree",
            "oversubscription": 2,
            "pcie": "gen3",
            "name": "mine",
        },
    )
    got = load_cluster(path)
    node = got.groups[0].node
    assert got.name == "mine"
    assert (got.node_count, got.gpu_count) == (2, 8)
    assert {pair for pair, label in node.pairs.items() if label == "NV12"} == {"0-3", "1-2"}
    assert got.fabric.oversubscription == 2
    assert [nic.bytes_per_s for nic in node.nics] == [6.25e9] * 4
    slots = [link.bytes_per_s for link in node.links if link.kind is LinkKind.PCIE and link.a.startswith("gpu")]
    assert slots == [15.75e9] * 4
    assert load_cluster(str(path), gpus=4).node_count == 1


def test_small_form_lists_what_it_assumes(tmp_path):
    got = load_cluster(_write(tmp_path, {"gpu": "h100-sxm", "nodes": 4}))
    assert got.gpu_count == 32
    assert any("Gb/s of network per GPU" in finding.what for finding in got.findings)


def test_newer_schema_names_both_versions(tmp_path):
    document = to_builtins(cluster("dgx-h100")) | {"schema_version": 99}
    with pytest.raises(BadInput, match="99") as caught:
        load_cluster(_write(tmp_path, document))
    assert "up to 1" in str(caught.value.why)


@pytest.mark.parametrize(
    "document",
    [
        [],
        "h100",
        {},
        {"schema_version": 1},
        {"schema_version": "1", "groups": []},
        {"schema_version": 0, "groups": []},
        {"gpu": "h100-sxm", "colour": "green"},
        {"gpu": "h100-sxm", "gpus_per_node": "8"},
        {"gpu": "h100-sxm", "bridges": [[0, 1]], "interconnect": "nvswitch"},
        {"gpu": "h100-sxm", "bridges": [[0, 0]]},
        {"gpu": "h100-sxm", "bridges": [[0]]},
        {"gpu": "h100-sxm", "bridges": [[0, 1], [1, 0]]},
        {"gpu": "h100-sxm", "gpus_per_node": 2, "bridges": [[0, 1, 40]]},
        {"gpu": "h100-sxm", "gpus_per_node": 3, "bridges": [[0, 1, 12], [1, 2, 12]]},
        {"gpu": "l40s", "bridges": [[0, 1]]},
        {"gpu": "h100-sxm", "oversubscription": 0.5},
        {"gpu": "h100-sxm", "pcie": "gen9"},
        {"gpu": "h100-sxm", "fabric": "string"},
        {"gpu": "h100-sxm", "nodes_per_leaf": 0},
    ],
)
def test_files_that_are_no_clusters(document, tmp_path):
    with pytest.raises((BadInput, BadCluster)):
        load_cluster(_write(tmp_path, document))


def test_missing_files_and_names(tmp_path):
    with pytest.raises(BadInput):
        load_cluster(tmp_path / "absent.json")
    with pytest.raises(BadInput):
        load_cluster("absent.json")
    with pytest.raises(BadCluster, match="dgx-a100"):
        load_cluster("dgx-a10")
    with pytest.raises(BadCluster):
        load_cluster("\0")


def _with(target: Cluster, **changes) -> Cluster:
    node = replace(target.groups[0].node, **changes)
    return replace(target, groups=(NodeGroup(node=node),))


def test_verify_finds_what_is_wrong():
    base = cluster("dgx-h100")
    node = base.groups[0].node
    port = next(link for link in node.links if link.kind is LinkKind.NVSWITCH)

    def problems(**changes):
        return " | ".join(verify_cluster(_with(base, **changes)))

    assert "no GPUs" in problems(gpus=())
    assert "GPU index 0 occurs 2 times" in problems(gpus=(*node.gpus, node.gpus[0]))
    assert "not in the node" in problems(links=(Link(a="gpu0", b="gpu9", kind=LinkKind.PCIE),))
    for rate in (-1.0, float("nan"), float("inf")):
        assert "links[0].bytes_per_s is" in problems(links=(replace(port, bytes_per_s=rate),))
    assert "more than the datasheet" in problems(links=(replace(port, measured_bytes_per_s=500e9),))
    assert problems(links=(replace(port, measured_bytes_per_s=480e9),)) == ""
    assert "gpu_kinds does not list" in problems(gpus=(replace(node.gpus[0], kind="other"), *node.gpus[1:]))
    assert "closest_nics" in problems(closest_nics={"0": ("mlx5_99",)})
    assert "joins a vertex to itself" in problems(links=(replace(port, b="gpu0"),))
    assert "no GPUs" in " ".join(verify_cluster(replace(base, groups=())))
    assert "occurs 0 times" in " ".join(verify_cluster(replace(base, groups=(NodeGroup(node=node, count=0),))))
    fast = replace(base.gpu_kinds[0], peak_flops={"bfloat16": 1979e12}, achieved_flops={})
    assert "datasheet" in " ".join(verify_cluster(replace(base, gpu_kinds=(fast,))))
    assert "oversubscription" in " ".join(
        verify_cluster(replace(base, fabric=replace(base.fabric, oversubscription=0.0)))
    )


KEYS = st.sampled_from(
    ["gpu", "gpus_per_node", "nodes", "interconnect", "bridges", "groups", "schema_version", "name", "gpu_kinds", "x"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.just("h100")
JUNK = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5))


@examples(200)
@given(JUNK)
def test_junk_raises_only_our_errors(document):
    with contextlib.suppress(BadInput, BadCluster):
        parse_cluster(document, where="junk")


@examples(150)
@given(st.data())
def test_a_damaged_file_raises_only_our_errors(data):
    document = to_builtins(cluster("a100-pcie-x4", 2))
    spot = document
    while True:  # walk to some place in it and put junk there
        key = data.draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot))))
        if not isinstance(spot[key], (dict, list)) or not spot[key] or data.draw(st.booleans()):
            spot[key] = data.draw(JUNK)
            break
        spot = spot[key]
    with contextlib.suppress(BadInput, BadCluster):
        assert verify_cluster(parse_cluster(document, where="damaged")) == []


def test_what_the_file_states_is_not_called_assumed(tmp_path):
    stated = {"gpu": "h100-sxm", "nodes": 4, "fabric": "fat-tree", "oversubscription": 2}
    silent = {"gpu": "h100-sxm", "nodes": 4}

    said = " ".join(item.what for item in load_cluster(_write(tmp_path, stated)).findings)
    unsaid = " ".join(item.what for item in load_cluster(_write(tmp_path, silent)).findings)

    assert "oversubscription" not in said
    assert "network, as in" not in said
    assert "oversubscription 1" in unsaid
    assert "network, as in" in unsaid


@pytest.mark.parametrize(
    ("at", "value", "named"),
    [
        (("gpu_kinds", 0, "compute_capability"), -1, "gpu_kinds[0].compute_capability"),
        (("gpu_kinds", 0, "memory_bytes"), 1, "h100-sxm.memory_bytes"),
        (("gpu_kinds", 0, "memory_bytes_per_s"), 1e-300, "memory_bytes_per_s"),
        (("gpu_kinds", 0, "peak_flops", "bfloat16"), 0.0, "peak_flops[bfloat16]"),
        (("gpu_kinds", 0, "sm_count"), 0, "sm_count"),
        (("groups", 0, "node", "gpus", 0, "memory_bytes"), 1, "GPU 0 has 1 bytes of memory"),
        (("groups", 0, "node", "nics", 0, "bytes_per_s"), 1.0, "network port mlx5_0"),
        (("groups", 0, "node", "links", 0, "bytes_per_s"), 1e-9, "nominal rate of 1e-09"),
        (("groups", 0, "count"), 0, "node group 0 occurs 0 times"),
        (("fabric", "nodes_per_leaf"), 0, "fabric.nodes_per_leaf"),
        (("fabric", "latency_s"), -1.0, "fabric.latency_s"),
        (("name",), "x" * 100_000, "name has 100000 characters"),
    ],
)
def test_an_altered_value_is_named(at, value, named):
    document = spot = to_builtins(cluster("dgx-h100", 16))
    for key in at[:-1]:
        spot = spot[key]
    spot[at[-1]] = value

    with pytest.raises(BadCluster) as caught:
        parse_cluster(document, where="altered")

    assert named in str(caught.value)
