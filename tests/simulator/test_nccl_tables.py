"""Published nccl-tests tables: reading them, and the accuracy we claim on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.validate.collective_rows import predicted_rows
from simulator.collectives.nccl_tables import BANDS, band_of, cluster_for_machine, evaluate, read_tables, score
from tests.clusters import cluster_of
from topology.catalog.cluster_file import load_cluster
from topology.errors import BadInput

DATA = Path(__file__).parents[1] / "data" / "nccl_tables.json"
TABLES = read_tables(DATA)
FITTED = ("a100_sxm", "h200_sxm", "gb200")
TUNED = {"all_reduce", "all_gather", "reduce_scatter"}
# Machines whose curves were fitted on other files; one constant each (host time, p2p channel rate, NVLS fill, network
# start-up) was read off these or their siblings, see examples/validation/collectives.md.
ELSEWHERE = ("8x H200", "8x A100 NVLink", "GB200 NVL72, full rack", "H200 x8, 2 nodes, bare metal")


@pytest.fixture(scope="module")
def ours():
    return evaluate(TABLES, cluster_of=cluster_of)


@pytest.fixture(scope="module")
def nccl():
    return evaluate(TABLES, model="nccl", cluster_of=cluster_of)


def rows_of(result, *starts, ops=None):
    return [row for row in result.rows if row.machine.startswith(starts) and (ops is None or row.op in ops)]


def test_nvlink_error_from_catalogue_numbers_alone(ours):
    found = score(rows_of(ours, *FITTED))
    assert found.points > 700
    assert found.mean_error < 0.06  # claimed: <= 15 %, all-to-all included
    assert found.within_interval >= 0.80


@pytest.mark.parametrize("machine", ELSEWHERE)
def test_machines_whose_curves_were_fitted_elsewhere(ours, machine):
    found = score(row for row in ours.rows if row.machine == machine)
    assert found.mean_error < 0.10
    assert found.within_interval >= 0.80


def test_better_than_nccls_own_formulas_on_every_nvlink_machine(ours, nccl):
    for machine in ("a100_sxm", "h200_sxm", "gb200", "8x H200", "AWS P6", "8x A100 (NVLink3)"):
        mine, theirs = (score(rows_of(r, machine, ops=TUNED)) for r in (ours, nccl))
        assert mine.mean_error < theirs.mean_error


def test_nccls_formulas_err_as_published_for_them(nccl):
    # 22.7 % over a larger set of NVLink tables (A100 29.2, H200 14.6): these rows must give about that.
    assert score(rows_of(nccl, "a100_sxm")).mean_error == pytest.approx(0.292, abs=0.02)
    assert score(rows_of(nccl, "h200_sxm")).mean_error == pytest.approx(0.146, abs=0.02)
    assert score(rows_of(nccl, *FITTED)).mean_error == pytest.approx(0.227, abs=0.03)


def test_every_fourth_size_known():
    found = evaluate(TABLES, known_every=4, cluster_of=cluster_of)
    assert score(rows_of(found, *FITTED)).mean_error < 0.06
    assert score(rows_of(found, "8x A100 (NVLink3)")).mean_error < 0.08  # 22 % without
    assert score(rows_of(found, "OCI 128 GPUs")).mean_error < 0.08  # 26 % without
    assert len(found.rows) < sum(len(table["rows"]) for table in TABLES)


def test_rows_have_the_contracts_shape(ours):
    row = ours.rows[0]
    assert {"machine", "op", "gpus", "bytes", "time_s", "algorithm", "busbw_bytes_per_s", "measured_s", "error"} <= set(
        row.__slots__
    )
    assert row.error == pytest.approx(row.time_s.value / row.measured_s - 1)
    assert row.time_s.low <= row.time_s.value <= row.time_s.high


def test_bands():
    assert [band_of(size) for size in (1, 65536, 65537, 2**25, 2**29, 2**30)] == [
        "<=64KiB", "<=64KiB", "64KiB-1MiB", "1-32MiB", "32-512MiB", ">512MiB",
    ]  # fmt: skip
    assert len(BANDS) == 5


def test_a_bandwidth_without_a_time_is_read_and_a_forced_ring_is_respected(ours):
    found = [row for row in ours.rows if row.machine.startswith("8x H200, NVLS on/off")]
    assert [row.algorithm.split("/")[0] for row in found] == ["nvls", "ring"]
    assert all(abs(row.error) < 0.05 for row in found)


def table(**changes):
    base = {
        "machine": "8x H200", "gpus": 8, "nodes": 1, "interconnect": "NVLink4", "collective": "all_reduce",
        "rows": [{"bytes": 1024, "time_us": 16.0}],
    }  # fmt: skip
    return base | changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": "a toaster"}, "no GPU of the catalogue"),
        ({"collective": "gossip"}, "not modelled"),
        ({"gpus": None}, "GPUs on"),
        ({"gpus": 1}, "GPUs on"),
        ({"nodes": 9}, "GPUs on"),
        ({"rows": [{"bytes": None, "busbw_avg": 5.1}]}, "how many bytes"),
        ({"rows": None}, "how many bytes"),
    ],
)
def test_what_cannot_be_predicted_is_skipped_with_a_reason(changes, reason):
    result = evaluate([table(**changes)], cluster_of=cluster_of)
    assert result.rows == ()
    assert reason in result.skipped[0].reason


def test_a_row_nobody_measured_is_predicted_without_an_error():
    row = evaluate([table(rows=[{"bytes": 2048}])], cluster_of=cluster_of).rows[0]
    assert row.measured_s is None
    assert row.error is None
    assert evaluate([table(rows=[{"bytes": 2048}])], cluster_of=cluster_of).overall is None


def test_nccl_is_skipped_where_it_does_not_run():
    result = evaluate(
        [table(machine="8x AMD MI300X", interconnect="xGMI"), table(collective="alltoall")],
        model="nccl",
        cluster_of=cluster_of,
    )
    assert [s.reason.split()[0] for s in result.skipped] == ["NCCL", "NCCL's"]


def test_bad_questions_are_refused():
    with pytest.raises(BadInput):
        evaluate([], model="astrology")
    with pytest.raises(BadInput):
        evaluate([], known_every=1)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(["machine", "gpus", "nodes", "interconnect", "collective", "dtype", "tool", "rows"]),
        st.none() | st.booleans() | st.integers(-3, 64) | st.floats() | st.sampled_from(["8x H200", "all_reduce", "a"])
        | st.lists(
            st.integers()
            | st.dictionaries(
                st.sampled_from(["bytes", "time_us", "busbw", "algo"]),
                st.none() | st.integers() | st.floats() | st.text(max_size=3),
            ),
            max_size=3,
        ),
    )
)  # fmt: skip
def test_any_table_is_predicted_or_skipped(changes):
    result = evaluate([table(**changes)], cluster_of=cluster_of)
    assert bool(result.rows) != bool(result.skipped)


@pytest.mark.parametrize("text", ["[1, 2]", '{"tables": 3}', '{"rows": []}', "nonsense"])
def test_files_that_are_no_tables_are_refused(tmp_path, text):
    path = tmp_path / "tables.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput):
        read_tables(path)


def test_a_bare_list_of_tables_is_read(tmp_path):
    path = tmp_path / "tables.json"
    path.write_text(json.dumps([table()]), encoding="utf-8")
    assert len(read_tables(path)) == 1


@pytest.mark.parametrize(
    ("text", "gpus", "nodes", "interconnect", "kind", "per_node"),
    [
        ("a100_sxm (NVIDIA A100-SXM4-80GB)", 4, 1, "NVLink3 NVSwitch (1 node)", "a100-sxm-80gb", 8),
        ("h100_sxm (NVIDIA H100 80GB HBM3)", 8, 1, "NVLink4 NVSwitch (1 node)", "h100-sxm", 8),
        ("GB200 NVL72, full rack", 72, 18, "NVLink5 NVL72 (MNNVL)", "gb200", 72),
        ("GB200 NVL4 (4 GPUs, direct NVLink mesh, no switch)", 4, 1, "NVLink5 direct mesh", "gb200", 4),
        ("b60 (Intel(R) Graphics [0xe211])", 2, 1, "Intel Arc Pro B60 PCIe (oneCCL)", "arc-pro-b60", 8),
        ("OCI 128 GPUs (Blackwell shape, model not shown)", 128, 16, "NVLink5 + RoCE", "b200-sxm", 8),
        ("H200 x8, 2 nodes", 16, 2, "NVLink4 + 8x400GbE RoCE", "h200-sxm", 8),
        ("2 VMs x 2 GPUs, RoCE", 4, 2, "RoCE", None, None),
    ],
)
def test_machines_in_words(text, gpus, nodes, interconnect, kind, per_node):
    pytest.importorskip("topology.catalog.clusters")
    found = cluster_for_machine(text, gpus, nodes, interconnect)
    if kind is None:
        assert found is None
    else:
        assert (found.gpu_kinds[0].name, found.gpus_per_node) == (kind, per_node)


def test_what_a_cluster_is_called_changes_nothing():
    """Two racks are two NVLink domains, also where their name is that of one."""
    racks = load_cluster("gb200-nvl72", gpus=144)
    times = [
        [
            row["time_s"]["value"]
            for row in predicted_rows(cluster, "all_reduce", [2**20, 2**28], gpus=144, cost_model="meshwright")
        ]
        for cluster in (racks, replace(racks, name="racks"))
    ]

    assert times[0] == times[1]
