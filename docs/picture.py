"""Take the picture of the report page that the README shows.

    python docs/picture.py docs/images/page.png

The page is that of a bug of released software: `FINDING` of examples/findings, whose releases are
installed into a temporary folder (see there what its environment needs). Needs playwright,
pillow, and a Chromium on the search path.
"""

import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1280, 740
COLOURS = 256
LARGEST = 200_000
"""Bytes: a picture that every clone carries along stays small."""
FINDINGS = Path(__file__).parents[1] / "examples" / "findings"
FINDING = "roformer"


def chromium() -> str:
    """The browser on the search path. Ends the program where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    return found or sys.exit("no chromium on the search path: apt-get install chromium")


def report(folder: Path) -> Path:
    """Type the commands of the finding, and write the page. Paths are relative: the page shows
    them. Ends the program where the answer is another one.
    """
    findings = runpy.run_path(str(FINDINGS / "reproduce.py"))["findings"]()
    _, commands, answer = findings[FINDING]
    shutil.copy(FINDINGS / f"{FINDING}.py", folder)
    lines = f"{commands}whence report -o report.html\n"
    done = subprocess.run(
        ["bash", "-c", lines], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    if answer[0] not in done.stdout:
        sys.exit(f"{FINDING} is not reproduced:\n{done.stdout}")
    return folder / "report.html"


def main(picture: Path) -> None:
    picture.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(report(Path(folder)).as_uri())
        tab.wait_for_timeout(1000)
        tab.screenshot(path=picture)
        browser.close()
    # text and flat areas: a palette halves the file and shows the same
    Image.open(picture).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(
        picture, optimize=True
    )
    size = picture.stat().st_size
    if size > LARGEST:
        sys.exit(f"{picture} has {size} bytes, more than {LARGEST}")
    print(f"{picture}: {size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
