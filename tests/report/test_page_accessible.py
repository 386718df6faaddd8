"""Every kind of page in both themes and on a phone, looked at by axe-core: nothing serious. Needs
its axe.min.js: `npm install axe-core` beside this checkout, or WHENCE_AXE=FILE.
"""

import os
import shutil
from pathlib import Path

import by_hand_page as by_hand
import msgspec
import pytest

from whence.report.html import page_html

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="drives the page: pip install playwright"
)
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
AXE = Path(
    os.environ.get("WHENCE_AXE")
    or Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
)
if CHROMIUM is None:
    pytest.skip("no chromium on this machine: apt-get install chromium", allow_module_level=True)
if not AXE.is_file():
    pytest.skip("no axe-core: npm install axe-core, or WHENCE_AXE=FILE", allow_module_level=True)

RUN = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
    .filter(v => ["serious", "critical"].includes(v.impact))
    .map(v => [v.id, v.nodes.slice(0, 3).map(n => n.html)])"""


def pages():
    made = by_hand.page()
    return {
        "fault": by_hand.with_places(made),
        "structures": by_hand.with_unpaired(made),
        "ranks": by_hand.page(ranks=2, steps=3),
        "noise": by_hand.same(made, "noise"),
        "equal": by_hand.same(made, "identical"),
        "undecided": by_hand.undecided(made),
        "tokens": msgspec.structs.replace(made, vocabulary=((11, " the"), (14, "\n"), (15, "cat"))),
    }


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", pages())
def test_axe_finds_nothing_serious(browser, tmp_path, kind, width, theme):
    file = tmp_path / "report.html"
    file.write_text(page_html(pages()[kind]), encoding="utf-8")
    # The policy of the page lets no script in but its own; here one has to look at it.
    context = browser.new_context(
        viewport={"width": width, "height": 844}, color_scheme=theme, bypass_csp=True
    )
    tab = context.new_page()
    tab.goto(file.as_uri())
    tab.wait_for_selector("html[data-ready]", state="attached")
    tab.evaluate(AXE.read_text(encoding="utf-8"))
    shown = tab.locator("#graph .box").first
    if tab.locator("#graph").count():
        tab.locator("#graph").scroll_into_view_if_needed()
        shown.wait_for()
    found = tab.evaluate(RUN)
    tab.keyboard.press("f")
    found += tab.evaluate(RUN)
    context.close()
    assert found == []
