"""A browser and an explorer for all tests of this folder: `pytest -m browser tests/ui/browser`, with playwright and a
Chromium of the system (`apt-get install chromium`).
"""

from __future__ import annotations

import re
import shutil

import pytest

from tests.ui.browser.pages import PATIENT
from tests.ui.server import running

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser():
    play = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with play.sync_playwright() as running_play:
        opened = running_play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def address(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with running({"XDG_CACHE_HOME": str(home / "cache"), "XDG_DATA_HOME": str(home / "data")}) as found:
        yield found


@pytest.fixture
def opened(browser):
    """Return a function that makes a page; afterwards none of them had an error or asked another machine."""
    contexts, faults, asked = [], [], []

    def fresh(width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(PATIENT)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        return page

    yield fresh
    for context in contexts:
        context.close()
    assert faults == []
    assert {url for url in asked if not re.match(r"(http://127\.0\.0\.1:|data:|blob:)", url)} == set()


@pytest.fixture
def page(opened):
    return opened()
