"""How large a page is and how soon it answers: pages of up to 100,000 pairs in Chromium, on a
processor slowed down as asked.

    python benchmarks/page.py
    python benchmarks/page.py --pairs 10000 --slow 6

Needs playwright and Chromium. Per size: bytes, seconds to make the file, seconds from the start of
loading until the page has answered a key, and milliseconds for a search over all rows.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "report"))

from by_hand_page import page
from playwright.sync_api import sync_playwright

from whence.report.html import page_html
from whence.workflows.page.measure import limited

STEPS = 10


def measured(pairs: int, slow: float, folder: Path) -> tuple[int, float, float, float]:
    """(bytes, seconds to write, seconds until interactive, seconds of a search) of a page of so
    many pairs of calls.
    """
    made = page(layers=max(1, pairs // (10 * STEPS)), steps=STEPS)
    start = time.perf_counter()
    text = page_html(limited(made))
    writing = time.perf_counter() - start
    file = folder / f"{pairs}.html"
    file.write_text(text, encoding="utf-8")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page()
        tab.context.new_cdp_session(tab).send("Emulation.setCPUThrottlingRate", {"rate": slow})
        start = time.perf_counter()
        tab.goto(file.as_uri(), wait_until="commit")
        tab.wait_for_selector("html[data-ready]", state="attached")
        tab.keyboard.press("f")
        tab.wait_for_selector(".drawer h2")
        interactive = time.perf_counter() - start
        search = tab.evaluate(
            "() => { const t = performance.now(); const f = document.getElementById('find'); "
            "f.value = 'o_proj';"
            " f.dispatchEvent(new Event('input')); document.body.offsetHeight; return "
            "performance.now() - t }"
        )
        browser.close()
    return len(text.encode()), writing, interactive, search / 1000


def main() -> None:
    """Print one line per size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pairs",
        type=int,
        action="append",
        help="pairs of calls (repeatable); each has three pairs of tensors",
    )
    parser.add_argument(
        "--slow", type=float, default=4.0, help="how many times slower the processor is made"
    )
    given = parser.parse_args()
    print(
        f"processor {given.slow:g} times slower\n{'pairs':>8} {'MB':>7} {'written':>9} "
        f"{'interactive':>12} {'search':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for pairs in given.pairs or (1_000, 10_000, 100_000):
            size, writing, interactive, search = measured(pairs, given.slow, Path(folder))
            print(
                f"{pairs:>8} {size / 1e6:>7.2f} {writing:>7.2f} s {interactive:>10.2f} s "
                f"{1000 * search:>5.0f} ms"
            )


if __name__ == "__main__":
    main()
