"""Finds which Python a command will run, and whether whence can reach the program through it. Uses
the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from whence import extras
from whence.errors import CaptureError, Unsupported

PROBE_TIMEOUT_S = 120

# Distributions that decide what a model computes, or how it is split.
PACKAGES = (
    *(
        "torch",
        "torchvision",
        "torchaudio",
        "torch-npu",
        "triton",
        "numpy",
        "transformers",
        "tokenizers",
        "safetensors",
        "accelerate",
        "peft",
    ),
    *(
        "diffusers",
        "sentence-transformers",
        "timm",
        "flash-attn",
        "xformers",
        "bitsandbytes",
        "deepspeed",
        "megatron-core",
        "vllm",
        "sglang",
    ),
    *("lightning", "onnxruntime", "openvino", "onnx", "paddlepaddle", "jax", "jaxlib", "scipy"),
)

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?[a-z]*(\.exe)?")
# Commands that run the command after them.
_WRAPPERS = {
    "env",
    "nohup",
    "nice",
    "ionice",
    "time",
    "timeout",
    "taskset",
    "numactl",
    "stdbuf",
    "setsid",
    "chrt",
    "unbuffer",
}

_PROBE = """
import sys
sys.path[:] = [p for p in sys.path if p]
import json
out = {"executable": sys.executable, "python": sys.version.split()[0], "error": "", "versions": {}}
try:
    import whence
    import importlib.util
    missing = [
        name for name, modules in %r.items() if not any(map(importlib.util.find_spec, modules))
    ]
    if missing:
        out["error"] = "whence is there, but not " + ", ".join(missing)
    out["whence"] = whence.__version__
except Exception as err:
    out["error"] = str(err) or type(err).__name__
try:
    from importlib import metadata
    for name in %r:
        try:
            out["versions"][name] = metadata.version(name)
        except Exception:
            pass
except ImportError:
    pass
print("\\n" + json.dumps(out))
"""


class Interpreter(NamedTuple):
    """A Python as a command names it, the options it gets, and where the command said so ("command
    line", "shebang of FILE").
    """

    python: str
    options: tuple[str, ...]
    source: str


def find(command: Sequence[str], environment: Mapping[str, str]) -> Interpreter | None:
    """The Python that `command` starts, or None when it starts something else (a shell script may
    start one later).

    Raises CaptureError when the command itself cannot be found or executed.
    """
    if not command:
        raise CaptureError("no command given:  whence run -o RUN -- python script.py")
    path = which(command[0], environment)
    name = Path(command[0]).name
    if _PYTHON.fullmatch(name):
        return Interpreter(path, tuple(command[1:]), "the command line")
    if name in _WRAPPERS:
        for place, argument in enumerate(command[1:], 1):
            if _PYTHON.fullmatch(Path(argument).name) and (
                executable := shutil.which(argument, path=environment.get("PATH"))
            ):
                return Interpreter(executable, tuple(command[place + 1 :]), "the command line")
        return None
    return of_script(Path(path), environment)


def which(name: str, environment: Mapping[str, str]) -> str:
    """Full path of a command. Raises CaptureError saying whether it is missing or not
    executable.
    """
    executable = shutil.which(name, path=environment.get("PATH", os.defpath))
    if executable:
        return executable
    path = Path(name)
    if os.sep in name and path.is_dir():
        raise CaptureError(f"cannot run {name}: it is a folder; nothing was started")
    if path.is_file():
        hint = (
            f":  whence run ... -- python {name}" if path.suffix == ".py" else f":  chmod +x {name}"
        )
        raise CaptureError(f"cannot run {name}: it is not executable{hint}  (nothing was started)")
    where = "no such file" if os.sep in name else "not found on PATH"
    raise CaptureError(f"cannot run {name}: {where}; nothing was started")


def of_script(path: Path, environment: Mapping[str, str]) -> Interpreter | None:
    """The Python named by the first line of a script, None when it is a binary or for another
    interpreter.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return None
    if not head.startswith(b"#!"):
        return None
    lines = head.decode("utf-8", "replace").splitlines()
    words = lines[0][2:].split()
    if words and Path(words[0]).name == "sh" and len(lines) > 1 and lines[1].startswith("'''exec'"):
        # What pip and uv write when the path of the interpreter is too long for a first line.
        words = [
            w for w in shlex.split(lines[1].replace("'''exec'", "", 1)) if w not in ("$0", "$@")
        ]
    if words and Path(words[0]).name == "env":
        words = [
            w
            for w in words[1:]
            if w not in ("-S", "--split-string") and not re.fullmatch(r"\w+=.*", w)
        ]
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    python = shutil.which(words[0], path=environment.get("PATH", os.defpath))
    if python is None:
        raise CaptureError(
            f"cannot run {path}: its first line names {words[0]}, which is not there; nothing "
            "was started"
        )
    return Interpreter(python, tuple(words[1:]), f"the first line of {path}")


def hiding_flags(options: Sequence[str]) -> str:
    """The flags among -I, -S and -E (also combined, as in -Is) that a Python with these options
    would obey: "" or e.g. "IS".
    """
    flags: list[str] = []
    remaining = list(options)
    while remaining:
        word = remaining.pop(0)
        if word == "--check-hash-based-pycs":
            del remaining[:1]
            continue
        if not word.startswith("-") or word in ("-", "--"):
            break
        if word.startswith("--"):
            continue
        for place, letter in enumerate(word[1:], 1):
            if letter in "cm":
                return "".join(flags)
            if letter in "WX":
                if place == len(word) - 1:
                    del remaining[:1]
                break
            if letter in "ISE" and letter not in flags:
                flags.append(letter)
    return "".join(flags)


def check(interpreter: Interpreter, environment: Mapping[str, str]) -> dict[str, str]:
    """Versions of the interpreter's packages (python and whence among them).

    Raises CaptureError when whence could not reach the program: flags that hide it, or a Python
    without whence.
    """
    python = interpreter.python
    if flags := hiding_flags(interpreter.options):
        does = "skips sitecustomize" if flags == "S" else "ignores PYTHONPATH"
        raise CaptureError(
            f"python -{flags} ({interpreter.source}) {does}, by which whence reaches a program: "
            f"drop -{flags}, "
            "or use whence.capture(model, RUN) inside the program; nothing was started"
        )
    probe = _PROBE % (needed(), PACKAGES)
    clean = {name: value for name, value in environment.items() if name != "WHENCE_CAPTURE"}
    try:
        process = subprocess.run(
            [python, "-c", probe],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=clean,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise CaptureError(f"cannot run {python}: {err}; nothing was started") from err
    try:
        answer = json.loads(process.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise CaptureError(f"{python} does not run Python: {last}; nothing was started") from None
    if answer["error"]:
        exe = answer["executable"] or python
        if tuple(int(p) for p in answer["python"].split(".")[:2]) < (3, 11):
            raise CaptureError(f"cannot capture what {exe} runs: {answer['error']}")
        raise CaptureError(
            f"{exe} cannot import whence ({answer['error']}):  {shlex.quote(exe)} -m pip "
            f"install {extras.whence_source()}"
        )
    try:
        extras.check_release("numpy", answer["versions"].get("numpy", ""))
    except Unsupported as error:
        raise CaptureError(f"cannot capture what {python} runs: {error}") from error
    return {"python": answer["python"], "whence": answer["whence"], **answer["versions"]}


def needed() -> dict[str, tuple[str, ...]]:
    """What whence needs wherever it runs, as its own metadata says: the names that are imported, by
    the name that pip knows. What is not installed here is not needed; empty where whence itself has
    no metadata (a checkout on PYTHONPATH).
    """
    try:
        requirements = metadata.requires("whence") or []
    except metadata.PackageNotFoundError:
        return {}
    modules = {}
    for requirement in requirements:
        name, _, marker = requirement.partition(";")
        name = re.split(r"[^\w.-]", name, maxsplit=1)[0]
        if "extra" in marker:
            continue
        with contextlib.suppress(metadata.PackageNotFoundError):
            if imported := _imported_names(metadata.distribution(name)):
                modules[name] = imported
    return modules


def _imported_names(package: metadata.Distribution) -> tuple[str, ...]:
    listed = (package.read_text("top_level.txt") or "").split()
    if not listed:
        listed = [
            file.parts[0].removesuffix(".py")
            for file in package.files or ()
            if file.suffix == ".py" and len(file.parts) <= 2
        ]
    return tuple(dict.fromkeys(name for name in listed if name.isidentifier()))


def versions_here() -> dict[str, str]:
    """Versions of this process's python and packages, none of them imported."""
    versions = {"python": sys.version.split()[0]}
    for name in ("whence", *PACKAGES):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
