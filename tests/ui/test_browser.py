"""The pages in a real browser. Opt in: `pytest -m browser tests/ui` with playwright and a Chromium of the system."""

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
MEASURED = ROOT / "examples" / "clusters" / "h200x4_measured" / "cluster.json"
PATIENT = 180_000  # milliseconds: a machine that does other things too
SMALL = "model=llama3.2-1b&cluster=h200x4&batch=8"
LONG = "model=deepseek-v3&gpus=65536&batch=65536&framework=megatron-lm"
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


def figure(page, label):
    """Return the value under a label once the page shows the final answer."""
    found = page.locator("[data-testid='stMetric']").filter(has_text=label).first
    found.wait_for()
    page.wait_for_function("() => !document.body.innerText.includes('Preliminary, by the closed form')")
    return found.locator("[data-testid='stMetricValue']").inner_text()


def goto(page, name):
    page.locator("[data-testid='stPageLink']").get_by_text(name, exact=True).click()


def choose(page, label, option):
    box = page.get_by_role("combobox", name=label, exact=True)
    box.click()
    box.fill(option)
    page.get_by_role("option", name=option, exact=True).click()


def settled(page):
    """Wait until the page is drawn and nothing is being worked out."""
    page.locator("h1").first.wait_for()
    page.wait_for_timeout(1000)
    page.wait_for_function(
        """() => !document.querySelector("[data-testid='stStatusWidget']")
                 && !/Searching all|Simulating the/.test(document.body.innerText)"""
    )
    page.wait_for_timeout(500)


def stop(page):
    page.locator(".st-key-stop_search button").click()


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
    field = page.get_by_label("Tensor", exact=True)
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


def test_a_mark_in_a_chart_chooses_its_plan(page, address):
    page.goto(f"{address}/?{SMALL}")
    marks = page.locator(".st-key-home_ranges svg .mark-symbol.role-mark path")
    marks.first.wait_for()
    settled(page)
    third = marks.nth(3)  # the first mark is the ring around the chosen plan
    chips = re.search(r"plan: ([^;]+)", third.get_attribute("aria-label"))[1]
    third.click()
    page.wait_for_url(re.compile("plan="))

    page.get_by_role("heading", name=f"#3 {chips}").wait_for()


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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("cluster=rig.txt+(0123abcd)", "This link names a cluster that is not here"),
        ("model=my-model.json+(0123abcd)", "This link names a model that is not here"),
        ("gpus=many", "This link's number of GPUs cannot be used"),
    ],
)
def test_a_link_to_what_is_not_here_says_so_and_stays(page, address, words, told):
    page.goto(f"{address}/plans?{words}&batch=16")
    page.get_by_text(told).wait_for()
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
    beside = asked(80)
    print(
        f"a question on 8 GPUs: {alone:.1f} s alone, {beside:.1f} s beside a search on 65,536: {beside / alone:.1f} times"
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
    choose(page, "Cluster", "dgx-h100")
    field = page.get_by_label("GPUs", exact=True)
    field.fill("65536")
    field.press("Enter")
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


def test_charts_and_headings_tell_what_they_show(page, address):
    """Every chart has a description, headings go down by one level at most, and the tabs are reached by the keyboard."""
    for name in (f"?{SMALL}", f"plans?{SMALL}", f"detail?{SMALL}&tab=Timeline", f"curves?{SMALL}"):
        page.goto(f"{address}/{name}")
        settled(page)
        page.locator("[data-testid='stVegaLiteChart'] svg").first.wait_for()
        told = page.evaluate(
            """() => [...document.querySelectorAll("[data-testid='stVegaLiteChart']")].map(node =>
                [node.getAttribute("aria-label"), node.querySelector("[aria-label]")?.getAttribute("aria-label")].find(Boolean) || "")"""
        )
        assert told
        assert all(len(text) > 10 for text in told), (name, told)
        levels = page.evaluate(
            "() => [...document.querySelectorAll('.stMain h1,.stMain h2,.stMain h3,.stMain h4,.stMain h5')].map(h => +h.tagName[1])"
        )
        assert levels[0] == 1
    page.goto(f"{address}/detail?{SMALL}&tab=Step")
    settled(page)
    page.get_by_role("tab", name="Step").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile("tab=Placement"))
