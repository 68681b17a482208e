"""Pictures of every page of the explorer, in both themes, for examples/ui/.

    python -m tests.bench.ui_screenshots OUT_FOLDER [NAME ...]
    python -m tests.bench.ui_screenshots OUT_FOLDER path

Needs `pip install 'meshwright[ui]' playwright pillow` and a Chromium of the system (`apt-get install chromium`). Pages
are 1280 pixels wide and as high as what is on them, two 1920 and one 360. Written as palette PNGs, for their size.
"""

from __future__ import annotations

import argparse
import io
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.ui.server import running

Q = "model=llama3-70b&gpus=64&batch=256&cluster=dgx-h100"
PIPELINE = "model=llama3-70b&cluster=aws-p4de&gpus=64&batch=128&framework=megatron-lm"
# name, address, width
SHOTS = (
    ("home", f"?{Q}", 1280),
    ("home_phone", f"?{Q}", 360),
    ("cluster", "cluster?cluster=dgx-h100&gpus=64", 1280),
    ("cluster_measured", "cluster?cluster=@h200x4_measured/cluster.json", 1280),
    ("cluster_rack", "cluster?cluster=gb200-nvl72", 1280),
    ("cluster_wide", "cluster?cluster=dgx-1v", 1920),
    ("model", f"model?{Q.replace('llama3-70b', 'deepseek-v3')}", 1280),
    ("plans", f"plans?{Q}", 1280),
    ("plans_wide", f"plans?{Q}", 1920),
    ("plans_infeasible", "plans?model=llama3-405b&cluster=dgx-h100", 1280),
    ("detail_memory", f"detail?{PIPELINE}", 1280),
    ("detail_step", f"detail?{PIPELINE}&tab=Step", 1280),
    ("detail_placement", f"detail?{PIPELINE}&tab=Placement&axis=pp", 1280),
    ("detail_timeline", f"detail?{PIPELINE}&tab=Timeline", 1280),
    ("detail_sensitivity", f"detail?{PIPELINE}&tab=Sensitivity", 1280),
    ("detail_change", f"detail?{PIPELINE}&tab=Edit", 1280),
    ("curves", f"curves?{Q}", 1280),
    ("compare", f"compare?{Q}", 1280),
    ("compare_questions", f"compare?{Q}&what=questions&b_cluster=dgx-a100", 1280),
    ("serving", "serving?model=llama3-8b&cluster=h200x4", 1280),
    ("tuning", "tuning", 1280),
    ("measured", "measured", 1280),
    ("exports", f"exports?{Q}", 1280),
)
PATH = "model=tiny-llama&cluster=h200x4&gpus=2&seq=256&batch=4"
LARGEST = 250_000  # bytes; beyond it a palette of 256 colours has to do


def main(out: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with running() as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            for name, path, width in SHOTS:
                if names and not any(wanted in f"{name}_{theme}" for wanted in names):
                    continue
                page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
                began = time.monotonic()
                page.goto(f"{address}/{resolved(path)}")
                settled(page)
                took = time.monotonic() - began
                data = picture(page, width)
                (out / f"{name}_{theme}.png").write_bytes(data)
                print(f"{name}_{theme}: {took:.1f} s, {len(data) / 1024:.0f} KB", flush=True)
                page.close()
        if not names or "path" in names:
            page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
            page.set_default_timeout(300_000)
            for name, data in walked(page, address):
                (out / f"path_{name}.png").write_bytes(data)
                print(f"path_{name}: {len(data) / 1024:.0f} KB", flush=True)
        browser.close()


def walked(page: Page, address: str) -> Iterator[tuple[str, bytes]]:
    """Yield the pictures of a person's path: the answer, a changed plan that is kept, its export, and its run on the
    CPU while it runs.
    """
    page.goto(f"{address}/?{PATH}")
    settled(page)
    yield "1_answer", picture(page, 1280)
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{address}/detail?{PATH}&tab=Edit")
    settled(page)
    field = page.get_by_label("Micro batch", exact=False).first
    field.fill("1")
    field.press("Enter")
    page.get_by_role("button", name="Keep this plan").wait_for()
    page.wait_for_timeout(1500)
    page.get_by_role("button", name="Keep this plan").click()
    settled(page)
    yield "2_kept", picture(page, 1280)
    page.locator("[data-testid='stPageLink']").get_by_text("Exports", exact=True).click()
    page.set_viewport_size({"width": 1280, "height": 900})
    settled(page)
    yield "3_export", picture(page, 1280)
    page.set_viewport_size({"width": 1280, "height": 900})
    page.locator("[data-testid='stPageLink']").get_by_text("Run", exact=True).click()
    settled(page)
    page.get_by_text("cpu", exact=True).click()
    steps = page.get_by_label("Steps to measure")
    steps.fill("200")
    steps.press("Tab")
    page.wait_for_timeout(800)
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator("[data-testid='stVegaLiteChart']").first.wait_for()
    page.wait_for_timeout(15_000)  # some steps
    yield "4_run", picture(page, 1280)
    page.locator(".st-key-stop_run button").click()


def resolved(path: str) -> str:
    """Replace `@FILE` in an address by the choice of that example once it is uploaded."""
    if "@" not in path:
        return path
    from urllib.parse import quote_plus

    from ui.question import uploads

    before, _, name = path.partition("@")
    file = Path("examples/clusters") / name
    kept = uploads.store("cluster", file.parent.name + file.suffix, file.read_bytes())
    return before + quote_plus(kept.choice)


def settled(page: Page, timeout_s: float = 600.0) -> None:
    """Wait until the page has drawn itself and nothing runs any more. Raises TimeoutError where something still
    does.
    """
    page.wait_for_selector("h1", timeout=timeout_s * 1e3)
    quiet = 0
    ends = time.monotonic() + timeout_s
    page.wait_for_timeout(1000)  # the first search begins a moment after the heading
    while quiet < 4 and time.monotonic() < ends:
        busy = page.locator(
            "[data-testid='stStatusWidget'], [data-testid='stSkeleton'], button:has-text('Stop')"
        ).count()
        stale = page.locator("[data-stale='true']").count()
        quiet = 0 if busy or stale else quiet + 1
        page.wait_for_timeout(250)
    if quiet < 4:
        raise TimeoutError(f"{page.url} was not ready after {timeout_s:.0f} s")
    page.wait_for_timeout(700)


def picture(page: Page, width: int) -> bytes:
    """Return the whole page: the window grows until nothing has to be scrolled."""
    height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
    page.set_viewport_size({"width": width, "height": max(900, min(4000, int(height) + 8))})
    page.wait_for_timeout(900)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    if len(data.getvalue()) > LARGEST:
        data = io.BytesIO()
        image.quantize(colors=256, dither=Image.Dither.NONE).save(data, "PNG", optimize=True)
    return data.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="only pictures whose names have one of these in them")
    options = parser.parse_args()
    main(options.out, options.names)
