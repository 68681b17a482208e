"""Pictures: every figure is drawn to scale and said in words, and hostile names stay text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from defusedxml import ElementTree
from hypothesis import given
from hypothesis import strategies as st

from planner.explain.waterfall import waterfall as waterfall_of
from planner.pictures.memory import memory
from planner.pictures.palette import BAD, LINKS, MEMORY, TIME
from planner.pictures.run_curve import run_curve
from planner.pictures.topology import topology
from planner.pictures.waterfall import estimate_picture, waterfall
from planner.search.whole_run import WholeRun
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.estimate import Interval
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from tests.planner.conftest import LLAMA8B, ROOT, make_cluster
from topology.catalog import clusters as catalog
from topology.cluster import Finding, LinkKind, LinkState, NodeGroup, Severity, Source

SVG = "{http://www.w3.org/2000/svg}"


def parts(text: str, tag: str) -> list:
    return ElementTree.fromstring(text).findall(f".//{SVG}{tag}")


def bars(text: str) -> list[tuple[float, float, str]]:
    """Left edge, width and colour of the filled bars."""
    return [(float(b.get("x")), float(b.get("width")), b.get("fill")) for b in parts(text, "rect") if b.get("fill")]


def words(text: str) -> str:
    return " | ".join("".join(t.itertext()) for tag in ("text", "title", "desc") for t in parts(text, tag))


def test_waterfall_bars_are_to_scale_and_each_begins_where_the_last_ended() -> None:
    terms = [
        ("model FLOPs at peak", 2.0, TIME["compute"]),
        ("exposed TP communication", 1.0, TIME["exposed_communication"]),
        ("overlap", -0.5, TIME["copies"]),
        ("bubble", 1.5, TIME["bubble"]),
    ]
    drawn = bars(waterfall(terms, title="a step", low_s=3.6, high_s=4.8, source="fitted").text())

    scale = drawn[0][1] / 2.0
    assert [width / scale for _, width, _ in drawn] == pytest.approx([2.0, 1.0, 0.5, 1.5], abs=0.01)
    begins = [(x - drawn[0][0]) / scale for x, _, _ in drawn]
    assert begins == pytest.approx([0.0, 2.0, 2.5, 2.5], abs=0.01)
    assert [colour for _, _, colour in drawn] == [colour for _, _, colour in terms]


def test_waterfall_says_its_figures_range_and_source() -> None:
    said = words(
        waterfall(
            [("compute", 3.0, "#000000"), ("host", 0.001, "#000000")],
            title="t",
            low_s=2.5,
            high_s=3.5,
            source="measured",
        ).text()
    )

    assert "3 s a step, 80% range 2.5 to 3.5 s; measured numbers" in said
    assert "3 s, 100%" in said
    assert "0.001 s, <1%" in said


@pytest.fixture(scope="module")
def estimate():
    plan = Plan(dp_shard=2, pp=4, schedule="1F1B", recompute="none")
    workload = Workload(seq_len=4096, global_batch_size=64)
    return estimate_plans(
        Scenario(model=LLAMA8B, cluster=make_cluster(), workload=workload, runtime=Runtime()), [plan]
    ).estimate(0)


def test_memory_bars_add_up_to_what_each_stage_holds(estimate) -> None:
    text = memory(estimate.memory, title="memory")
    drawn = [bar for bar in bars(text) if bar[1] != 12.0]  # the legend's marks are 12 wide
    capacity = parts(text, "polyline")[0].get("points").split()[0].split(",")[0]
    left = min(x for x, _, _ in drawn)
    scale = (float(capacity) - left) / estimate.memory.capacity_bytes

    assert len(estimate.memory.by_stage) == 4
    total = sum(width for _, width, _ in drawn) / scale
    assert total == pytest.approx(sum(estimate.memory.reserved_by_stage), rel=0.01)
    assert {colour for _, _, colour in drawn} <= set(MEMORY.values())
    assert f"of {estimate.memory.capacity_bytes / 2**30:.1f} GiB on rank" in words(text)


def test_memory_beyond_capacity_is_drawn_beyond_the_line(estimate) -> None:
    small = replace(estimate.memory, capacity_bytes=estimate.memory.reserved_bytes / 2, fits=False)
    text = memory(small, title="memory")
    edge = float(parts(text, "polyline")[0].get("points").split()[0].split(",")[0])

    assert max(x + width for x, width, _ in bars(text)) > edge
    assert "does not fit" in words(text)
    assert max(x + width for x, width, _ in bars(text)) < 960


def test_an_estimate_explained_has_its_terms_and_its_memory(estimate) -> None:
    text = estimate_picture(estimate, title="a plan")
    said = words(text)

    assert "model FLOPs at peak" in said
    assert f"{estimate.step_s.value:.3g} s a step" in said
    assert "a plan: memory" in said
    terms = [width for _, width, colour in bars(text)][: len(waterfall_of(estimate).terms) + 1]
    assert terms[0] / sum(terms) == pytest.approx(estimate.mfu, abs=0.002)  # the peak's share of the step


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-1v", "l40s-x8", "gh200", "h200x4", "mi300x-x8"])
def test_every_vertex_and_link_of_a_node_is_drawn_inside_the_picture(name: str) -> None:
    cluster = catalog.cluster(name)
    node = cluster.groups[0].node
    text = topology(cluster)
    width = float(ElementTree.fromstring(text).get("width"))
    boxes = [b for b in parts(text, "rect") if b.get("class") == "box"]

    assert len(boxes) == len(node.gpus) + len(node.nics) + len(node.vertices)
    assert all(0 <= float(b.get("x")) <= width - float(b.get("width")) for b in boxes)
    kinds = {line.get("stroke") for tag in ("polyline", "path") for line in parts(text, tag)}
    assert kinds == {LINKS[link.kind] for link in node.links}
    drawn = [line for tag in ("polyline", "path") for line in parts(text, tag) if line.find(f"{SVG}title") is not None]
    assert len(drawn) == len(node.links)
    assert "per direction" in words(text)


def test_a_rack_shows_some_trays_and_those_with_faults_first() -> None:
    rack = catalog.cluster("gb200-nvl72")
    node = rack.groups[0].node
    links = tuple(
        replace(link, state=LinkState.ABSENT)
        if link.kind is LinkKind.NVSWITCH and "gpu70" in {link.a, link.b}
        else link
        for link in node.links
    )
    faulty = replace(rack, groups=(NodeGroup(node=replace(node, links=links)),))

    assert "GPU 0," in words(topology(rack))
    assert "GPU 70," not in words(topology(rack))
    assert "32 of 72 GPUs" in words(topology(rack))
    assert "GPU 70," in words(topology(faulty))
    assert "no rate, absent" in words(topology(faulty))
    assert float(ElementTree.fromstring(topology(faulty)).get("width")) < 2000


def test_rates_are_said_with_their_source_and_faults_look_different() -> None:
    cluster = catalog.cluster("dgx-h100")
    node = cluster.groups[0].node
    links = tuple(
        replace(link, state=LinkState.DEGRADED, measured_bytes_per_s=200e9)
        if link.kind is LinkKind.NVSWITCH and "gpu3" in {link.a, link.b}
        else link
        for link in node.links
    )
    broken = replace(cluster, groups=(NodeGroup(node=replace(node, links=links)),))

    assert "8 x NVLink to the switch: 18 links, 450.0 GB/s (datasheet)" in words(topology(cluster))
    assert BAD not in topology(cluster)
    said = words(topology(broken))
    assert "7 x NVLink to the switch" in said
    assert "measured 200.0 GB/s, degraded" in said
    assert any(
        line.get("stroke") == BAD and line.get("stroke-dasharray") for line in parts(topology(broken), "polyline")
    )


@given(st.text(max_size=40) | st.sampled_from(['<script>alert("x")</script>', "]]>", "&#x1b;", "\x00\x1b[31m", "a\nb"]))
def test_names_stay_text(name: str) -> None:
    cluster = make_cluster(1, 2)
    node = cluster.groups[0].node
    gpus = tuple(replace(gpu, name=name) for gpu in node.gpus)
    found = Finding(severity=Severity.WARNING, what=name, why=name, consequence=name, remedy=name)
    hostile = replace(cluster, name=name, groups=(NodeGroup(node=replace(node, gpus=gpus)),), findings=(found,))
    for text in (
        topology(hostile),
        waterfall([(name, 1.0, "#000000")], title=name, low_s=0.9, high_s=1.1, source=name).text(),
    ):
        tags = {element.tag.removeprefix(SVG) for element in ElementTree.fromstring(text).iter()}
        assert tags <= {"svg", "title", "desc", "style", "rect", "polyline", "path", "text"}


def test_probe_draws_beside_what_it_prints(planner, tmp_path) -> None:
    out = tmp_path / "node.svg"
    done = planner("probe", "--from", "dgx-h100", "--svg", out, "--json")

    assert done.returncode == 0
    assert ElementTree.fromstring(out.read_text()).tag == f"{SVG}svg"
    assert '"gpus"' in done.stdout
    assert planner("probe", "--from", "dgx-h100", "--svg", out).returncode == 2
    assert planner("probe", "--from", "dgx-h100", "--svg", out, "--force").returncode == 0


@pytest.mark.parametrize("only", [(), ("--memory",)])
def test_explain_draws_what_it_prints(planner, tmp_path, only) -> None:
    out = tmp_path / "plan.svg"
    plan = ROOT / "examples" / "plans" / "qwen3_8b_tp2_fsdp4.json"
    done = planner("explain", plan, "--no-flips", "--top", "1", "--svg", out, *only, "--json")

    assert done.returncode == 0, done.stderr
    said = words(out.read_text())
    assert "qwen3-8b, 8 = dp 1 x fsdp 4 x tp 2 x pp 1" in said
    assert ("model FLOPs at peak" in said) == (not only)
    assert planner("explain", plan, "--svg", out).returncode == 2


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "pictures").glob("*.svg")), ids=lambda path: path.stem)
def test_kept_pictures_are_what_is_drawn_today(path) -> None:
    """Made again by `planner probe --from NAME --svg examples/pictures/NAME.svg --force`."""
    assert path.read_text() == topology(catalog.cluster(path.stem))


def test_a_whole_runs_cost_is_drawn_against_its_days():
    def point(gpus: int, days: float, cost: float) -> WholeRun:
        ends = [Interval(value=v, low=0.8 * v, high=1.2 * v, source=Source.ASSUMED) for v in (days, cost)]
        return WholeRun(gpus=gpus, days=ends[0], gpu_hours=ends[1], cost=ends[1])

    runs = [point(16, 80.0, 60_000.0), point(64, 23.0, 48_000.0), WholeRun(gpus=128, problem="no plan")]

    text = run_curve(runs, 64, title="run", unit="EUR")

    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter() if element.text]
    assert {"16 GPUs", "64 GPUs", "days (logarithmic)", "EUR", "80", "23"} <= set(words)
    assert {"0", "20,000", "40,000", "60,000", "80,000"} <= set(words)  # round numbers, up to the end of a range
    assert not any("128" in str(word) for word in words)
    assert run_curve([WholeRun(gpus=8, problem="no plan")], 8, title="run", unit="EUR").startswith("<svg")
