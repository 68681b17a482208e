"""The ways through the explorer in a browser: from a question to a plan, links, Back, what is chosen where."""

from __future__ import annotations

import json
import re
import time

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.browser.pages import SMALL, choose, figure, goto, settled
from tests.ui.conftest import ROOT

pytestmark = pytest.mark.browser
TOPO = ROOT / "tests" / "data" / "topo" / "52_stas_h100_8gpu_52c.txt"
MEASURED = ROOT / "examples" / "clusters" / "h200x4_measured" / "cluster.json"


def test_the_main_path(page, address, tmp_path):
    """Upload a machine, ask for plans on it, change one, take it along, and follow the link to it."""
    began = time.monotonic()
    page.goto(f"{address}/cluster")
    assert figure(page, "GPUs") == "8"
    page.locator("[data-testid='stVegaLiteChart'] canvas, [data-testid='stVegaLiteChart'] svg").first.wait_for()
    print(f"first page usable after {time.monotonic() - began:.1f} s")

    page.locator("input[type='file']").set_input_files(TOPO)
    page.wait_for_url(re.compile("cluster=52_stas"))
    choose(page, "GPU model", "h100-sxm")
    choose(page, "Model", "llama3.2-3b")
    goto(page, "Plans")
    step = figure(page, "Best step")
    assert step.endswith(" s")
    assert "model=llama3.2-3b" in page.url
    assert "52_stas" in page.url

    goto(page, "Plan detail")
    page.get_by_role("tab", name="Edit").click()
    field = page.get_by_label("Tensor parallel (TP)", exact=True)
    field.fill("2")
    field.press("Enter")
    page.locator("[data-testid='stMetricDelta']").first.wait_for()
    assert "tab=Edit" in page.url

    goto(page, "Exports")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download plan.json").click()
    saved = tmp_path / "plan.json"
    waiting.value.save_as(saved)
    document = json.loads(saved.read_text())
    assert document["model"]["name"] == "llama3.2-3b"

    link = page.url.replace("/exports", "/plans")
    other = page.context.new_page()
    other.goto(link)
    assert figure(other, "Best step") == step
    other.close()


def test_a_deep_link_opens_a_tab_of_a_plan(page, address):
    missing = []
    page.on("response", lambda answer: missing.append(answer.url) if answer.status >= 400 else None)
    page.goto(f"{address}/detail?{SMALL}&tab=Step")
    page.get_by_text("From the GPU's peak to this step").wait_for()

    assert page.get_by_role("tab", name="Step").get_attribute("aria-selected") == "true"
    assert missing == []


def ticked(page):
    """Return the places of the rows that have a tick, as a screen reader gets them."""
    rows = page.locator(".st-key-home_plans table tr[aria-selected='true']")
    return [int(row.get_attribute("aria-rowindex")) - 1 for row in rows.all()]


def test_marks_of_a_chart_and_rows_of_the_table_are_the_same_plans(page, address):
    """A clicked mark ticks its row; ticks choose the plan or the two that are compared, and the chart rings them."""
    page.goto(f"{address}/?{SMALL}")
    chart = page.locator(".st-key-home_ranges svg")
    rings = chart.locator(".mark-symbol.role-mark").first.locator("path")
    marks = chart.locator(".mark-symbol.role-mark").last.locator("path")
    marks.first.wait_for()
    settled(page)

    def tick(place):
        canvas = page.locator(".st-key-home_plans canvas").first
        canvas.scroll_into_view_if_needed()
        table = canvas.bounding_box()
        page.mouse.click(table["x"] + 17, table["y"] + (place + 0.5) * table["height"] / (marks.count() + 1))
        settled(page)

    assert ticked(page) == []
    chips = re.search(r"plan: ([^;]+)", marks.nth(2).get_attribute("aria-label"))[1]
    marks.nth(2).click()
    page.get_by_role("heading", name=f"#3 {chips}").wait_for()
    settled(page)
    assert "plan=" in page.url
    assert ticked(page) == [3]
    # The tick has run its part of the page alone; the links to other pages lead to the same plan.
    links = page.locator("[data-testid='stSidebar'] [data-testid='stPageLink'] a")
    assert all("plan=" in link.get_attribute("href") for link in links.all())

    tick(5)
    page.get_by_role("heading", name="#3 compared with #5").wait_for()
    assert rings.count() == 2
    tick(3)
    page.get_by_role("heading", name="#5 ").wait_for()
    marks.nth(2).click()  # the same mark as before is another choice again
    page.get_by_role("heading", name=f"#3 {chips}").wait_for()
    settled(page)
    assert ticked(page) == [3]


def test_back_undoes_a_change(page, address):
    page.goto(f"{address}/cluster?gpus=4")
    assert figure(page, "GPUs") == "4"
    choose(page, "Cluster", "h200x4")
    page.wait_for_url(re.compile("cluster=h200x4"))
    field = page.get_by_label("Global batch", exact=True)
    field.fill("64")
    field.press("Enter")
    page.wait_for_url(re.compile("batch=64"))

    page.go_back()
    page.wait_for_function("() => document.querySelector(\"input[aria-label='Global batch']\").value === ''")
    assert "cluster=h200x4" in page.url
    page.go_back()
    page.wait_for_function("() => document.body.innerText.includes('dgx-h100')")
    assert "cluster=" not in page.url
    page.go_forward()
    page.wait_for_function("() => document.body.innerText.includes('h200x4: ')")


def test_two_changes_right_after_each_other_are_both_kept(page, address):
    """Whatever arrives meanwhile: the URL of the first, the answer to it, or the search for the one before."""
    page.goto(f"{address}/plans?{SMALL}")
    page.locator("[data-testid='stMetric']").first.wait_for()
    for change in range(1, 6):
        asked = {"Global batch": str(8 + 8 * change), "Sequence": str(1024 * (1 + change))}
        for label, value in asked.items():
            field = page.get_by_label(label, exact=True)
            field.fill(value)
            field.press("Enter")
        page.wait_for_url(re.compile(f"batch={asked['Global batch']}&seq={asked['Sequence']}$"))
        page.wait_for_timeout(1000)
        assert {label: page.get_by_label(label, exact=True).input_value() for label in asked} == asked
    settled(page)
    assert page.get_by_text("is not among the plans").count() == 0


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ("cluster=rig.txt+(0123abcd)", "This link names a cluster that is not here"),
        ("model=my-model.json+(0123abcd)", "This link names a model that is not here"),
        ("gpus=many", "This link's number of GPUs cannot be used"),
    ],
)
def test_a_link_to_what_is_not_here_says_so_and_stays(page, address, words, reported):
    page.goto(f"{address}/plans?{words}&batch=16")
    page.get_by_text(reported).wait_for()
    settled(page)

    assert page.url.endswith(f"plans?{words}&batch=16")
    page.get_by_role("button", name="Ask without it").click()
    assert figure(page, "Best step").endswith(" s")
    assert "batch=16" in page.url


def test_a_measured_machine_shows_the_measured_range(page, address):
    page.goto(f"{address}/cluster")
    page.locator("input[type='file']").set_input_files(MEASURED)
    page.wait_for_url(re.compile("cluster=cluster.json"))
    page.wait_for_function("() => document.body.innerText.includes('377 to 380 GB/s')")

    assert figure(page, "NVLink") == "377 to 380 GB/s"
    assert figure(page, "Health") in {"healthy", "1 finding", "2 findings"}
