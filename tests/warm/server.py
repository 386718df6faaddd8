"""Imports a framework, then forks a process for each request. Arguments: torch or paddle, and the
path of a socket to listen on. Ends when its standard input does.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import io
import itertools
import json
import multiprocessing.process
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Collection, Iterator

# Variables that Python, numpy or a framework reads when it starts. A process for which one of them
# differs from the server's is started, not forked.
READ_AT_START = (
    *("PYTHON", "OMP_", "MKL_", "KMP_", "ATEN_", "ONEDNN_", "DNNL_", "TORCH_", "PYTORCH_"),
    *("FLAGS_", "LD_", "LC_", "LANG", "GLOG_", "WHENCE_KERNELS"),
)
# Those of Python that a forked process still follows.
FOLLOWED = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
# Packages of whence that read no variables when they are imported; a program imports the others.
PRELOADED = (
    *("_kernels", "align", "comparison", "errors", "frameworks", "instrument", "judge", "metrics"),
    *("readers", "records", "replay", "report", "results", "store", "writers"),
)
INDUCTOR = "torch._inductor.compile_fx"
# What many programs import of a framework later.
LATER = {"torch": ("torch._dynamo", INDUCTOR)}


def read_at_start(environment: dict[str, str]) -> dict[str, str]:
    """These variables. Where the hash seed is drawn, 0 is as good as another."""
    return {
        "PYTHONHASHSEED": "0",
        **{
            name: value
            for name, value in environment.items()
            if name.startswith(READ_AT_START) and name not in FOLLOWED
        },
    }


class Imported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives modules that were imported before the fork to the program that imports one of them: all
    at once, as each was imported with the others. first: those without which they cannot be.
    """

    first: "Imported | None" = None

    def __init__(self, names: Collection[str]) -> None:
        self.modules = {name: sys.modules.pop(name) for name in names}
        self.specs = {name: module.__spec__ for name, module in self.modules.items()}
        for package, part, module in self.parts():  # nobody has asked for it
            if vars(package).get(part) is module:
                delattr(package, part)

    def parts(self) -> Iterator[tuple[types.ModuleType, str, types.ModuleType]]:
        """(package, name in it, module) of those whose package is there without them."""
        for name, module in self.modules.items():
            package, _, part = name.rpartition(".")
            if package in sys.modules and package not in self.modules:
                yield sys.modules[package], part, module

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.modules or target is not None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=self.specs[fullname].origin)
        spec.submodule_search_locations = self.specs[fullname].submodule_search_locations
        return spec

    def create_module(self, spec):
        return self.modules[spec.name]

    def exec_module(self, module):
        module.__spec__ = self.specs[module.__name__]
        self.show()

    def show(self) -> None:
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        if self.first is not None:
            self.first.show()
        sys.modules.update(self.modules)
        for package, part, module in self.parts():
            setattr(package, part, module)
        if "torch" in self.modules:
            self.modules["torch"].default_generator.seed()  # anew in every process


def prepare_inductor() -> None:
    """What the first graph that is compiled waits for: the hash of torch's sources, and patterns."""
    torch = sys.modules["torch"]
    passes = "torch._inductor.fx_passes"
    importlib.import_module("torch._inductor.codecache").torch_key()
    importlib.import_module(f"{passes}.joint_graph").lazy_init(torch.device("cpu"))
    importlib.import_module(f"{passes}.post_grad").lazy_init()


def framework_modules() -> set[str]:
    return {name for name in sys.modules if name.split(".")[0] == framework}


class Forks:
    """The processes that were forked, each with the connection on which its client waits."""

    def __init__(self, path: str) -> None:
        self.environment = read_at_start(dict(os.environ))
        self.clients: dict[socket.socket, int] = {}
        self.woken, self.wake = os.pipe()
        for end in (self.woken, self.wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(path)
        self.listening.listen(64)

    def serve(self) -> dict:
        """Wait for requests; return one, in the process that was forked for it."""
        print("listening", flush=True)
        while True:
            ready = select.select([0, self.woken, self.listening, *self.clients], [], [])[0]
            if 0 in ready:
                os._exit(0)
            if self.woken in ready:
                os.read(self.woken, 4096)
                self.reap()
            for client in [c for c in ready if c in self.clients]:  # it was killed
                pid = self.clients.pop(client)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                client.close()
            if self.listening in ready and (request := self.accept()):
                return request

    def reap(self) -> None:
        """Tell the clients of processes that have ended how they ended."""
        for client, pid in list(self.clients.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    client.sendall(b"%d\n" % status)
                client.close()
                del self.clients[client]

    def accept(self) -> dict | None:
        """Fork for the next request. The request in the new process, None in the server."""
        client = self.listening.accept()[0]
        length, streams, _, _ = socket.recv_fds(client, 8, 3)
        with client.makefile("rb") as text:
            request = json.loads(text.read(int.from_bytes(length, "big")))
        pid = 0
        if self.takes(request):
            pid = os.fork()
            if not pid:
                self.leave_to(client, streams)
                return request
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(OSError):
            client.sendall(b"%d\n" % pid)
        if pid:
            self.clients[client] = pid
        else:
            client.close()
        return None

    def takes(self, request: dict) -> bool:
        first = (request["words"] or ["-"])[0]
        known = not first.startswith("-") or first in ("-c", "-m", "-u")
        return known and read_at_start(request["env"]) == self.environment

    def leave_to(self, client: socket.socket, streams: list[int]) -> None:
        """In the new process: take the client's streams, close what is the server's."""
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for opened in (*streams, self.woken, self.wake):
            os.close(opened)
        for opened in (self.listening, client, *self.clients):
            opened.close()


def become(request: dict, path: list[str]) -> tuple[str, list[str]]:
    """Make this process what `python WORDS` is before the program begins; return "-c", "-m" or ""
    and the words that follow.
    """
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]
    os.environ.clear()
    os.environ.update(request["env"])
    words = request["words"]
    direct = "PYTHONUNBUFFERED" in os.environ
    if words[0] == "-u":
        direct, words = True, words[1:]
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8")
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(
            open(number, "wb", -1, closefd=False),
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            line_buffering=number == 2 or os.isatty(number),
            write_through=direct,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.executable = request["command"]
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.path_importer_cache.clear()
    sys.modules["numpy"].random.seed()  # Python's own generator does so itself
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if words[0] in ("-c", "-m"):
        sys.path.insert(0, "" if words[0] == "-c" else os.getcwd())
        sys.argv = [words[0], *words[2:]] if words[0] == "-c" else words[1:]
        return words[0], words[1:]
    sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
    sys.argv = words
    return "", words


def run(how: str, words: list[str]) -> None:
    """Run the program in a main module of its own."""
    if how == "-m":
        runpy._run_module_as_main(words[0])
        return
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    text: str | bytes = words[0]
    name = "<string>"
    if not how:
        name = main.__file__ = words[0]
        with open(name, "rb") as file:
            text = file.read()
    exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)


framework, place = sys.argv[1:]
base = sys.path[1:]
signal.signal(signal.SIGINT, signal.SIG_IGN)
importlib.import_module(framework)
whence = importlib.import_module("whence")
for module in pkgutil.walk_packages(whence.__path__, "whence.", onerror=print):
    if module.name.split(".")[1] in PRELOADED:
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] == "whence":  # others: of an extra that is not here
                raise
layers = [framework_modules()]  # each on those before it
for module in LATER.get(framework, ()):
    importlib.import_module(module)
    if module == INDUCTOR:
        prepare_inductor()
    layers.append(framework_modules().difference(*layers))
hidden: list[Imported] = []
for layer in reversed(layers):
    hidden.insert(0, Imported(layer))
for first, later in itertools.pairwise(hidden):
    later.first = first
gc.collect()
gc.freeze()
request = Forks(place).serve()
sys.meta_path[:0] = hidden
signal.signal(signal.SIGINT, signal.default_int_handler)
ended = 0
try:
    run(*become(request, base))
except SystemExit as end:
    if isinstance(end.code, int | None):
        ended = end.code or 0
    else:
        print(end.code, file=sys.stderr)
        ended = 1
except BaseException as err:
    err.__traceback__ = err.__traceback__.tb_next.tb_next
    sys.excepthook(type(err), err, err.__traceback__)
    ended = 1
    if isinstance(err, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
# As Python ends, but for taking every module apart, which takes longer than most of the programs.
threading._shutdown()
atexit._run_exitfuncs()
for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(Exception):
        stream.flush()
os._exit(ended & 0xFF)
