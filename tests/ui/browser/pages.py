"""What tests in a browser ask for, and how they wait for it."""

from __future__ import annotations

PATIENT = 180_000  # milliseconds: a machine that does other things too
SMALL = "model=llama3.2-1b&cluster=h200x4&batch=8"


def figure(page, label):
    """Return the value under a label once the page shows the final answer."""
    found = page.locator("[data-testid='stMetric']").filter(has_text=label).first
    found.wait_for()
    page.wait_for_function("() => !document.body.innerText.includes('Preliminary, by the analytical model')")
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
