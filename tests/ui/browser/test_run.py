"""A plan is run from its page: what the machine lacks is known before, its steps are drawn while it runs and kept."""

from __future__ import annotations

import re

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.browser.pages import goto, settled

pytestmark = pytest.mark.browser
TINY = "model=tiny-llama&cluster=h200x4&gpus=2&batch=4&seq=256"


def test_a_run_is_followed_step_by_step_and_stands_with_the_others(page, address):
    """On the CPU, with two processes: loss, step time and memory of each step; then the run among all of this
    machine, alone in its group.
    """
    pytest.importorskip("torch", reason="torch is not installed")
    page.goto(f"{address}/run?{TINY}")
    page.get_by_role("heading", name=re.compile("Run #1")).wait_for()
    page.get_by_text("This machine has no GPU").wait_for()  # before anything is clicked
    page.get_by_role("button", name="cpu", exact=True).or_(page.get_by_role("radio", name="cpu")).first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    curves = page.locator("[data-testid='stVegaLiteChart']")
    page.get_by_role("button", name="Stop").wait_for()
    page.wait_for_function("() => document.querySelectorAll(\"[data-testid='stVegaLiteChart']\").length >= 3")
    titles = " ".join(curves.nth(i).inner_text() + (curves.nth(i).text_content() or "") for i in range(curves.count()))
    assert all(word in titles for word in ("loss", "step time", "memory"))
    page.get_by_role("heading", name="Its steps").wait_for()

    goto(page, "Measured")
    settled(page)
    page.get_by_label("In groups by").click()
    page.get_by_role("option", name="machine").click()
    page.locator("canvas td").filter(has_text="2 x cpu").first.wait_for(state="attached")
    page.get_by_label("Model").last.click()
    page.get_by_role("option", name="tiny-llama").last.click()
    settled(page)
    assert page.get_by_text("No run is left").count() == 0
