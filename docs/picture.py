"""Take the picture of the report page that the README shows.

    python docs/picture.py docs/images/page.png

The page is that of a small transformer in bfloat16 with a wrong epsilon in one layer. Needs torch,
playwright, and a Chromium on the search path.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1280, 960
LARGEST = 200_000
"""Bytes: a picture that every clone carries along stays small."""
PROGRAM = """
import sys

import torch
from torch import nn

torch.backends.mha.set_fastpath_enabled(False)
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).eval()
x = torch.randn(2, 16, 64)
if "--ported" in sys.argv:
    model, x = model.bfloat16(), x.bfloat16()
    model.layers[4].norm2.eps = 0.1
with torch.no_grad():
    for step in range(2):
        model(x * (step + 1))
"""


def chromium() -> str:
    """The browser on the search path. Ends the program where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    return found or sys.exit("no chromium on the search path: apt-get install chromium")


def report(folder: Path) -> Path:
    """Capture both sides and write the page. Paths are relative: the page shows them."""
    (folder / "infer.py").write_text(PROGRAM)
    whence = [sys.executable, "-m", "whence"]
    # `python` is the Python of this script, and the page shows it as the user would have typed it.
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for words in (
        "run -o runs/ref -- python infer.py",
        "run -o runs/ported -- python infer.py --ported",
        "compare runs/ref runs/ported -o cmp",
        "report cmp -o report.html",
    ):
        done = subprocess.run(
            [*whence, *words.split()],
            cwd=folder,
            env={**os.environ, "PATH": search},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode != int(words.startswith("compare")):
            sys.exit(f"whence {words}: exit code {done.returncode}")
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
    size = picture.stat().st_size
    if size > LARGEST:
        sys.exit(f"{picture} has {size} bytes, more than {LARGEST}")
    print(f"{picture}: {size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
