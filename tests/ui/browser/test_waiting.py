"""What a person sees who waits for an answer, alone and alongside others."""

from __future__ import annotations

import html
import re
import time

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.browser.pages import SMALL, choose, figure, settled, stop

pytestmark = pytest.mark.browser
LONG = "model=llama3-405b&gpus=16384&batch=16384&framework=megatron-lm"


def test_the_answer_is_there_before_the_page_has_run(opened, address):
    """It lies over the page until that has drawn the same."""
    page = opened()
    page.goto(address)
    drawn = page.locator(".st-key-answer h4")
    drawn.wait_for()
    settled(page)  # this server has answered its first question now, if it had not before

    first = re.search(r'id="at_once".*<h4>(.*)</h4>', page.request.get(address).text())[1]
    page.goto(address)
    drawn.wait_for()
    page.locator("#at_once").wait_for(state="detached")
    assert html.unescape(first) == drawn.inner_text()


def test_a_short_question_beside_a_long_search(opened, address):
    """The ratio of the times is printed; asserted is that the short one is answered, and that Stop answers."""

    def asked(batch):
        page = opened()
        began = time.monotonic()
        page.goto(f"{address}/plans?model=llama3-8b&batch={batch}")
        figure(page, "Best step")
        return time.monotonic() - began

    asked(8)
    alone = asked(72)
    long = opened()
    long.goto(f"{address}/plans?{LONG}")
    long.get_by_text("Searching all legal plans").wait_for()
    time.sleep(4)
    alongside = asked(80)
    print(
        f"a question on 8 GPUs: {alone:.1f} s alone, {alongside:.1f} s alongside a search on 16,384: "
        f"{alongside / alone:.1f} times"
    )

    began = time.monotonic()
    stop(long)
    long.get_by_role("button", name="Start again").wait_for()
    print(f"stopped after {time.monotonic() - began:.1f} s")


def test_the_last_answer_stays_dimmed_while_the_next_is_searched(page, address):
    page.goto(f"{address}/plans?{SMALL}")
    step = figure(page, "Best step")
    page.goto(f"{address}/plans?{SMALL}")
    figure(page, "Best step")
    for label, option in (("Cluster", "dgx-h100"), ("Framework", "megatron-lm"), ("Model", "llama3-405b")):
        choose(page, label, option)
    for label, word in (("Global batch", "batch"), ("GPUs", "gpus")):
        field = page.get_by_label(label, exact=True)
        field.fill("16384")
        field.press("Enter")
        page.wait_for_url(re.compile(f"{word}=16384"))
    page.get_by_text("Searching all legal plans").wait_for()
    last = page.locator(".st-key-last_answer")
    last.wait_for()

    assert float(last.evaluate("node => getComputedStyle(node).opacity")) < 0.6
    assert step
    stop(page)
    page.get_by_role("button", name="Start again").wait_for()


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


def test_two_people_ask_at_once_and_each_gets_their_own_answer(opened, address):
    pages = {model: opened() for model in ("llama3.2-1b", "llama3.2-3b")}
    for model, page in pages.items():
        page.goto(f"{address}/plans?model={model}&cluster=h200x4&batch=24")
    steps = {model: figure(page, "Best step") for model, page in pages.items()}

    assert steps["llama3.2-1b"] != steps["llama3.2-3b"]
    for model, page in pages.items():
        field = page.get_by_label("Global batch", exact=True)
        field.fill("40")
        field.press("Enter")
        page.wait_for_url(re.compile("batch=40"))
        assert f"model={model}" in page.url
    settled(pages["llama3.2-1b"])
    settled(pages["llama3.2-3b"])
    after = {model: figure(page, "Best step") for model, page in pages.items()}
    assert all(after[model] != steps[model] for model in steps)
    assert after["llama3.2-1b"] != after["llama3.2-3b"]
