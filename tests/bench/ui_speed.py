"""How long a person waits for the explorer: wall clock in a browser, processor time of the server, load of the machine.

    python -m tests.bench.ui_speed

Needs what `tests.bench.ui_screenshots` needs. Processor time tells what the wait would be on a machine that does nothing
else; it includes what the server does for the browser.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.ui.server import children, serving

PATIENT = 120_000
CHART = "[data-testid='stVegaLiteChart'] canvas, [data-testid='stVegaLiteChart'] svg"


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def timed(what: str, pid: int) -> Iterator[None]:
    wall, cpu = time.monotonic(), cpu_s(pid)
    yield
    load = os.getloadavg()[0]
    print(f"| {what} | {time.monotonic() - wall:.1f} | {cpu_s(pid) - cpu:.1f} | {load:.1f} |", flush=True)


def changed(page: Page, act: Callable[[], None], *, needle: str) -> None:
    """Do something and wait until the page says `needle` in place of what it said."""
    page.evaluate("document.querySelectorAll('[data-testid=stMetricValue]').forEach(m => m.dataset.old = m.innerText)")
    before = page.locator("[data-testid='stMetricValue']").first.inner_text()
    act()
    page.wait_for_function(
        """([before, needle]) => {
            const text = document.querySelector('[data-testid=stMain]').innerText;
            const first = document.querySelector('[data-testid=stMetricValue]');
            return (needle && text.includes(needle)) || (first && first.innerText !== before && !text.includes('Searching'));
        }""",
        arg=[before, needle],
        timeout=PATIENT,
    )


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    print("| wait | wall s | server processor s | load |\n|---|--:|--:|--:|")
    with serving() as (address, process), sync_playwright() as play:
        pid = children(process.pid)[0]
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def opened() -> Page:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(PATIENT)
            return page

        for what in ("first page usable, server just started", "first page usable, again"):
            with timed(what, pid):
                page = opened()
                page.goto(address)
                page.locator("[data-testid='stMetricValue']").first.wait_for()
                page.locator(CHART).first.wait_for(state="attached")
                page.close()
        page = opened()
        page.goto(f"{address}/plans?model=llama3-8b&gpus=512&batch=1024")
        page.locator("[data-testid='stMetricValue']").first.wait_for()
        field = page.get_by_label("Global batch", exact=True)
        for batch, needle, what in (("2048", "Meanwhile", "first answer"), ("4096", "", "searched answer")):
            with timed(f"batch changed, 512 GPUs, Llama-3 8B: {what}", pid):
                changed(page, lambda b=batch: (field.fill(b), field.press("Enter")), needle=needle)
            page.locator("text=Searching all legal plans").wait_for(state="hidden")
            page.locator("[data-testid='stMetricValue']").first.wait_for()
        box = page.get_by_role("combobox", name="Model", exact=True)
        for model, needle, what in (("mistral-7b", "Meanwhile", "first answer"), ("llama2-7b", "", "searched answer")):

            def choose(name: str = model) -> None:
                box.click()
                box.fill(name)
                page.get_by_role("option", name=name, exact=True).click()

            with timed(f"model changed, 512 GPUs, to {model}: {what}", pid):
                changed(page, choose, needle=needle)
            page.locator("text=Searching all legal plans").wait_for(state="hidden")
            page.locator("[data-testid='stMetricValue']").first.wait_for()
        browser.close()


if __name__ == "__main__":
    main()
