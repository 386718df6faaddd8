"""Waits for a framework to be imported in a process started by `whence run`, then attaches
the capture. Standard library only.

Nothing here may stop or change the program: every failure becomes one line on stderr and one in
RUN/attach-errors.txt.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

LOG = "launch.jsonl"
ERRORS = "attach-errors.txt"
_stderr: tuple[int, int] | None = None


def arm(text: str) -> None:
    """Install the import hook. text: the JSON of WHENCE_CAPTURE (`run`, `launcher`, `attach`,
    `frameworks`, `options`).
    """
    global _stderr
    _stderr = stderr_file()
    config: dict[str, Any] = json.loads(text)
    log(config["run"], "python")
    actions: dict[str, Callable[[ModuleType], None]] = {
        name: lambda _, name=name: attach(config, name)  # type: ignore[misc]
        for name in config["frameworks"]
    }
    actions["subprocess"] = follow
    seed = config["options"].get("seed")
    if seed is not None:
        import random

        # Each generator is seeded before user code can draw from it, and never again: the program's
        # own seeds win.
        random.seed(seed)
        actions["numpy.random"] = lambda module: module.seed(seed)
    for name in list(actions):
        if name in sys.modules:  # a .pth file was faster
            guarded(config, actions.pop(name), sys.modules[name])
    sys.meta_path.insert(0, Watcher(config, actions))


def follow(subprocess: ModuleType) -> None:
    """Keep this folder on the PYTHONPATH of children whose environment has another one; one that
    was cleared stays as it is.
    """
    popen: Any = subprocess.Popen
    start, folder = popen._execute_child, os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    position = start.__code__.co_varnames.index("env")

    def _execute_child(*arguments: Any) -> Any:
        env = arguments[position] if position < len(arguments) else None
        if env is not None and "WHENCE_CAPTURE" in env:
            search_path = env.get("PYTHONPATH", "")
            if folder not in search_path.split(os.pathsep):
                env = {
                    **env,
                    "PYTHONPATH": folder + (os.pathsep + search_path if search_path else ""),
                }
                arguments = (*arguments[:position], env, *arguments[position + 1 :])
        return start(*arguments)

    popen._execute_child = _execute_child


def attach(config: dict[str, Any], framework: str) -> None:
    """Hand over to whence itself. A Python without whence is left alone: the launcher tells, not
    the program's stderr.
    """
    try:
        launcher = importlib.import_module(config["launcher"])
    except ImportError as err:
        text = f"cannot import whence ({err}): {sys.executable} -m pip install {config['source']}"
        complain(config["run"], text, quiet=err.name == "whence")
        return
    log(config["run"], "attached", **launcher.attach_here(config, framework))


class Watcher(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the other finders find, and has the loader call back once the
    module has run completely.
    """

    def __init__(
        self, config: dict[str, Any], actions: dict[str, Callable[[ModuleType], None]]
    ) -> None:
        self.config, self.actions = config, actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec another finder gives, its loader made to call back. None for every module not
        waited for.
        """
        if fullname not in self.actions:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                self.wrap(fullname, spec)
                return spec
        return None

    def forget(self, name: str) -> None:
        """Once one framework is there, do not wait for one that is not installed."""
        frameworks = self.config["frameworks"]
        for framework in frameworks:
            if (
                name in frameworks
                and framework in self.actions
                and importlib.machinery.PathFinder.find_spec(framework) is None
            ):
                del self.actions[framework]

    def wrap(self, name: str, spec: importlib.machinery.ModuleSpec) -> None:
        """Shadow `exec_module` on this one loader object; the shadow goes away when it has been
        called.
        """
        loader: Any = spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # An import that fails leaves the watcher armed: the program may catch it and try again.
            run(module)
            with contextlib.suppress(AttributeError):
                del loader.exec_module
            action = self.actions.pop(name, None)
            if action is not None:
                guarded(self.config, action, sys.modules.get(name, module))
                self.forget(name)
            if not self.actions and self in sys.meta_path:
                sys.meta_path.remove(self)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            complain(
                self.config["run"],
                f"{name} is loaded by {type(loader).__name__}, which cannot be watched",
            )


def guarded(
    config: dict[str, Any], action: Callable[[ModuleType], None], module: ModuleType
) -> None:
    """Run one action; whatever it raises is told, never raised."""
    collects = gc.isenabled()
    gc.disable()  # as `whence.lazy_names.importing` says
    try:
        action(module)
    except Exception as err:  # noqa: BLE001 - a capture that cannot start never stops the program
        complain(config["run"], f"{type(err).__name__}: {err}")
    finally:
        if collects:
            gc.enable()


def complain(run: str, text: str, *, quiet: bool = False) -> None:
    """One line on stderr (unless quiet) and one in the run. A medium that fails is not worth
    failing for.
    """
    line = " ".join(text.split())
    append(run, ERRORS, f"pid {os.getpid()}, {sys.executable}: {line}\n")
    if not quiet and stderr_file() == _stderr:  # else it is a file of the program's
        with contextlib.suppress(Exception):
            sys.stderr.write(f"whence: not capturing this process: {line}\n")


def stderr_file() -> tuple[int, int] | None:
    """Device and inode of stderr, None where there is none."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def log(run: str, event: str, **fields: Any) -> None:
    """Add one event of this process to the launcher's journal."""
    entry = {"event": event, "pid": os.getpid(), "python": sys.executable, **fields}
    append(run, LOG, json.dumps(entry) + "\n")


def append(run: str, name: str, text: str) -> None:
    """Append in one write, so that lines of several processes do not mix."""
    with contextlib.suppress(OSError):
        fd = os.open(f"{run}/{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, text.encode("utf-8", "replace"))
        finally:
            os.close(fd)
