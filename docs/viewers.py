"""Take the pictures of other viewers that docs/report.md shows.

    python docs/viewers.py docs/images

Two runs of a small ONNX model, one with a wrong epsilon in its second block, are compared, and what
`whence report` writes is opened by each viewer; SARIF is that of examples/01-port. Needs the
commands netron, model-explorer and tensorboard on the search path (pip install netron
ai-edge-model-explorer model-explorer-onnx tensorboard), npm for the SARIF viewer of GitHub's and
Azure's pages, and onnx, onnxruntime, torch, playwright and a Chromium.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from picture import LARGEST, chromium
from playwright.sync_api import Page, sync_playwright

WIDTH, HEIGHT = 1100, 620
EXPAND_ALL = (380, 76)
"""Where Model Explorer has its button, in a canvas of its own."""
PATIENCE_S = 300
PORT = Path(__file__).parents[1] / "examples" / "01-port" / "serve.py"
MODEL = """
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

for file, epsilon in (("model.onnx", 1e-5), ("ported.onnx", 0.1)):
    rng, nodes, weights, last = np.random.default_rng(0), [], [], "x"
    for block in range(2):
        name = f"blocks.{block}"
        for part, shape in (("norm.weight", 16), ("fc.weight", (16, 16)), ("fc.bias", 16)):
            value = rng.standard_normal(shape, dtype=np.float32) * 0.3
            weights.append(numpy_helper.from_array(value, f"{name}.{part}"))
        steps = (
            ("LayerNormalization", [last, f"{name}.norm.weight"], "norm"),
            ("MatMul", [f"{name}.norm", f"{name}.fc.weight"], "matmul"),
            ("Add", [f"{name}.matmul", f"{name}.fc.bias"], "fc"),
            ("Tanh", [f"{name}.fc"], "act"),
            ("Add", [last, f"{name}.act"], "sum"),
        )
        for kind, inputs, output in steps:
            settings = {"epsilon": epsilon if block == 1 else 1e-5} if output == "norm" else {}
            output = f"{name}.{output}"
            nodes.append(helper.make_node(kind, inputs, [output], name=output, **settings))
        last = f"{name}.sum"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 16]) for n in ("x", last)]
    graph = helper.make_graph(nodes, "blocks", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), file)
"""
SERVE = """
import sys

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
x = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
for step in range(6):
    session.run(None, {"x": x * np.float32(0.6**step)})
"""
OF_ONNX = (
    "python make.py",
    "whence run -o runs/ref -- python serve.py model.onnx",
    "whence run -o runs/ported -- python serve.py ported.onnx",
    "whence compare runs/ref runs/ported -o cmp",
    "whence report cmp --onnx model.onnx --netron annotated.onnx",
    "whence report cmp --onnx model.onnx --model-explorer errors.json",
    "whence report cmp --tensorboard logs",
)
OF_TORCH = (
    "whence run -o runs/ref -- python serve.py",
    "whence run -o runs/port -- python serve.py --port",
    "whence compare runs/ref runs/port -o cmp",
    "whence report cmp --format sarif",
)
SARIF_VIEWER = ("@microsoft/sarif-web-component@0.6.0-29", "react@16", "react-dom@16")
SARIF_PAGE = """<!DOCTYPE html>
<meta charset="utf-8">
<body style="margin: 0; font-family: sans-serif"><div id="viewer"></div>
<script src="node_modules/react/umd/react.production.min.js"></script>
<script src="node_modules/react-dom/umd/react-dom.production.min.js"></script>
<script src="node_modules/@microsoft/sarif-web-component/dist/index.js"></script>
<script>
const shown = {logs: [LOG], hideBaseline: true};
ReactDOM.render(React.createElement(Viewer, shown), viewer);
</script>
"""


def typed(lines: tuple[str, ...], folder: Path) -> str:
    """Run command lines in a folder, and return what the last one printed. Ends the program when
    one ends otherwise than it should.
    """
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    printed = ""
    for line in lines:
        words = line.replace("whence", f"{sys.executable} -m whence", 1).split()
        done = subprocess.run(
            words,
            cwd=folder,
            env={**os.environ, "PATH": search},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != int(line.startswith("whence compare")):
            sys.exit(f"{line}: exit code {done.returncode}")
        printed = done.stdout
    return printed


@contextlib.contextmanager
def serving(words: list[str], folder: Path) -> Iterator[str]:
    """The address of a viewer that runs until the block ends. words: its command, PORT for a free
    port. Ends the program when the viewer does not answer.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [word.replace("PORT", str(port)) for word in words]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        for _ in range(PATIENCE_S):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(1)
        else:
            sys.exit(f"{words[0]} does not answer at port {port}")
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait()


def netron(tab: Page, folder: Path) -> None:
    """The node of the wrong layer, selected, with its verdict and its error."""
    with serving(["netron", "annotated.onnx", "--host", "127.0.0.1", "-p", "PORT"], folder) as url:
        tab.goto(url)
        with contextlib.suppress(Exception):
            tab.get_by_role("button", name="Accept").click(timeout=20_000)
        tab.locator("#node-name-blocks\\.1\\.norm").click(timeout=60_000)
        tab.wait_for_timeout(3000)
        tab.screenshot(path=folder / "netron.png")


def model_explorer(tab: Page, folder: Path) -> None:
    """The graph, coloured by verdict."""
    words = ["model-explorer", "--no_open_in_browser", "--extensions", "model_explorer_onnx"]
    shown = {
        "models": [{"url": str(folder / "model.onnx")}],
        "nodeData": [str(folder / "errors.json")],
    }
    with serving([*words, "--host", "127.0.0.1", "--port", "PORT"], folder) as url:
        tab.goto(f"{url}?data={quote(json.dumps(shown))}")
        tab.wait_for_timeout(15_000)
        tab.mouse.click(*EXPAND_ALL)
        tab.mouse.move(0, 0)
        tab.wait_for_timeout(3000)
        tab.screenshot(path=folder / "model-explorer.png")


def tensorboard(tab: Page, folder: Path) -> None:
    """The error of a module, step by step."""
    words = ["tensorboard", "--logdir", "logs", "--host", "127.0.0.1", "--port", "PORT"]
    with serving(words, folder) as url:
        tab.goto(f"{url}?darkMode=false&smoothing=0&tagFilter=blocks.1.(norm|sum)#timeseries")
        tab.locator("scalar-card").first.wait_for(timeout=60_000)
        tab.wait_for_timeout(3000)
        tab.screenshot(path=folder / "tensorboard.png")


def sarif(tab: Page, folder: Path) -> None:
    """The finding, at its file and line."""
    place = folder / "torch"
    place.mkdir()
    shutil.copy(PORT, place)
    log = typed(OF_TORCH, place)
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", *SARIF_VIEWER], cwd=place, check=True
    )
    (place / "sarif.html").write_text(SARIF_PAGE.replace("LOG", log))
    tab.set_viewport_size({"width": WIDTH, "height": 380})
    tab.goto((place / "sarif.html").as_uri())
    tab.wait_for_timeout(5000)
    tab.screenshot(path=folder / "sarif.png")


def main(pictures: Path) -> None:
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, sync_playwright() as driver:
        folder = Path(place)
        (folder / "make.py").write_text(MODEL)
        (folder / "serve.py").write_text(SERVE)
        typed(OF_ONNX, folder)
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for take in (netron, model_explorer, tensorboard, sarif):
            name = take.__name__.replace("_", "-")
            tab = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light"
            )
            take(tab, folder)
            size = (folder / f"{name}.png").stat().st_size
            if size > LARGEST:
                sys.exit(f"{name}.png has {size} bytes, more than {LARGEST}")
            shutil.copy(folder / f"{name}.png", pictures)
            print(f"{pictures / name}.png: {size} bytes", flush=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
