"""The main path in a real browser. Opt in: `pytest -m browser tests/ui` with playwright and a Chromium of the system."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT
from tests.ui.server import running

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TOPO = ROOT / "tests" / "data" / "topo" / "52_stas_h100_8gpu_52c.txt"
PATIENT = 120_000  # milliseconds: a machine that does other things too


@pytest.fixture(scope="module")
def browser():
    play = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with play.sync_playwright() as running_play:
        opened = running_play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with running({"XDG_CACHE_HOME": str(home / "cache"), "XDG_DATA_HOME": str(home / "data")}) as found:
        yield found


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENT)
    opened = context.new_page()
    elsewhere = []
    opened.on("request", lambda request: elsewhere.append(request.url))
    faults = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    yield opened
    context.close()
    assert faults == []
    assert {url for url in elsewhere if not re.match(r"(http://127\.0\.0\.1:|data:|blob:)", url)} == set()


def figure(page, label):
    """Return the value under a label once the page shows it."""
    found = page.locator("[data-testid='stMetric']").filter(has_text=label).first
    found.wait_for()
    return found.locator("[data-testid='stMetricValue']").inner_text()


def goto(page, name):
    page.locator("[data-testid='stSidebarNav']").get_by_text(name, exact=True).click()


def choose(page, label, option):
    box = page.get_by_role("combobox", name=label, exact=True)
    box.click()
    box.fill(option)
    page.get_by_role("option", name=option, exact=True).click()


def test_the_main_path(page, address, tmp_path):
    """Upload a machine, ask for plans on it, change one, take it along, and follow the link to it."""
    began = time.monotonic()
    page.goto(address)
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
    field = page.get_by_label("Tensor", exact=True)
    field.fill("2")
    field.press("Enter")
    page.locator("[data-testid='stMetricDelta']").first.wait_for()
    assert "tab=Change" in page.url

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
    page.goto(f"{address}/detail?model=llama3.2-1b&cluster=h200x4&batch=8&tab=Step")
    page.get_by_text("From the peak down to this step").wait_for()

    assert page.get_by_role("tab", name="Step").get_attribute("aria-selected") == "true"


def test_the_trace_is_a_file_that_perfetto_reads(page, address, tmp_path):
    page.goto(f"{address}/detail?model=llama3.2-1b&cluster=h200x4&batch=8&tab=Timeline")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Trace for Perfetto").click()
    saved = tmp_path / "trace.json"
    waiting.value.save_as(saved)

    events = json.loads(saved.read_text())["traceEvents"]
    assert {"X", "M"} <= {event["ph"] for event in events}


def test_a_change_of_the_batch_is_answered(page, address):
    """512 GPUs: how long a person waits is printed; no test asserts time."""
    page.goto(f"{address}/plans?model=llama3-8b&gpus=512&batch=1024")
    before = figure(page, "Best step")
    field = page.get_by_label("Global batch", exact=True)
    field.fill("2048")
    began = time.monotonic()
    field.press("Enter")
    page.wait_for_function(
        """before => { const m = document.querySelector("[data-testid='stMetricValue']");
                       return m && m.innerText !== before && !document.body.innerText.includes('Searching all') }""",
        arg=before,
    )
    print(f"a change of the batch on 512 GPUs: {time.monotonic() - began:.1f} s")

    assert figure(page, "Best step") != before


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_follow_the_browser(browser, address, scheme):
    from planner.pictures.palette import DARK, LIGHT

    page = browser.new_page(color_scheme=scheme)
    page.goto(address)
    page.locator("[data-testid='stMetric']").first.wait_for(timeout=PATIENT)
    shown = page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
    page.close()

    wanted = (DARK if scheme == "dark" else LIGHT).page
    assert shown == f"rgb({', '.join(str(int(wanted[i : i + 2], 16)) for i in (1, 3, 5))})"
