"""NCCL's formulas against values worked out by hand and graphs that NCCL itself dumped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.collectives.nccl_model import (
    PROTOCOLS,
    Graph,
    NcclMachine,
    choose,
    line_time_us,
    lines,
    nvls_graph,
    ring_graph,
    switches,
    tree_graph,
)

A100 = NcclMachine(ranks=8, compute_capability=80, nvlink=240.0)
H200 = NcclMachine(ranks=8, compute_capability=90, nvlink=370.8, nvls=True)
B200 = NcclMachine(ranks=8, compute_capability=100, nvlink=721.8, nvls=True)


def ranks(machine: NcclMachine, n: int) -> NcclMachine:
    return NcclMachine(ranks=n, compute_capability=machine.compute_capability, nvlink=machine.nvlink, nvls=machine.nvls)


@pytest.mark.parametrize(
    ("machine", "channels", "speed"),
    [(A100, 12, 20.0), (H200, 12, 30.0), (B200, 16, 45.0), (ranks(B200, 4), 16, 45.0), (ranks(H200, 2), 12, 30.0)],
)
def test_ring_channels_are_those_ncc_dumps(machine, channels, speed):
    assert ring_graph(machine) == Graph(channels=channels, bw_intra=speed, bw_inter=speed)


def test_tree_channels_match_two_graph_dumps():
    assert tree_graph(ranks(H200, 2)).bw_intra == 60.0  # 2 x H200: 12 x 60
    assert tree_graph(ranks(B200, 4)) == Graph(channels=16, bw_intra=50.0, bw_inter=50.0)  # GB300 tray


@pytest.mark.parametrize(("machine", "heads", "speed"), [(H200, 8, 40.0), (B200, 8, 80.0), (ranks(B200, 4), 4, 90.0)])
def test_nvls_heads(machine, heads, speed):
    graph = nvls_graph(machine)
    assert (graph.channels, graph.bw_intra) == (heads, speed)


def test_no_nvls_without_multicast_or_before_hopper():
    assert not nvls_graph(A100).found
    assert not nvls_graph(NcclMachine(ranks=8, compute_capability=90, nvlink=370.8)).found


def test_h200_all_reduce_of_8_mib_takes_56_us():
    # NVLS: 25 us + 8 MiB / (8 heads x min(40 x .85 x 7/8 x 2, cap) x 8/14) = 25 + 8388.608 / 272 = 55.84 us
    time, index, options = choose(H200, "all_reduce", [8 * 2**20])
    assert options[index[0]].algorithm == "nvls"
    assert time[0] * 1e6 == pytest.approx(25 + 8388.608 / (8 * 40 * 0.85 * 7 / 8 * 2 * 8 / 14), rel=1e-9)
    assert time[0] * 1e6 == pytest.approx(56, abs=0.5)


def test_a100_all_gather_by_hand():
    by_name = {(line.algorithm, line.protocol): line for line in lines(A100, "all_gather")}
    ll = by_name["ring", "LL"]
    assert ll.latency == pytest.approx(6.6 + 7 * 0.6)
    assert ll.bandwidth == pytest.approx(87.7 * 8 / 7)
    ll128 = by_name["ring", "LL128"]
    assert ll128.latency == pytest.approx(14 + 7 * 1.9)
    assert ll128.bandwidth == pytest.approx(0.92 * 240 * 8 / 7)
    simple = by_name["ring", "Simple"]
    assert (simple.latency, simple.bandwidth) == (pytest.approx(8.4 + 7 * 3.4), pytest.approx(240 * 8 / 7))


def test_tree_all_reduce_halves_and_is_corrected():
    tree = next(line for line in lines(A100, "all_reduce") if (line.algorithm, line.protocol) == ("tree", "Simple"))
    assert tree.bandwidth == pytest.approx(0.5 * min(0.92 * 240, 12 * 24.0))
    one_mib = line_time_us(A100, "all_reduce", tree, np.array([2.0**20]))[0]
    assert one_mib == pytest.approx(tree.latency + 2**20 / (1000 * tree.bandwidth * 0.5))  # table entry 14: 0.5


@pytest.mark.parametrize(
    ("machine", "op", "before", "after"),
    [  # sizes where published tables jump because NCCL leaves LL (A100, GB200, H200 on four GPUs)
        (ranks(A100, 4), "all_gather", 2**20, 2**21),
        (ranks(B200, 4), "all_gather", 2**22, 2**23),
        (ranks(H200, 4), "all_gather", 2**21, 2**22),
    ],
)
def test_protocol_changes_where_tables_jump(machine, op, before, after):
    _, index, options = choose(machine, op, [before, after])
    assert [options[i].protocol for i in index] == ["LL", "Simple"]


def test_ll128_needs_nvlink():
    pcie = NcclMachine(ranks=4, compute_capability=90, pcie=48.0)
    assert "LL128" not in {line.protocol for line in lines(pcie, "all_reduce")}


def test_two_nodes_use_nvls_tree_and_count_the_network():
    machine = NcclMachine(ranks=16, nodes=2, compute_capability=90, nvlink=370.8, nvls=True, nic=50.0, nics=8)
    line = next(line for line in lines(machine, "all_reduce") if line.algorithm == "nvls_tree")
    assert line.latency == pytest.approx(25 + 2 * 20.9)
    assert line.bandwidth == pytest.approx(8 * min(59.5, 100.0, 57.7) * 16 / 30)


def test_pat_only_with_one_gpu_per_node():
    machine = NcclMachine(ranks=8, nodes=8, compute_capability=90, nvlink=0.0, nic=50.0, nics=1)
    assert "pat" in {line.algorithm for line in lines(machine, "all_gather")}
    assert "pat" not in {line.algorithm for line in lines(H200, "all_gather")}


def test_no_line_for_point_to_point():
    time, _, options = choose(H200, "all_to_all", [1024])
    assert options == ()
    assert np.isnan(time[0])


def test_nothing_fits_falls_back_to_a_tenth_of_a_gigabyte():
    assert ring_graph(NcclMachine(ranks=2, compute_capability=80, pcie=0.5)).bw_intra == 0.1


@given(st.sampled_from([A100, H200, B200]), st.sampled_from(["all_reduce", "all_gather"]), st.integers(1, 2**34))
def test_choice_is_the_minimum(machine, op, size):
    time, _, options = choose(machine, op, [size])
    every = [line_time_us(machine, op, line, np.array([float(size)]))[0] for line in options]
    assert time[0] * 1e6 == pytest.approx(min(every))
    assert {line.protocol for line in options} <= set(PROTOCOLS)


def test_switches_agree_with_the_choice():
    starts, chosen, options = switches(A100, "all_gather")
    sizes = 2.0 ** np.arange(9, 30)
    _, index, same = choose(A100, "all_gather", sizes)
    assert options == same
    assert chosen[np.searchsorted(starts, sizes, side="right") - 1].tolist() == index.tolist()
    assert starts[0] == 0.0
