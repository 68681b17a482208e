"""Charts are functions of rows: what is drawn, in which colours, and that both themes can be read."""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise

import pytest

from planner.io.inputs import read_cluster
from planner.pictures import palette
from planner.pictures.memory import stage_parts
from planner.pictures.node_layout import node_view, pair_rows
from planner.search.whole_run import WholeRun
from simulator.config.estimate import Interval, MemoryEstimate
from simulator.config.plan import Plan, rank_grid
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT
from topology.catalog.clusters import catalog_names
from topology.cluster import LinkState, Source
from ui.changed_rows import run_rows
from ui.charts import curves, detail, loads, look, measured, plans, topology
from ui.charts.timeline import COLOURS
from ui.charts.topology import placement_rows

GIB = 2**30
TOPO = ROOT / "tests" / "data" / "topo"


def row(plan, rank, step_s, peak_gib):
    """Return a row of a table of plans."""
    words = dict.fromkeys(("chips", "policy", "step", "range", "memory", "fits", "tokens", "mfu"), "words")
    label = {"plan": plan, "rank": rank, "label": f"{rank}  {plan}", "sure": rank == 1}
    return {**words, **label, "step_s": step_s, "low_s": 0.9 * step_s, "high_s": 1.2 * step_s, "peak_gib": peak_gib}


ROWS = [row("a", 1, 1.0, 60.0), row("b", 2, 1.1, 40.0), row("c", 3, 1.2, 50.0)]

CELL = {"length": "4,096", "micro_batch": "1", "upper": "u", "rate": "r", "lower": "l", "state": "s"}
SIZES = [
    {**CELL, "tokens_per_s": 100.0, "here": True},
    {**CELL, "micro_batch": "2", "tokens_per_s": None, "here": False},
]

DAYS = Interval(value=84.0, low=65.0, high=110.0, source=Source.ASSUMED)
RUN = WholeRun(gpus=8, days=DAYS, gpu_hours=DAYS.at(16128.0))


def test_a_run_without_a_plan_is_not_drawn():
    (drawn,) = run_rows([RUN, WholeRun(gpus=16, problem="none")], 8)

    assert drawn["cost_text"] == "16,000 (12,000 to 21,000)"
    assert drawn["here"]


@cache
def specifications(dark):
    """Return the specification of every chart, drawn from small rows."""
    view = node_view(read_cluster("dgx-a100"))
    fall = [{"name": "model FLOPs at peak", "seconds": 1.0, "share": 1.0, "meaning": "m", "colour": palette.BLUE}]
    run = {"id": "r", "source": "s", "predicted": 1.0, "measured": 1.1, "error": -0.09, "interval": "outside"}
    drawn = {
        "node": topology.node(view, dark=dark),
        "pairs": topology.pairs(pair_rows(read_cluster("dgx-1v")), switched=False, dark=dark),
        "placement": topology.placement(placement_rows(Plan(tp=8, pp=2), 8), "tp", dark=dark),
        "scatter": plans.scatter(ROWS, limit_gib=80.0, chosen="a", dark=dark),
        "ranges": plans.ranges(ROWS, chosen=["a"], dark=dark),
        "counts": plans.counts({"memory": 10, "kv-heads": 1, "none": 0}, dark=dark),
        "sensitivity": plans.sensitivity(
            [{"rate": 1e9, "plan": "a", "step_s": 1.0}],
            quantity="network",
            now=1e9,
            flip=(2e9, "flips at 2 GB/s"),
            dark=dark,
        ),
        "memory": detail.memory([{"parameters": GIB, "activations": 2 * GIB, "reserved": GIB}], 80 * GIB, dark=dark),
        "waterfall": detail.waterfall(fall, last_s=0.1, dark=dark),
        "loads": topology.node(view, dark=dark, shares={cable.id: 0.2 for cable in view.cables[:4]}),
        "fabric": loads.fabric([loads.NodeLoad(first=0, last=3, inside=(0.1, 0.7), network=0.2)], dark=dark),
        "against": measured.against([run], unit="s", dark=dark),
        "errors": measured.errors([run], dark=dark),
        "parameters": detail.parameters([{"part": "attention", "parameters": 1e9}], dark=dark),
        "sizes": curves.size_map(SIZES, dark=dark),
        "runs": curves.cost_over_days(run_rows([RUN], 8), "GPU hours", dark=dark),
        "savings": detail.savings(
            [{"change": "c", "from_gib": 9.0, "to_gib": 4.0, "quicker": True, "text": "t"}], 8.0, dark=dark
        ),
        "differences": detail.differences([{"name": "bubble", "delta": 1.0, "text": "1 ms"}], unit="ms", dark=dark),
    }
    return {name: chart.to_dict() for name, chart in drawn.items()}


def colours_in(spec):
    """Return every colour that a specification names."""
    found = set()
    if isinstance(spec, dict):
        for value in spec.values():
            found |= colours_in(value)
    elif isinstance(spec, list):
        for value in spec:
            found |= colours_in(value)
    elif isinstance(spec, str) and len(spec) == 7 and spec.startswith("#"):
        found.add(spec.upper())
    return found


@pytest.mark.parametrize("dark", [False, True])
def test_every_chart_is_a_valid_specification(dark):
    """Altair checks a chart against the schema when it writes the specification."""
    for name, spec in specifications(dark).items():
        assert spec["$schema"].startswith("https://vega.github.io/schema/vega-lite/"), name
        assert spec["config"]["background"] == "transparent", name
        assert spec["config"]["view"]["strokeWidth"] == 0, name


@pytest.mark.parametrize("dark", [False, True])
def test_colours_come_from_the_palette_and_nowhere_else(dark):
    named = {colour.upper() for family in palette.FAMILIES.values() for colour in family.values()}
    paper = palette.DARK if dark else palette.LIGHT
    own = {paper.page, paper.ink, paper.quiet, paper.rule, "#FFFFFF", "#000000", "#7FB8D8"}
    for name, spec in specifications(dark).items():
        assert colours_in(spec) <= named | {colour.upper() for colour in own}, name


def test_text_can_be_read_on_its_paper():
    """Contrast of WCAG 2.2, success criterion 1.4.3: at least 4.5 for text."""
    assert look.contrast("#000000", "#FFFFFF") == pytest.approx(21.0)
    assert look.contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)  # webaim.org's example of a near miss
    for paper in (palette.LIGHT, palette.DARK):
        for ink in (paper.ink, paper.quiet):
            assert look.contrast(ink, paper.page) >= 4.5


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_of_charts_can_be_read(dark):
    """Text stands on the page, or on a coloured mark in the ink that suits it."""
    page = (palette.DARK if dark else palette.LIGHT).page
    for name, spec in specifications(dark).items():
        for layer in spec.get("layer", [spec]):
            mark = layer["mark"] if isinstance(layer["mark"], dict) else {"type": layer["mark"]}
            if mark["type"] != "text" or "stroke" in mark:
                continue
            if "color" in mark:
                assert look.contrast(mark["color"], page) >= 4.5, (name, mark)
            else:
                assert layer["encoding"]["color"]["field"] == "on", name
    for family in palette.FAMILIES.values():
        for hue in family.values():
            assert look.contrast(look.ink_on(hue), hue) >= 4.5


def test_pcie_is_not_painted_like_nvlink():
    """All pairs of a machine without NVLink are alike, and still PCIe's colour; unread pairs are neither."""
    cluster = read_cluster(str(TOPO / "27_2gpu_phb_consumer_numa_na.txt"))
    spec = topology.pairs(pair_rows(cluster), switched=False, dark=False).to_dict()
    drawn = spec["layer"][0]["encoding"]["color"]["scale"]

    assert drawn == {"domain": ["PCIe"], "range": [palette.LINKS["pcie"]]}
    spec = topology.pairs(pair_rows(read_cluster("dgx-h100")), switched=True, dark=False).to_dict()
    assert spec["layer"][0]["encoding"]["color"]["scale"]["range"] == [palette.LINKS["nvswitch"]]


def test_one_colour_for_one_idea_on_all_pages():
    """Communication is one colour in the waterfall and the timeline; so are the optimizer's state and its time."""
    drawn = COLOURS

    assert drawn["communication"] == palette.TIME["exposed_communication"]
    assert drawn["optimizer"] == palette.TIME["optimizer"] == palette.MEMORY["optimizer"]
    assert drawn["recompute"] == palette.TIME["recompute"]
    assert drawn["backward"] == palette.TIME["compute"]


def test_kinds_that_follow_each_other_in_a_lane_can_be_told_apart():
    """As far as red, green and blue differ: 75 of the 441 between black and white."""
    for first, second in combinations(("forward", "backward", "recompute", "copies", "other kernels", "optimizer"), 2):
        parts = zip(*(bytes.fromhex(COLOURS[kind][1:]) for kind in (first, second)), strict=True)
        assert sum((a - b) ** 2 for a, b in parts) ** 0.5 > 75, (first, second)


def test_the_front_is_what_nothing_beats_in_both():
    assert [row["plan"] for row in plans.front(ROWS)] == ["a", "b"]
    for first, second in pairwise(plans.front(ROWS)):
        assert first["step_s"] <= second["step_s"]
        assert first["peak_gib"] > second["peak_gib"]


def test_the_ranges_of_steps_are_drawn_and_what_may_not_fit_is_hollow():
    spec = plans.ranges(ROWS, chosen=["a"], dark=False).to_dict()
    values = spec.get("data", spec["layer"][0].get("data"))["values"]

    assert [(v["low_s"], v["step_s"], v["high_s"]) for v in values] == [
        (r["low_s"], r["step_s"], r["high_s"]) for r in ROWS
    ]
    low, high = spec["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert low < min(r["low_s"] for r in ROWS)
    assert high > max(r["high_s"] for r in ROWS)
    assert [v["sure to fit"] for v in values] == ["surely fits", "may not fit", "may not fit"]


def test_a_logarithmic_bar_has_an_axis():
    spec = plans.counts({"memory": 6172, "kv-heads": 8}, dark=False).to_dict()
    (x,) = (layer["encoding"]["x"] for layer in spec["layer"] if layer["mark"]["type"] == "bar")

    assert x["scale"]["type"] == "log"
    assert "logarithmic" in x["title"]
    assert x["axis"]["values"] == [1, 10, 100, 1000, 10000]


def numbers_in(spec):
    """Return the fields of all tooltips that would be shown as raw numbers."""
    if isinstance(spec, list):
        return [field for part in spec for field in numbers_in(part)]
    if not isinstance(spec, dict):
        return []
    own = spec.get("tooltip", [])
    shown = own if isinstance(own, list) else [own]
    raw = [tip["field"] for tip in shown if tip.get("type") == "quantitative" and "format" not in tip]
    return raw + [field for value in spec.values() for field in numbers_in(value)]


def test_tooltips_show_no_more_digits_than_are_known():
    ranks = {"rank"}
    for name, spec in specifications(dark=False).items():
        assert set(numbers_in(spec)) <= ranks, name


def test_a_bar_of_memory_ends_at_what_the_allocator_holds():
    held = MemoryEstimate(
        peak_bytes=Interval(value=4 * GIB, low=4 * GIB, high=4 * GIB, source=Source.ASSUMED),
        reserved_bytes=5 * GIB,
        by_category={"parameters": 3 * GIB, "other": GIB},
        worst_rank=0,
        capacity_bytes=80 * GIB,
        fits=True,
    )
    spec = detail.memory(stage_parts(held), 80 * GIB, dark=False).to_dict()
    values = spec["layer"][0]["data"]["values"]

    assert sum(value["gib"] for value in values) == pytest.approx(5.0)
    assert {value["category"] for value in values} == {"parameters", "other", "reserved"}


def test_the_waterfall_is_continuous_and_ends_at_the_step():
    rows = [
        {"name": "peak", "seconds": 2.0, "share": 0.5, "meaning": "", "colour": "#0072B2"},
        {"name": "bubble", "seconds": 2.0, "share": 0.5, "meaning": "", "colour": "#BEBEC4"},
        {"name": "step", "seconds": 4.0, "share": 1.0, "meaning": "", "total": True},
    ]
    spec = detail.waterfall(rows, last_s=0.1, dark=False).to_dict()
    values = spec.get("data", spec["layer"][0].get("data"))["values"]

    assert [(value["from"], value["to"]) for value in values] == [(0.0, 2.0), (2.0, 4.0), (0.0, 4.0)]


# --- the machine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog_names())
def test_every_machine_of_the_catalogue_is_drawn_whole(name):
    """Every part has a place of its own, and every link joins two of them."""
    cluster = read_cluster(name)
    view = node_view(cluster)
    node = cluster.groups[0].node

    assert len(view.parts) == len(node.gpus) + len(node.vertices) + len(node.nics)
    assert len({(round(part.x, 6), part.y) for part in view.parts}) == len(view.parts)
    places = {part.id.removeprefix("n0."): (part.x, part.y) for part in view.parts}
    assert len(view.cables) == len(node.links)
    for cable in view.cables:
        assert cable.points[0] == places[cable.a]
        assert cable.points[-1] == places[cable.b]


def test_a_rack_is_cut_to_what_fits_but_not_its_faults():
    from dataclasses import replace

    cluster = read_cluster("gb200-nvl72")
    group = cluster.groups[0]
    sick = tuple(replace(gpu, healthy=gpu.index != 70) for gpu in group.node.gpus)
    cluster = replace(cluster, groups=(replace(group, node=replace(group.node, gpus=sick)),))
    view = node_view(cluster, most=16)

    shown = {part.index for part in view.parts if part.kind == "gpu"}
    assert shown == {*range(16), 70}
    joined = {end for cable in view.cables for end in (cable.a, cable.b)}
    assert {part.id.removeprefix("n0.") for part in view.parts} == joined


def test_a_link_that_is_not_well_is_drawn_as_such():
    from dataclasses import replace

    cluster = read_cluster("dgx-a100")
    group = cluster.groups[0]
    links = tuple(
        replace(link, state=LinkState.DEGRADED) if link.a == "gpu5" and link.label.startswith("NV") else link
        for link in group.node.links
    )
    bad = replace(cluster, groups=(replace(group, node=replace(group.node, links=links)),))
    spec = topology.node(node_view(bad), dark=False).to_dict()

    lines = spec["layer"][0]["data"]["values"]
    assert {line["what"].split(" to ")[0] for line in lines if line["bad"]} == {"gpu5"}


def test_pairs_are_symmetric_and_wider_over_nvlink():
    rows = {(row["from"], row["to"]): row for row in pair_rows(read_cluster("dgx-1v"))}

    assert all(rows[b, a]["rate"] == row["rate"] for (a, b), row in rows.items())
    by_class = {row["class"]: row["rate"] for row in rows.values() if row["rate"]}
    assert by_class["NV2"] > by_class["NV1"] > by_class["SYS"]


def test_ranks_lie_where_the_grid_and_the_placement_put_them():
    plan = Plan(pp=2, dp_shard=2, tp=4, placement=(*range(15, -1, -1),))
    rows = placement_rows(plan, 8)

    grid = rank_grid(plan)
    for row in rows:
        at = tuple(row[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
        assert grid[at] == row["rank"]
        assert (row["node"], row["gpu"]) == divmod(15 - row["rank"], 8)


def test_a_thousand_nodes_are_cut_to_a_page():
    rows = placement_rows(Plan(dp_shard=1024, tp=8), 8)

    assert len(rows) == 32 * 8
