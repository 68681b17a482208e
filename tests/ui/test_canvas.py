"""What the browser gets of a step: columns that say the same as the trace, and loads that say the same as the
traffic.
"""

from __future__ import annotations

import base64

import numpy as np
import pytest

from planner.explain.traffic import NETWORK, NVLINK, RankTraffic, Traffic
from planner.io.inputs import read_cluster
from planner.pictures.node_layout import node_view
from simulator.config.plan import Plan
from simulator.program.trace import COMMUNICATION, COMPUTE, HOST, Span, Trace
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from ui.canvas import payload as payloads
from ui.canvas.payload import PATH, Shown, Strip, payload
from ui.charts.loads import Loads, cable_shares, level, loads, node_loads, percent
from ui.charts.timeline import KINDS, LANES, timeline

SPANS = (
    Span(0, "host", "launch", 0.0, 0.1, HOST),
    Span(0, "compute", "forward.0", 0.1, 1.0, COMPUTE),
    Span(0, "comm", "all_gather", 0.2, 0.5, COMMUNICATION),
    Span(1, "compute", "backward.0", 1.0, 3.0, COMPUTE),
)
LINE = timeline(Trace(spans=SPANS))


def reported(shown, window=(0.0, 3.0), line=LINE, strips=()):
    return payload(line, shown, strips, window=window, about="about", key="k", dark=False)


def column(drawn, name):
    return np.frombuffer(
        base64.b64decode(drawn["spans"][name]), "<f8" if name in {"start", "seconds", "busy"} else "<i4"
    )


def test_columns_say_what_the_trace_says():
    drawn = reported(Shown(lanes=LANES, ranks=(0, 1)))
    lanes = [drawn["lanes"][i]["label"] for i in column(drawn, "lane")]
    found = zip(
        lanes, [KINDS[i] for i in column(drawn, "kind")], column(drawn, "start"), column(drawn, "seconds"), strict=True
    )

    assert not drawn["partial"]
    assert sorted(found) == [
        ("rank 0 communication", "communication", 0.2, pytest.approx(0.3)),
        ("rank 0 compute", "forward", 0.1, pytest.approx(0.9)),
        ("rank 0 host", "host", 0.0, pytest.approx(0.1)),
        ("rank 1 compute", "backward", 1.0, pytest.approx(2.0)),
    ]
    assert [drawn["names"][i] for i in column(drawn, "name")] == ["launch", "forward.0", "all_gather", "backward.0"]


def test_the_critical_path_is_the_first_lane_and_names_ranks():
    drawn = reported(Shown(lanes=("compute",), ranks=(0,), path=(0, 1, 3)))
    on_path = column(drawn, "lane") == 0

    assert [lane["label"] for lane in drawn["lanes"]] == [PATH, "rank 0"]
    assert [drawn["names"][i] for i in column(drawn, "name")[on_path]] == [
        "launch, rank 0",
        "forward.0, rank 0",
        "backward.0, rank 1",
    ]


def test_a_long_trace_is_merged_for_its_window_and_keeps_its_busy_time(monkeypatch):
    monkeypatch.setattr(payloads, "MOST_SPANS", 100)
    monkeypatch.setattr(payloads, "MERGED", 50)
    spans = tuple(
        Span(0, "compute", f"{way}.0", i * 0.01, i * 0.01 + 0.008) for i in range(500) for way in ("forward",)
    )
    line = timeline(Trace(spans=spans))
    whole = reported(Shown(lanes=("compute",), ranks=(0,)), window=(0.0, line.length_s), line=line)
    near = reported(Shown(lanes=("compute",), ranks=(0,)), window=(1.0, 1.1), line=line)

    assert whole["partial"]
    assert whole["key"] != near["key"]
    assert column(whole, "busy").sum() == pytest.approx(500 * 0.008)
    assert column(whole, "count").sum() == 500
    assert column(near, "count").max() < column(whole, "count").min()
    assert column(near, "start").min() >= 0.96


def test_quantities_are_sent_whole():
    strip = Strip(label="memory", about="", unit="GiB", samples=[(0.0, 1.0), (2.0, 5.0)], colour="#000000", limit=8.0)
    (sent,) = reported(Shown(lanes=LANES, ranks=(0,)), strips=[strip])["strips"]

    assert np.frombuffer(base64.b64decode(sent["value"]), "<f8").tolist() == [1.0, 5.0]
    assert (sent["most"], sent["limit"]) == (5.0, 8.0)


def two_nodes(network=25e9):
    """Sixteen GPUs; the first node sends 45 GB over NVLink and 25 GB into the network in a step of 1 s, the other
    nothing.
    """
    sent = ({NVLINK: 45e9, NETWORK: network},) * 8 + ({},) * 8
    return Loads(sent_bytes=sent, step_s=1.0, gpus_per_node=8, rates={NVLINK: 450e9, NETWORK: 50e9})


def test_links_of_a_node_carry_what_its_gpus_send():
    view = node_view(read_cluster("dgx-h100"))
    shares = cable_shares(view, two_nodes())
    kinds = {cable.id: cable for cable in view.cables}
    by_kind = {kind: {round(shares[i], 3) for i in shares if kinds[i].kind == kind} for kind in ("nvswitch", "pcie")}

    assert by_kind["nvswitch"] == {0.1}
    assert sum(
        share * kinds[i].planned
        for i, share in shares.items()
        if kinds[i].b.startswith("mlx5") or kinds[i].a.startswith("mlx5")
    ) == pytest.approx(8 * 25e9)


def test_nodes_that_carry_the_same_are_one():
    found = node_loads(two_nodes())

    assert [(node.name, node.inside[0], node.network) for node in found] == [("node 0", 0.1, 0.5), ("node 1", 0.0, 0.0)]


def test_ranks_are_counted_where_they_are_placed():
    traffic = Traffic(axes=(), links=(), by_rank=(RankTraffic(ranks=(0, 1), sent_bytes={NVLINK: 1.0}),))
    found = loads(traffic, Plan(dp_shard=2, placement=(3, 0)), step_s=1.0, gpus_per_node=4)

    assert [bool(sent) for sent in found.sent_bytes] == [True, False, False, True]


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "0 %"), (0.004, "under 1 %"), (0.25, "25 %"), (0.996, "over 99 %"), (1.0, "100 %")]
)
def test_shares_are_not_rounded_to_nothing_or_all(share, words):
    assert percent(share) == words
    assert level(share)[0]
