"""Our collective costs against closed forms, published figures and the rules any cost must obey."""

from __future__ import annotations

import dataclasses
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.collectives.communicator import communicator
from simulator.collectives.constants import AMPERE, BLACKWELL, HOPPER
from simulator.collectives.cost import ALGORITHMS, OPS, CollectiveModel
from simulator.collectives.curves import ByteCost, Curve, curve_time_s, peer_channels
from simulator.collectives.launch_mode import LaunchMode
from simulator.collectives.measured import MeasuredCollectives
from simulator.collectives.nccl_model import choose
from simulator.collectives.times import multi_node_s, single_node_s, steps_and_share
from simulator.collectives.traffic import port_share
from tests.clusters import cluster
from topology.catalog import clusters as catalog
from topology.cluster import LinkKind, LinkState, NodeGroup, Source
from topology.codec import read_json
from topology.errors import BadInput, Infeasible
from topology.profile.profile import CollectiveSample
from topology.rates.groups import GroupShape, group_shape
from topology.rates.scaling import scale_network, scale_nvlink

EIGHT = GroupShape(ranks=8, ranks_per_node=8)
MIB = 2**20
MONOTONE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")  # not what is made of send and receive


def model(gpu: str = "h200", gpus: int = 8, **options) -> CollectiveModel:
    return CollectiveModel(cluster(gpu, gpus, **options))


def busbw(op: str, n: int, size: float, seconds: float) -> float:
    return size * steps_and_share(op, n)[1] / seconds / 1e9


def test_ring_closed_form():
    # 14 steps of latency, then 2 (n - 1) / n of the buffer at 1 / sent and the whole of it at 1 / buffer.
    curve = Curve(
        base_s=2e-6, step_s=1e-6, reduce_step_s=3e-6, bytes={"all_reduce": ByteCost(sent_s=2e-12, buffer_s=1e-12)}
    )
    steps, share = steps_and_share("all_reduce", 8)
    time = curve_time_s(curve, "all_reduce", np.array([1e9]), ranks=8, steps=steps, share=share)
    assert time[0] == pytest.approx(2e-6 + 14 * 3e-6 + 1e9 * (2e-12 * 14 / 8 + 1e-12))


def test_link_ceiling_holds():
    curve = Curve(base_s=0.0, step_s=0.0, reduce_step_s=0.0, bytes={"all_gather": ByteCost(sent_s=0.0, buffer_s=0.0)})
    time = curve_time_s(curve, "all_gather", np.array([1e9]), ranks=8, steps=7, share=7 / 8, link_bytes_per_s=100e9)
    assert time[0] == pytest.approx(1e9 * 7 / 8 / (0.82 * 100e9))


def test_tree_in_a_node_is_a_chain_with_the_rings_steps():
    comm = model("a100").communicator(EIGHT)
    sizes = np.array([1024.0, 65536.0])
    assert single_node_s(comm, "all_reduce", "tree", "LL", sizes) == pytest.approx(
        single_node_s(comm, "all_reduce", "ring", "LL", sizes)
    )


def test_tree_across_nodes_grows_with_the_logarithm():
    times = []
    for nodes in (2, 4, 8, 16):
        shape = GroupShape(ranks=nodes, ranks_per_node=1)
        times.append(float(model("h200", nodes=nodes).time_s("all_reduce", 256, shape)))
    steps = np.diff(times)
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-3)
    assert times[0] < 60e-6


@pytest.mark.parametrize("op", OPS)
def test_a_group_of_one_costs_nothing(op):
    alone = GroupShape(ranks=1, ranks_per_node=1)
    assert model().time_s(op, [1, 2**30], alone).tolist() == [0.0, 0.0]
    assert model().choose(op, 2**30, alone).time_s.value == 0.0


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["a100", "h200", "gb200", "l40s", "mi300x"]), st.sampled_from(MONOTONE), st.sampled_from([2, 4, 8])
)
def test_monotone_within_an_algorithm_and_protocol(gpu, op, n):
    # Across a switch NCCL may leave a faster protocol too late or too early: that jump is real, so it is left out here.
    sizes = np.logspace(2, 10.3, 120)
    costs = model(gpu, joined="mesh" if gpu == "mi300x" else "nvswitch").choose_many(
        op, sizes, GroupShape(ranks=n, ranks_per_node=n)
    )
    for before, after in pairwise(costs):
        if (before.algorithm, before.protocol) == (after.algorithm, after.protocol):
            assert after.time_s.value >= before.time_s.value * (1 - 1e-9)
        assert after.time_s.value >= 0.8 * before.time_s.value


def test_send_recv_staircase_of_b200():
    # 8 x B200, public table: 64, 128, 256 and 512 MiB take the same 0.8 ms, 1 GiB twice that.
    times = model("b200").time_s("send_recv", np.array([64, 128, 256, 512, 1024]) * MIB, EIGHT)
    assert times[:4] == pytest.approx([0.80e-3] * 4, rel=0.10)
    assert times[4] == pytest.approx(1.667e-3, rel=0.05)
    assert peer_channels(8, np.array([64.0, 128.0, 256.0, 512.0]) * MIB).tolist() == [4, 8, 16, 32]


@pytest.mark.parametrize("name", catalog.catalog_names())
def test_more_bytes_never_take_less_time_on_any_machine(name):
    """What NCCL runs slower at fewer bytes is bounded, for every operation, on a pair and on a node of the
    catalogue.
    """
    machine = catalog.cluster(name)
    sizes = np.logspace(2, 10.3, 400)
    for ranks in {min(2, machine.gpus_per_node), machine.gpus_per_node} - {1}:
        group = GroupShape(ranks=ranks, ranks_per_node=ranks)
        for op in OPS:
            times = CollectiveModel(machine).time_s(op, sizes, group)
            assert np.all(np.diff(times) >= -1e-9 * times[1:]), op


def test_bridged_pairs_do_not_join_four_gpus():
    # A100 PCIe with NVLink bridges: 208 GB/s in a pair, 20 GB/s once a third card without a bridge joins.
    pairs = cluster("a100", 4, joined="mesh")
    node = pairs.groups[0].node
    bridges = tuple(
        dataclasses.replace(link, bytes_per_s=300e9, count=12)
        for link in node.links
        if {link.a, link.b} in ({"gpu0", "gpu1"}, {"gpu2", "gpu3"})
    )
    box = dataclasses.replace(
        pairs, groups=(dataclasses.replace(pairs.groups[0], node=dataclasses.replace(node, links=bridges)),)
    )
    size = 2.0**32
    two, four = (
        busbw(
            "all_reduce",
            n,
            size,
            float(CollectiveModel(box).time_s("all_reduce", size, GroupShape(ranks=n, ranks_per_node=n))),
        )
        for n in (2, 4)
    )
    assert two == pytest.approx(208, rel=0.10)
    assert four == pytest.approx(20, rel=0.10)


def test_vectorised_shape_is_kept():
    assert model().time_s("all_reduce", np.ones((3, 4)) * MIB, EIGHT).shape == (3, 4)
    assert model().time_s("all_reduce", MIB, EIGHT).shape == ()


@pytest.mark.parametrize("op", OPS)
def test_times_that_are_remembered_are_those_that_are_found(op):
    """Each size is found once, whichever others are asked for with it."""
    known, sizes = model(), np.geomspace(1024, 2**30, 40)
    known.times_s(op, sizes[::3], EIGHT)

    assert known.times_s(op, sizes, EIGHT).tolist() == model().time_s(op, sizes, EIGHT).tolist()


@pytest.mark.parametrize(
    ("gpu", "op", "gigabytes"),
    [  # published bus bandwidths at 8 to 16 GiB on eight GPUs
        ("a100", "all_reduce", 235),
        ("h200", "all_reduce", 480),
        ("h200", "all_gather", 361),
        ("h200", "reduce_scatter", 363),
        ("b200", "all_gather", 672),
        ("b200", "reduce_scatter", 695),
        ("b200", "all_to_all", 673),
        ("b200", "send_recv", 663),
    ],
)
def test_large_messages_reach_published_rates(gpu, op, gigabytes):
    size = 2.0**34
    seconds = float(model(gpu).time_s(op, size, EIGHT))
    rate = size / seconds / 1e9 if op == "send_recv" else busbw(op, 8, size, seconds)
    assert rate == pytest.approx(gigabytes, rel=0.10)


def test_ring_without_nvls_on_h200():
    seconds = float(model("h200").time_s("all_reduce", 2.0**34, EIGHT, algorithm="ring"))
    assert busbw("all_reduce", 8, 2.0**34, seconds) == pytest.approx(367, rel=0.07)


def test_two_node_all_reduce_beats_the_wire_of_a_ring():
    # 2 x 8 H200 with 8 x 400 Gb/s: 478 to 489 GB/s published, more than the 400 GB/s that a ring could carry.
    shape = GroupShape(ranks=16, ranks_per_node=8)
    seconds = float(model("h200", nodes=2).time_s("all_reduce", 2.0**34, shape))
    assert busbw("all_reduce", 16, 2.0**34, seconds) == pytest.approx(484, rel=0.05)


def test_siblings_share_the_network_but_not_the_switch():
    alone, shared = (GroupShape(ranks=2, ranks_per_node=1, siblings=s) for s in (1, 8))
    m = model("h200", nodes=2)
    big = 2.0**30
    assert float(m.time_s("all_gather", big, shared)) > 5 * float(m.time_s("all_gather", big, alone))
    inside = [GroupShape(ranks=2, ranks_per_node=2, siblings=s) for s in (1, 4)]
    assert m.time_s("all_gather", big, inside[0]) == m.time_s("all_gather", big, inside[1])


def test_all_pairs_at_once_as_measured_on_four_h200():
    # Two pairs at once on 4 x H200, torch 2.11: all-gather of 1 GiB 1988.6 us, 256 MiB 546.9, send/recv 1 GiB 2901.2.
    pair = GroupShape(ranks=2, ranks_per_node=2, siblings=2)
    m = model("h200", 4)
    assert m.time_s("all_gather", np.array([1024, 256]) * MIB, pair) == pytest.approx([1988.6e-6, 546.9e-6], rel=0.06)
    assert float(m.time_s("send_recv", 1024 * MIB, pair)) == pytest.approx(2901e-6, rel=0.05)


def test_another_h200_machine_under_torch():
    # 4 x H200, torch 2.11, NCCL 2.28.9, eager: six ops, two group sizes, 1 KiB to 1 GiB. No curve was fitted on it; the
    # host's issue time and the send/recv ceiling were read off it, so those rows are also left out below.
    rows = read_json(Path(__file__).parents[1] / "data" / "h200x4_collectives.json")["samples"]
    m = model("h200", 4)
    errors, inside, independent = [], [], []
    for row in rows:
        shape = GroupShape(ranks=row["ranks"], ranks_per_node=row["ranks"], siblings=4 // row["ranks"])
        time = m.choose(row["op"], row["nbytes"], shape, launch=LaunchMode.EAGER).time_s
        errors.append(abs(time.value / row["time_s"] - 1))
        inside.append(time.low <= row["time_s"] <= time.high)
        if row["op"] != "send_recv" and row["time_s"] > 23e-6:
            independent.append(errors[-1])
    assert len(errors) == 121
    assert np.mean(errors) < 0.06
    assert np.mean(inside) >= 0.80
    assert len(independent) > 35
    assert np.mean(independent) < 0.06


def test_broadcast_follows_the_all_gather_law():
    # 4 x H200: 64 MiB 201 us, 1 GiB 2935.7 us.
    times = model("h200", 4).time_s("broadcast", np.array([64, 1024]) * MIB, GroupShape(ranks=4, ranks_per_node=4))
    assert times == pytest.approx([201e-6, 2935.7e-6], rel=0.15)


def test_launch_modes():
    m = model("h200")
    queued = float(m.time_s("all_reduce", 1024, EIGHT))
    assert float(m.time_s("all_reduce", 1024, EIGHT, launch=LaunchMode.GRAPH)) == queued
    assert float(m.time_s("all_gather", 64, GroupShape(ranks=2, ranks_per_node=2), launch=LaunchMode.EAGER)) == 17.5e-6
    # all_reduce_bench.py on 8 x H200 at 32 KiB: 40 us
    assert float(m.time_s("all_reduce", 32768, EIGHT, launch=LaunchMode.ISOLATED)) == pytest.approx(40e-6, rel=0.1)


def test_choice_names_algorithm_channels_and_sms():
    m = model("h200")
    small, large = m.choose("all_reduce", 1024, EIGHT), m.choose("all_reduce", 2.0**30, EIGHT)
    assert (small.algorithm, small.protocol, small.channels) == ("ring", "LL", 1)
    assert (large.algorithm, large.sms) == ("nvls", 16)
    assert large.time_s.low < large.time_s.value < large.time_s.high
    assert large.time_s.source is Source.FITTED
    assert m.choose("all_gather", 2.0**30, EIGHT).channels == 24


RATES = np.geomspace(0.25, 8.0, 16)


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100", "dgx-b200"])
def test_faster_links_inside_a_node_take_no_time_and_no_kernel_from_it(name):
    """Links of any two rates: NCCL chooses on all of them as on those that there are."""
    sizes, machine = 2.0 ** np.arange(12, 33), catalog.cluster(name)
    models = [CollectiveModel(scale_nvlink(machine, float(factor))) for factor in sorted({1.0, *RATES})]
    for op, shape in product(MONOTONE, (GroupShape(ranks=2, ranks_per_node=2), EIGHT)):
        for slower, faster in pairwise([one.choose_many(op, sizes, shape) for one in models]):
            for slow, fast in zip(slower, faster, strict=True):
                assert fast.time_s.value <= slow.time_s.value * (1 + 1e-9)
                assert fast.sms * fast.time_s.value <= slow.sms * slow.time_s.value * (1 + 1e-9)


@pytest.mark.parametrize(("name", "nvlink"), [("dgx-h100", 1.0), ("dgx-a100", 1.0), ("dgx-h100", 0.9)])
def test_a_faster_network_takes_no_more_sm_seconds_from_kernels(name, nvlink):
    """Up to four times the rate, where a collective has bytes to send. 240 Gbit/s doubles the channels of 200.

    Also with NVLink that is slower than where curves were fitted.
    """
    machine, shape = scale_nvlink(catalog.cluster(name, 32), nvlink), GroupShape(ranks=32, ranks_per_node=8)
    sizes = 2.0 ** np.arange(24, 33)
    least = np.full((len(MONOTONE), len(sizes)), np.inf)
    for factor in np.geomspace(0.25, 1.0, 30):
        model = CollectiveModel(scale_network(machine, float(factor)))
        for row, op in enumerate(MONOTONE):
            found = model.choose_many(op, sizes, shape)
            taken = np.array([one.sms * one.time_s.value for one in found])
            assert np.all(taken <= least[row] * 1.05)  # two windows of slower links may end at other rates
            least[row] = np.minimum(least[row], taken)


@pytest.mark.parametrize(("name", "gpus"), [("dgx-2", 144), ("dgx-a100", 64), ("oci-gpu4-8", 32)])
def test_a_faster_network_slows_no_all_reduce(name, gpus):
    """Without NVLS NCCL leaves the tree for the ring at another size where another number of channels fits."""
    machine, sizes = catalog.cluster(name, gpus), np.geomspace(2.0**16, 2.0**32, 120)
    shape = group_shape(size=gpus, stride=1, gpus_per_node=machine.gpus_per_node, world=gpus)
    rates = np.unique([1.0, 2.0, 4.0, *np.geomspace(0.25, 8.0, 13)])
    times = [CollectiveModel(scale_network(machine, float(rate))).time_s("all_reduce", sizes, shape) for rate in rates]

    for slower, faster in combinations(times, 2):
        assert np.all(faster <= slower * (1 + 1e-9))


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100"])
def test_between_nodes_no_parts_take_less_time_than_the_whole(name):
    """An all-reduce is a reduce-scatter and an all-gather in one kernel, and a message its parts one after the other.

    Inside a node NCCL itself takes up to 1.23 times as long as for two halves where it changes protocol (published
    tables: four A100, 2 MiB). Single ranks of nodes gather by PAT, by which NCCL does not all-reduce.
    """
    sizes, machine = 2.0 ** np.arange(10, 34), catalog.cluster(name, 256)
    for nodes, per_node in product((2, 4, 8, 32), (1, 2, 8)):
        for siblings in {1, 8 // per_node}:
            shape = GroupShape(ranks=nodes * per_node, ranks_per_node=per_node, siblings=siblings)
            ops = ("all_reduce", "reduce_scatter", "all_gather")
            whole, scatter, gather = (CollectiveModel(machine).time_s(op, sizes, shape) for op in ops)
            assert per_node == 1 or np.all(whole <= (scatter + gather) * (1 + 1e-9))
            for found in (whole, scatter, gather):
                for halvings in (1, 2, 3):
                    assert np.all(found[halvings:] <= 2**halvings * found[:-halvings] * (1 + 1e-9))


def test_one_byte_integers_cannot_use_nvls():
    assert model("h200").choose("all_reduce", 2.0**29, EIGHT, int8=True).algorithm == "ring"


def test_copy_engine_needs_no_sm_and_cannot_reduce():
    m = model("h100")
    cost = m.choose("all_gather", 2.0**30, EIGHT, algorithm="copy_engine")
    assert cost.sms == 0
    assert busbw("all_gather", 8, 2.0**30, cost.time_s.value) == pytest.approx(368.8, rel=0.03)  # measured, 82 %
    with pytest.raises(Infeasible):
        m.choose("all_reduce", 2.0**30, EIGHT, algorithm="copy_engine")


def test_one_shot_is_for_small_and_two_shot_for_large():
    m = model("h100")
    small = [float(m.time_s("all_reduce", 4096, EIGHT, algorithm=a)) for a in ("one_shot", "two_shot")]
    large = [float(m.time_s("all_reduce", 64 * MIB, EIGHT, algorithm=a)) for a in ("one_shot", "two_shot")]
    assert small[0] < small[1]
    assert large[1] < large[0]
    # vLLM's kernel in a graph on 8 x H100: 512 B 4.7 us, NCCL 15.5
    assert small[0] < 0.5 * float(m.time_s("all_reduce", 4096, EIGHT))


def test_a_gpu_without_links_takes_the_group_to_pcie():
    healthy = cluster("h200")
    node = healthy.groups[0].node
    broken = dataclasses.replace(node.links[3], state=LinkState.ABSENT)
    links = (*node.links[:3], broken, *node.links[4:])
    sick = dataclasses.replace(
        healthy, groups=(dataclasses.replace(healthy.groups[0], node=dataclasses.replace(node, links=links)),)
    )
    times = [float(CollectiveModel(c).time_s("all_reduce", 2.0**29, EIGHT)) for c in (healthy, sick)]
    assert times[1] > 5 * times[0]  # 13 times on two GB300 trays


def test_no_network_means_no_collective():
    two = cluster("h200", nodes=2, nics=0)
    with pytest.raises(Infeasible):
        CollectiveModel(two).choose("all_reduce", MIB, GroupShape(ranks=16, ranks_per_node=8))


@pytest.mark.parametrize(("op", "algorithm"), [("all_mangle", None), ("all_reduce", "magic")])
def test_unknown_words_are_named(op, algorithm):
    with pytest.raises(BadInput, match="use one of"):
        model().time_s(op, MIB, EIGHT, algorithm=algorithm)


@pytest.mark.parametrize(
    "gpu", ["a100", "h100", "h200", "b200", "b300", "gb200", "l40s", "rtxpro6000", "mi300x", "b60"]
)
@pytest.mark.parametrize("op", OPS)
def test_every_machine_gives_finite_positive_times(gpu, op):
    joined = "mesh" if gpu.startswith("mi") else "nvswitch"
    sizes = 2.0 ** np.arange(0, 36, 5)
    for shape in (EIGHT, GroupShape(ranks=2, ranks_per_node=2), GroupShape(ranks=64, ranks_per_node=8)):
        times = model(gpu, nodes=8, joined=joined).time_s(op, sizes, shape)
        assert np.all(np.isfinite(times))
        assert np.all(times > 1e-6)


def test_faster_links_than_fitted_scale_and_say_so():
    fast = cluster("b200")
    kind = dataclasses.replace(fast.gpu_kinds[0], nvlink_links=36)
    node = fast.groups[0].node
    links = tuple(dataclasses.replace(link, bytes_per_s=1800e9) for link in node.links)
    rubin = dataclasses.replace(
        fast,
        gpu_kinds=(kind,),
        groups=(dataclasses.replace(fast.groups[0], node=dataclasses.replace(node, links=links)),),
    )
    old, new = (CollectiveModel(c).choose("all_gather", 2.0**32, EIGHT).time_s for c in (fast, rubin))
    assert new.value == pytest.approx(old.value / 2, rel=0.02)


def test_generations_are_ordered_and_cover_every_protocol():
    for generation in (AMPERE, HOPPER, BLACKWELL):
        assert {"ring/LL", "ring/LL128", "ring/Simple"} <= set(generation.curves)
        for curve in generation.curves.values():
            assert {"all_reduce", "all_gather", "reduce_scatter", "broadcast"} <= set(curve.bytes)
    assert set(ALGORITHMS) >= {"ring", "tree", "nvls", "nvls_tree", "pat", "one_shot", "two_shot", "copy_engine"}


def test_measured_samples_go_first():
    sample = CollectiveSample(op="all_reduce", ranks=8, nodes=1, nbytes=MIB, time_s=100e-6)
    m = CollectiveModel(cluster("h200"), measured=MeasuredCollectives([sample]))
    cost = m.choose("all_reduce", MIB, EIGHT)
    assert cost.time_s.value == pytest.approx(100e-6, rel=0.02)
    assert cost.time_s.source is Source.MEASURED
    assert m.choose("all_reduce", 2.0**33, EIGHT).time_s.source is Source.FITTED


def test_one_gpu_off_the_switch_poisons_the_communicator() -> None:
    """A GB300 tray with one GPU without links: 4.5 to 6.7 GB/s (datacrunch report); the three others are unharmed."""
    base = catalog.cluster("gb300-nvl72", 4)
    node = base.groups[0].node
    links = tuple(
        dataclasses.replace(link, state=LinkState.ABSENT)
        if link.kind is LinkKind.NVSWITCH and "gpu1" in {link.a, link.b}
        else link
        for link in node.links
    )
    gpus = tuple(dataclasses.replace(gpu, healthy=gpu.index != 1) for gpu in node.gpus)
    broken = dataclasses.replace(base, groups=(NodeGroup(node=dataclasses.replace(node, links=links, gpus=gpus)),))

    def busbw(of, ranks: int) -> float:
        seconds = float(CollectiveModel(of).time_s("all_reduce", 2**29, GroupShape(ranks=ranks, ranks_per_node=ranks)))
        return 2**29 * 2 * (ranks - 1) / ranks / seconds

    assert 4.5e9 < busbw(broken, 4) < 6.7e9
    assert busbw(broken, 3) == pytest.approx(busbw(base, 3))


def test_without_nvls_bulk_all_reduces_between_nodes_run_the_ring() -> None:
    """Two DGX A100 with 8 x 200 Gbit/s: NVIDIA measures 192 GB/s bus bandwidth (NVIDIA/nccl issue 812). A tree would
    send half as much and show more than the network carries; NCCL's formulas take it for small messages only.
    """
    machine = CollectiveModel(catalog.cluster("dgx-a100", gpus=16))
    shape = GroupShape(ranks=16, ranks_per_node=8, siblings=1)
    small, large = (machine.choose("all_reduce", size, shape) for size in (2.0**16, 2.0**33))
    bus = 2 * 15 / 16 * 2.0**33 / large.time_s.value

    assert small.algorithm == "tree"
    assert large.algorithm == "ring"
    assert bus == pytest.approx(192e9, rel=0.12)
    hopper = CollectiveModel(catalog.cluster("dgx-h100", gpus=16)).choose("all_reduce", 2.0**33, shape)
    assert hopper.algorithm == "nvls_tree"


@pytest.mark.parametrize("shape", [EIGHT, GroupShape(ranks=32, ranks_per_node=4)], ids=str)
def test_loads_are_those_of_the_collective_that_runs(shape):
    sizes = np.array([2.0**20, 3e8, 5e3, 3e8])
    for op in OPS:
        remembers = model(nodes=8)
        remembers.loads(op, sizes[:2], shape)
        runs = model(nodes=8).choose_many(op, sizes, shape)
        sent = [size * port_share(op, one.algorithm, shape) for size, one in zip(sizes, runs, strict=True)]

        assert remembers.loads(op, sizes, shape) == pytest.approx(np.array([[one.sms for one in runs], sent]))


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_long_rings_over_nodes_take_the_protocol_that_nccl_takes(op):
    """256 ranks in eight NVLink domains: Simple waits longest at every hop, so NCCL's own costs leave it to the largest
    buffers. Half of LL's bytes are flags.
    """
    shape = group_shape(size=256, stride=2, gpus_per_node=64, world=512)
    comm = communicator(catalog.cluster("gb300-nvl72", 512), shape)
    sizes = np.array([64e6, 512e6, 64e9])
    times = multi_node_s(comm, op, sizes)
    fastest = [min(times, key=lambda kind: times[kind][i])[1] for i in range(len(sizes))]
    _, chosen, lines = choose(comm.nccl, op, sizes)

    assert fastest == [lines[i].protocol for i in chosen] == ["LL128", "LL128", "Simple"]
    assert times["ring", "LL"][2] > 2 * sizes[2] / comm.inter_bytes_per_s
