"""How long a person waits for the explorer, in a headless Chromium, alone and alongside a search on 16,384 GPUs.

    python tests/bench/explorer_times.py --repeat 3 > examples/ui/times.md
    python tests/bench/explorer_times.py --alone

A page is there when the browser shows its answer: the first figure, the table, and nothing that is being worked out.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from tests.ui.server import running

PATIENT_MS = 300_000  # a machine that does other things too
LONG = "plans?model=llama3-405b&gpus=16384&framework=megatron-lm&batch={batch}"
# The figures of the batch that was asked for: the sentence in the page's last lines names it.
FIRST = """batch => document.querySelector("[data-testid='stMetricValue']") && !document.querySelector(".st-key-last_answer")
    && (!batch || document.body.innerText.includes(`global batch ${batch.toLocaleString("en-US")} `))"""
# Plans are simulated: what is still worked out then is what would change the answer.
DONE = f"""batch => !/Preliminary, by the analytical model/.test(document.body.innerText) && ({FIRST})(batch)"""
SEARCHING = "Searching all legal plans"
ROWS = (
    "first page, its answer in words",
    "the same, with figures and pictures",
    "first answer of a new question on 64 GPUs",
    "the same, plans simulated",
    "first answer of a new question on 512 GPUs",
    "that, plans simulated",
    "a slider of What if",
    "a ticked row of the first page",
)


class Explorer:
    """The pages of one explorer, timed. Every question is a new one, so that nothing is answered from memory."""

    def __init__(self, browser: Browser, address: str) -> None:
        self.browser, self.address = browser, address
        self.batch = 512

    def fresh(self) -> Page:
        page = self.browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.set_default_timeout(PATIENT_MS)
        return page

    def timed(self, does: Callable[[], Any]) -> float:
        began = time.monotonic()
        does()
        took = time.monotonic() - began
        print(f"{took:.2f} s", file=sys.stderr, flush=True)
        return took

    def first_page(self) -> tuple[float, float]:
        """Open the first page with the default question; it was answered before, as the server warms up with it."""
        page = self.fresh()

        def opened() -> None:
            page.goto(self.address, wait_until="commit")
            page.locator("#at_once h4, .st-key-answer h4").first.wait_for()

        first = self.timed(opened)
        then = self.timed(lambda: page.wait_for_function(DONE, arg=None, polling=20))
        page.context.close()
        return first, first + then

    def question(self, model: str, gpus: int) -> tuple[float, float]:
        """Change the batch of a question to one that was never asked: by the analytical model, and simulated."""
        page = self.fresh()
        page.goto(f"{self.address}/plans?model={model}&gpus={gpus}&batch={self._another()}")
        page.wait_for_function(DONE, arg=self.batch, polling=20)
        page.get_by_text(SEARCHING).wait_for(state="hidden")
        field = page.get_by_label("Global batch", exact=True)
        field.fill(str(self._another()))

        def asked() -> None:
            field.press("Enter")
            page.wait_for_function(FIRST, arg=self.batch, polling=20)

        first = self.timed(asked)
        then = self.timed(lambda: page.wait_for_function(DONE, arg=self.batch, polling=20))
        page.context.close()
        return first, first + then

    def slider(self) -> float:
        """Move the slider of the network's rate, and wait until the sentence about the changed machine is there."""
        page = self.fresh()
        page.goto(f"{self.address}/curves?model=llama3-8b&gpus=16")
        said = page.get_by_text(re.compile("The machine as it is; move"))
        said.wait_for()
        page.wait_for_timeout(1500)
        thumb = page.get_by_role("slider").first
        thumb.focus()

        def moved() -> None:
            thumb.press("ArrowRight")
            page.get_by_text(re.compile("Fastest then|None of the listed")).first.wait_for()

        took = self.timed(moved)
        page.context.close()
        return took

    def row(self) -> float:
        """Tick the second plan of the first page, and wait until the page shows it."""
        page = self.fresh()
        page.goto(f"{self.address}/?model=llama3-8b&gpus=16")
        page.get_by_role("heading", name=re.compile("#1 ")).wait_for()
        page.get_by_text("The whole timeline").wait_for()
        page.wait_for_timeout(1000)
        box = page.locator("[data-testid='stDataFrame']").first.bounding_box()
        assert box is not None

        def ticked() -> None:
            page.mouse.click(box["x"] + 20, box["y"] + 35 * 2 + 17)  # rows of a table are 35 pixels high
            page.get_by_role("heading", name=re.compile("#2 ")).wait_for()

        took = self.timed(ticked)
        page.context.close()
        return took

    def rows(self) -> list[tuple[tuple[str, ...], Callable[[], tuple[float, ...]]]]:
        """Return what is timed together, by the names of its rows."""
        return [
            (ROWS[:2], self.first_page),
            (ROWS[2:4], lambda: self.question("llama3-70b", 64)),
            (ROWS[4:6], lambda: self.question("llama3-8b", 512)),
            (ROWS[6:7], lambda: (self.slider(),)),
            (ROWS[7:], lambda: (self.row(),)),
        ]

    def _another(self) -> int:
        self.batch += 512
        return self.batch


def processor_seconds() -> list[str]:
    """Return a table of what a search costs until it says something, in a warm process: what a core that does nothing
    else takes, whatever other work this machine has.
    """
    from planner.search.answer import answer
    from planner.search.search import SearchOptions
    from ui.question.state import LISTED, Inputs

    lines = ["", "Processor seconds of a search in a warm worker (`--processor`):", ""]
    lines += ["| question | first answer | plans simulated | what would change it |", "| --- | --- | --- | --- |"]
    asked = (Inputs(), Inputs(model="llama3-70b", gpus=64), Inputs(gpus=512, global_batch=1024))
    for question in (asked[0], *asked):  # the first one warms up
        began, known = time.process_time(), []
        answer(
            question.flags(),
            question.framework,
            SearchOptions(top=LISTED),
            early=lambda _, began=began, known=known: known.append(time.process_time() - began),
        )
        known.append(time.process_time() - began)
        about = f"{question.model} on {question.gpus or 8} GPUs"
        row = f"| {about} | {' | '.join(f'{seconds:.1f}' for seconds in known)} |"
        lines.append(row)
    return [*lines[:5], *lines[6:]]


def measured(explorer: Explorer, repeat: int) -> dict[str, list[float]]:
    """Return the seconds of each row, as often as asked."""
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(repeat):
        for names, does in explorer.rows():
            for name, took in zip(names, does(), strict=True):
                found[name].append(took)
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="nothing alongside a long search")
    parser.add_argument("--processor", action="store_true", help="only the processor seconds of searches")
    asked = parser.parse_args()
    repeat = asked.repeat
    if asked.processor:
        print("\n".join(processor_seconds()))
        return
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as home, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with running({"XDG_CACHE_HOME": f"{home}/cache", "XDG_DATA_HOME": f"{home}/data"}) as address:
            explorer = Explorer(browser, address)
            explorer.first_page()
            load = os.getloadavg()[0]
            alone = measured(explorer, repeat)
            alongside: dict[str, list[float]] = {name: [] for name in ROWS}
            for turn in range(0 if asked.alone else repeat):
                for number, (names, does) in enumerate(explorer.rows()):
                    page = explorer.fresh()  # a long search of its own for each, which must not end before
                    page.goto(f"{address}/{LONG.format(batch=2048 + 512 * (len(ROWS) * turn + number))}")
                    page.get_by_text(SEARCHING).wait_for()
                    for name, took in zip(names, does(), strict=True):
                        running_still = page.get_by_text(SEARCHING).count() > 0
                        alongside[name] += [took] if running_still else []
                    page.context.close()
        browser.close()
    print(report(alone, alongside, load))


def report(alone: dict[str, list[float]], alongside: dict[str, list[float]], load: float) -> str:
    """Return the table in Markdown."""
    machine = f"{psutil.cpu_count()} cores ({platform.machine()}), headless Chromium on the same machine"
    meanwhile = f"other work on it meanwhile: a load of {load:.1f} at the start"
    about = f"{time.strftime('%Y-%m-%d')}, {machine}; {meanwhile}. Seconds, median (longest)."
    lines = [
        "# How long a person waits for the explorer",
        "",
        about,
        "`python tests/bench/explorer_times.py`",
        "",
        "| | alone | alongside a search on 16,384 GPUs | times as long |",
        "| --- | --- | --- | --- |",
    ]
    for name in ROWS:
        one, two = alone[name], alongside[name]
        ratio = f"{statistics.median(two) / statistics.median(one):.1f}" if two else "-"
        lines.append(f"| {name} | {_words(one)} | {_words(two)} | {ratio} |")
    return "\n".join(lines)


def _words(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({max(seconds):.2f})" if seconds else "-"


if __name__ == "__main__":
    main()
