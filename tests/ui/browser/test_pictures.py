"""Pictures that a person opens, clicks and reads: the step in small, the serving front, cost, what a phone sees."""

from __future__ import annotations

import re

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.browser.pages import SMALL, figure, settled

pytestmark = pytest.mark.browser
SERVING = "serving?model=llama3.2-1b&cluster=h200x4&isl=256&osl=32"

# Fields whose value or placeholder is wider than what is seen of it.
CLIPPED = """() => [...document.querySelectorAll("input[type='text'], input[type='number']")].filter(field => {
    const style = getComputedStyle(field), pen = document.createElement("canvas").getContext("2d");
    pen.font = `${style.fontSize} ${style.fontFamily}`;
    const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    return field.clientWidth && pen.measureText(field.value || field.placeholder).width > room + 1;
}).map(field => `${field.ariaLabel}: ${field.value || field.placeholder}`)"""


def test_the_first_page_has_the_step_in_small_which_opens_as_a_whole(page, address):
    page.goto(f"{address}/?{SMALL}")
    page.locator(".st-key-home_timeline svg, [data-testid='stVegaLiteChart']").last.wait_for()
    page.get_by_text("The step waits for:").wait_for()
    page.get_by_text("The whole timeline").click()

    page.wait_for_url(re.compile("detail.*tab=Timeline"))
    page.get_by_text("One simulated step").wait_for()


def test_a_click_on_the_serving_front_chooses_a_deployment(page, address):
    page.goto(f"{address}/{SERVING}")
    marks = page.locator(".st-key-serving_pareto svg .mark-symbol.role-mark").first.locator("path")
    marks.first.wait_for()
    settled(page)
    heading = page.locator("h3").filter(has_text=" clients").last
    before = heading.inner_text()
    labels = [mark.get_attribute("aria-label") or "" for mark in marks.all()]
    boxes = [mark.bounding_box() for mark in marks.all()]
    at = [(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) for box in boxes]
    apart = [min((max(abs(x - u), abs(y - v)) for u, v in at if (u, v) != (x, y)), default=0.0) for x, y in at]
    alone = [i for i, place in enumerate(at) if at.count(place) == 1 and before not in labels[i]]
    other = max(alone, key=lambda i: apart[i])  # a click near two marks is one on the upper
    marks.nth(other).click(force=True)
    page.wait_for_function(
        "before => ![...document.querySelectorAll('h3')].some(node => node.innerText === before)", arg=before
    )

    assert re.search(r"deployment: ([^:]+):", labels[other])[1] == heading.inner_text()


def test_the_price_of_a_gpu_stays_in_the_link_and_gives_cost_against_days(page, address):
    page.goto(f"{address}/curves?{SMALL}&price=2.5")
    assert figure(page, "Cost")
    page.reload()
    assert figure(page, "Cost")
    assert "price=2.5" in page.url
    page.get_by_role("heading", name="A whole run: cost against days").wait_for()
    picture = page.locator("[data-testid='stVegaLiteChart']").last
    picture.wait_for()
    assert picture.bounding_box()["width"] >= 300
    assert page.get_by_text("cannot be used").count() == 0


def test_a_phone_sees_the_answer_of_serving_after_four_fields(opened, address):
    page = opened(390)
    page.goto(f"{address}/{SERVING}")
    answer = page.locator("h4").filter(has_text="Serve ").first
    answer.wait_for()
    settled(page)
    top = answer.bounding_box()["y"]
    fields = [field.bounding_box() for field in page.locator(".stMain input").all()]

    assert sum(box is not None and box["height"] > 0 and box["y"] < top for box in fields) <= 4


@pytest.mark.parametrize("width", [1024, 1440])
def test_no_field_is_clipped(opened, address, width):
    page = opened(width)
    for name in (f"?{SMALL.replace('batch=8', 'batch=1024')}", "", SERVING, "tuning", f"run?{SMALL}"):
        page.goto(f"{address}/{name}")
        settled(page)
        assert page.evaluate(CLIPPED) == [], name
