"""Opens pages in a real browser, where there is one."""

import os
import shutil
from typing import NamedTuple

import pytest

NAMES = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"


class Seen(NamedTuple):
    """What a browser has found on a page."""

    complaints: list
    """Errors and warnings of the console, errors of scripts, and requests for anything but the page."""
    figures: dict
    """For each section that has figures: the size of each, and how many colours it shows."""
    overflow: int
    """Pixels by which the page is wider than the window."""
    zoomed: tuple
    """The range of the timeline before and after a part of it was dragged over; None where there is none."""
    alarmed: bool
    """Whether a script has run that a name smuggled in."""


def path():
    """The browser that is installed; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, (os.environ.get("BROWSER_PATH", ""), *NAMES))), None)
    if found is None:
        pytest.skip("there is no Chromium; on Debian: apt-get install chromium-headless-shell")
    return found


COLOURS = """() => Object.fromEntries([...document.querySelectorAll("section")].map(section => {
    const canvases = [];
    const search = root => root.querySelectorAll("*").forEach(one => {
        if (one.tagName === "CANVAS") canvases.push(one);
        if (one.shadowRoot) search(one.shadowRoot);
    });
    search(section);
    return [section.id, canvases.filter(one => one.width > 50).map(one => {
        const pixels = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
        const colours = new Set();
        for (let i = 0; i < pixels.length; i += 4)
            if (pixels[i + 3] > 200) colours.add(pixels[i] << 16 | pixels[i + 1] << 8 | pixels[i + 2]);
        return [one.width, one.height, colours.size];
    })];
}).filter(([id, found]) => found.length))"""
RANGE = """() => {
    const found = Bokeh.documents[0].roots().map(root => root.x_range)
        .find(range => range && range.bounds instanceof Array);
    return found ? [found.start, found.end] : null;
}"""


def look(pages, widths, picture=None):
    """Open each page at each width; what is seen there, by page and width. `picture`: a folder for
    pictures."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path())
        try:
            return {(page, width): _seen(browser, page, width, picture) for page in pages for width in widths}
        finally:
            browser.close()


def _seen(browser, place, width, picture):
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints, alarms = [], []
    page.on("console", lambda said: said.type in ("error", "warning") and complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (alarms.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda one: one.url.startswith(("file:", "data:")) or complaints.append(one.url))
    page.goto(f"file://{place}")
    page.wait_for_function("() => window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle")
    page.wait_for_timeout(50)  # for the browser to paint
    figures = page.evaluate(COLOURS)
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    zoomed = page.evaluate(RANGE), None
    box = page.locator("#timeline .figure")
    if zoomed[0] and box.count():
        box.scroll_into_view_if_needed()
        at = box.bounding_box()
        y = at["y"] + at["height"] / 2
        page.mouse.move(at["x"] + 0.5 * at["width"], y)
        page.mouse.down()
        page.mouse.move(at["x"] + 0.8 * at["width"], y, steps=5)
        page.mouse.up()
        page.wait_for_timeout(50)
        zoomed = zoomed[0], page.evaluate(RANGE)
    alarmed = bool(alarms) or page.evaluate("'alarmed' in window")
    if picture is not None:
        page.screenshot(path=f"{picture}/{os.path.basename(place)}-{width}.png", full_page=True)
    page.close()
    return Seen(complaints, figures, overflow, zoomed, alarmed)
