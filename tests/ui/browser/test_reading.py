"""Every page in three widths and two themes can be read: contrast, sizes, descriptions, headings, keyboard."""

from __future__ import annotations

import re

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.browser.pages import PATIENT, SMALL, settled

pytestmark = pytest.mark.browser
PAGES = (
    f"?{SMALL}",
    "cluster",
    "model",
    f"plans?{SMALL}",
    *(f"detail?{SMALL}&tab={tab}" for tab in ("Memory", "Step", "Placement", "Timeline", "Sensitivity", "Edit")),
    f"compare?{SMALL}",
    f"compare?{SMALL}&what=questions",
    "check",
    "tuning",
    "serving?model=llama3.2-1b&cluster=h200x4",
    "?model=llama3-405b&cluster=h200x4&framework=megatron-lm&batch=8",
    "plans?gpus=none",
    f"curves?{SMALL}",
    f"run?{SMALL}",
    "measured",
    f"exports?{SMALL}",
)


# Text smaller than 4.5:1 against what is behind it, by the computed colours; text over a picture or faded is left out.
FAINT = """() => {
    const rgb = text => text.match(/[\\d.]+/g).map(Number);
    const over = (top, under) => top.slice(0, 3).map((v, i) => v * (top[3] ?? 1) + under[i] * (1 - (top[3] ?? 1)));
    const light = c => { const l = c.slice(0, 3).map(v => { v /= 255; return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4 });
                         return .2126 * l[0] + .7152 * l[1] + .0722 * l[2] };
    const behind = node => { const stack = []; for (let n = node; n; n = n.parentElement) stack.unshift(n);
        return stack.reduce((c, n) => over(rgb(getComputedStyle(n).backgroundColor), c), [255, 255, 255]) };
    const found = [];
    // A slider's value hangs above the thumb that holds it.
    const away = "svg, canvas, [disabled], [aria-disabled='true'], [data-testid='stSliderThumbValue']";
    for (const node of document.querySelectorAll(".stApp *")) {
        const own = [...node.childNodes].some(c => c.nodeType === 3 && c.textContent.trim());
        const box = node.getBoundingClientRect();
        if (!own || !box.width || !box.height || node.closest(away)) continue;
        const style = getComputedStyle(node);
        if (style.visibility === "hidden") continue;
        const under = behind(node);
        let fade = 1; for (let n = node; n; n = n.parentElement) fade *= Number(getComputedStyle(n).opacity);
        if (fade < 1) continue;
        const top = rgb(style.color);
        const [a, b] = [light(over(top, under)), light(under)].sort((x, y) => x - y);
        const contrast = (b + .05) / (a + .05);
        if (contrast < 4.5) found.push(`${contrast.toFixed(2)} ${node.tagName} ${node.textContent.trim().slice(0, 40)}`);
    }
    return [...new Set(found)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_every_page_fits_and_can_be_read(opened, address, width, scheme):
    """No page is wider than the screen, no chart is empty, no text is fainter than 4.5:1, nothing ends in an error."""
    page = opened(width, scheme)
    for name in PAGES:
        page.goto(f"{address}/{name}")
        settled(page)
        wide = page.evaluate(
            "() => document.querySelector('.stMain').scrollWidth - document.querySelector('.stMain').clientWidth"
        )
        assert wide <= 0, name
        assert page.locator("[data-testid='stException']").count() == 0, name
        assert page.evaluate(FAINT) == [], name
        sizes = page.evaluate(
            """() => [...document.querySelectorAll("[data-testid='stVegaLiteChart'] svg .role-frame > g > path.background")]
                     .map(node => node.getBoundingClientRect()).map(box => [box.width, box.height])"""
        )
        assert all(across >= 90 and down >= 20 for across, down in sizes), (name, sizes)


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


def test_charts_and_headings_tell_what_they_show(page, address):
    """Every chart has a description, headings go down by one level at most, and the tabs are reached by the
    keyboard.
    """
    for name in (f"?{SMALL}", f"plans?{SMALL}", f"detail?{SMALL}&tab=Timeline", f"curves?{SMALL}"):
        page.goto(f"{address}/{name}")
        settled(page)
        page.locator("[data-testid='stVegaLiteChart'] svg").first.wait_for()
        reported = page.evaluate(
            """() => [...document.querySelectorAll("[data-testid='stVegaLiteChart']")].map(node =>
                [node.getAttribute("aria-label"), node.querySelector("[aria-label]")?.getAttribute("aria-label")].find(Boolean) || "")"""
        )
        assert reported
        assert all(len(text) > 10 for text in reported), (name, reported)
        levels = page.evaluate(
            "() => [...document.querySelectorAll('.stMain h1,.stMain h2,.stMain h3,.stMain h4,.stMain h5')].map(h => "
            "+h.tagName[1])"
        )
        assert levels[0] == 1
    page.goto(f"{address}/detail?{SMALL}&tab=Step")
    settled(page)
    page.get_by_role("tab", name="Step").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile("tab=Placement"))
