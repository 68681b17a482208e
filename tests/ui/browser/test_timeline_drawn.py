"""Timelines and fabrics as they are painted."""

from __future__ import annotations

import json
import re

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.browser.pages import SMALL, settled

pytestmark = pytest.mark.browser


def test_the_trace_is_a_file_that_perfetto_reads(page, address, tmp_path):
    page.goto(f"{address}/detail?{SMALL}&tab=Timeline")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Trace for Perfetto").click()
    saved = tmp_path / "trace.json"
    waiting.value.save_as(saved)

    events = json.loads(saved.read_text())["traceEvents"]
    assert {"X", "M"} <= {event["ph"] for event in events}


# For each lane of a timeline its height on the screen, and in how many columns and rows of pixels something is painted.
PAINTED = """canvas => {
    const pen = canvas.getContext("2d");
    const ratio = canvas.width / canvas.clientWidth;
    const gutter = Math.ceil(140 * ratio);
    return JSON.parse(canvas.dataset.lanes).map(lane => {
        const [top, high] = [Math.round(lane.top * ratio), Math.round(lane.height * ratio)];
        const { data, width } = pen.getImageData(gutter, top, canvas.width - gutter, high);
        const [columns, rows] = [new Set(), new Set()];
        for (let i = 3; i < data.length; i += 4) if (data[i] > 60) { columns.add((i >> 2) % width); rows.add(Math.floor((i >> 2) / width)); }
        return { label: lane.label, height: lane.height, columns: columns.size / width, rows: rows.size / high };
    });
}"""


def timeline(page, address, question):
    """Open the timeline of a question, and return its canvas once it is drawn."""
    page.goto(f"{address}/detail?{question}&tab=Timeline")
    page.get_by_text("One simulated step").wait_for()
    canvas = page.locator("canvas.lanes")
    canvas.wait_for()
    settled(page)
    return canvas


def window(canvas):
    begin, finish = json.loads(canvas.get_attribute("data-window"))
    return finish - begin


@pytest.mark.parametrize(
    ("question", "busy"),
    [
        (SMALL, ["critical path", "rank 0 compute"]),
        ("model=llama3-8b", ["critical path", "rank 0 compute"]),
        ("model=llama3-70b&gpus=64&framework=megatron-lm", ["critical path", "rank 0 compute", "rank 48 compute"]),
    ],
)
def test_the_lanes_of_a_timeline_can_be_seen(page, address, question, busy):
    """What is measured is what is painted: the height of a lane, and how much of it has spans."""
    lanes = {lane["label"]: lane for lane in timeline(page, address, question).evaluate(PAINTED)}

    assert set(busy) <= set(lanes)
    assert all(lane["height"] >= 8 for lane in lanes.values())
    for name in busy:
        assert lanes[name]["height"] >= 20
        assert lanes[name]["columns"] > 0.8
        assert lanes[name]["rows"] > 0.9
    strips = page.locator("canvas.strips").bounding_box()
    assert strips["height"] >= 100


def test_a_timeline_is_zoomed_by_dragging_and_says_what_a_span_is(page, address):
    canvas = timeline(page, address, SMALL)
    box = canvas.bounding_box()
    whole = window(canvas)
    page.mouse.move(box["x"] + 400, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 440, box["y"] + 40)
    page.mouse.up()
    near = window(canvas)
    assert near == pytest.approx(whole * 40 / (box["width"] - 136), rel=0.1)

    page.mouse.click(box["x"] + 500, box["y"] + 42)
    detail = page.locator(".detail")
    assert re.search(r"rank 0 compute · \w+ · [\d.]+ (s|ms|µs)", detail.inner_text())
    canvas.press("Shift+ArrowRight")
    assert "of the step" in detail.inner_text()
    canvas.press("0")
    assert window(canvas) == pytest.approx(whole)
    page.get_by_role("button", name="Zoom in").click()
    assert window(canvas) == pytest.approx(whole / 2)


def test_several_nodes_are_drawn_as_a_fabric(page, address):
    timeline(page, address, "model=llama3-70b&gpus=64&framework=megatron-lm")
    fabric = page.locator("[data-testid='stVegaLiteChart']").filter(has_text="nodes").last
    marks = fabric.locator("svg .mark-symbol.role-mark path")
    boxes = [marks.nth(i).bounding_box() for i in range(marks.count())]

    assert boxes
    assert all(box["width"] >= 8 and box["height"] >= 8 for box in boxes)
