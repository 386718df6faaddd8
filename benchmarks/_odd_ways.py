"""Programs with odd ways, as functions: what they do with descriptors, processes, signals, threads,
version counters and reference counts. What each prints and leaves in its folder is its answer.
"""

import atexit
import contextlib
import copy
import ctypes
import errno
import functools
import gc
import hashlib
import io
import mmap
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

PROGRAMS = {}
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}


def odd(*arguments, name=None):
    """Has a function be a program, called with these arguments."""

    def add(function):
        words = "_".join(map(str, arguments))
        title = name or function.__name__ + ("_" + words if words else "")
        PROGRAMS[title] = functools.partial(function, *arguments)
        return function

    return add


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


X = torch.linspace(-1, 1, 16).reshape(2, 8)


def show(*values):
    """Print values; tensors by shape, version and a hash of their bits."""
    words = []
    for value in values:
        if isinstance(value, torch.Tensor):
            bits = value.detach().contiguous().numpy().tobytes()
            value = (
                f"{tuple(value.shape)} v{value._version} {hashlib.sha256(bits).hexdigest()[:12]}"
            )
        words.append(str(value))
    with contextlib.suppress(OSError, ValueError):
        print(*words, flush=True)


def calls(model, count=6):
    for step in range(count):
        show(model(X + step))


def trains(model, optimizer, steps=2):
    for step in range(steps):
        optimizer.zero_grad()
        model(X + step).square().mean().backward()
        optimizer.step()
    show(*model.parameters(), *(p.grad for p in model.parameters()))


def opened():
    """Descriptors from 3 on that are open."""
    return [n for n in range(3, 1024) if _is_open(n)]


def _is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def users(count=12):
    files = [os.open(f"user_{n}", os.O_RDWR | os.O_CREAT) for n in range(count)]
    for n, file in enumerate(files):
        os.write(file, b"user %d\n" % n)
    return files


def taken(numbers):
    """A file of the program's at each of these numbers."""
    mine = os.open("mine", os.O_RDWR | os.O_CREAT)
    for number in numbers:
        if number != mine:
            os.dup2(mine, number)
    os.write(mine, b"mine\n")


def big(model, count=3):
    """Calls with tensors that are written at once, and more than one flush."""
    for step in range(count):
        show(model[0](torch.ones(20_000, 8) + step))


def close_all(numbers):
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(number)


def refused(work):
    try:
        show("passed", work())
    except Exception as error:  # noqa: BLE001 - whatever torch says is the answer
        show(type(error).__name__, str(error)[:60])


# ---- descriptors


@odd(3, 200)
@odd(3, 4096)
@odd(200, 260)
def closerange(first, end):
    model = net()
    calls(model, 1)
    os.closerange(first, end)
    users()
    calls(model, 20)
    big(model)


@odd()
def close_range_of_the_kernel():
    model = net()
    calls(model, 1)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "close_range"):
        libc.close_range(3, 1 << 30, 0)
    users(60)
    big(model)


@odd()
def closed_with_the_standard_ones():
    model = net()
    calls(model, 1)
    os.closerange(0, 4096)
    users(8)
    calls(model)
    big(model)


@odd(range(3, 40), name="dup2_low")
@odd(range(200, 230), name="dup2_high")
@odd(range(3, 1000), name="dup2_all")
def dup2(numbers):
    model = net()
    calls(model, 1)
    taken(numbers)
    calls(model, 20)
    big(model)


@odd("close")
@odd("take")
def each_time(how):
    model = net()
    for _ in range(5):
        calls(model, 1)
        (close_all if how == "close" else taken)(opened())
    big(model, 2)


@odd("forward")
@odd("backward")
@odd("pre")
def closed_in_a_hook(kind):
    model = net()

    def hook(*_):
        taken(opened())

    if kind == "forward":
        model[1].register_forward_hook(hook)
    elif kind == "pre":
        model[1].register_forward_pre_hook(hook)
    else:
        model[1].register_full_backward_hook(hook)
    trains(model, torch.optim.SGD(model.parameters(), 0.1))


@odd()
def closed_between_forward_and_backward():
    model = net()
    loss = model(X).sum()
    taken(opened())
    loss.backward()
    show(*(p.grad for p in model.parameters()))


@odd()
def closed_in_a_thread():
    model = net()
    calls(model, 1)
    done = threading.Event()

    def closes():
        while not done.is_set():
            close_all(range(3, 260))

    thread = threading.Thread(target=closes)
    thread.start()
    calls(model, 50)
    done.set()
    thread.join()


@odd()
def closed_at_exit():
    atexit.register(lambda: (os.closerange(3, 4096), users(8)))
    calls(net())


@odd(16, "before")
@odd(16, "after")
@odd(3, "after")
@odd(3, "before")
def limited(limit, when):
    model = net()
    if when == "after":
        calls(model, 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    calls(model)
    big(model)


@odd(64, "before")
@odd(64, "after")
@odd(150, "after")
def exhausted(limit, when):
    model = net()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if when == "after":
        calls(model, 2)
    count = 0
    try:
        while True:
            os.open("/dev/null", os.O_RDONLY)
            count += 1
    except OSError as error:
        show(count, errno.errorcode[error.errno])
    calls(model)
    big(model)
    os.close(10)
    calls(model)


@odd()
def lowest_number():
    model = net()
    calls(model, 2)
    show([os.open("/dev/null", os.O_RDONLY) for _ in range(5)])
    os.close(0)
    show(os.open("/dev/null", os.O_RDONLY))
    calls(model, 2)


@odd()
def daemon():
    model = net()
    calls(model, 1)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 1024)
            for _ in range(3):
                os.open("/dev/null", os.O_RDWR)
            users()
            with Path("said").open("w") as file, contextlib.redirect_stdout(file):
                calls(model)
            os._exit(0)
        os.wait()
        os._exit(0)
    os.wait()


@odd()
def stderr_is_a_file():
    model = net()
    calls(model, 1)
    file = os.open("errors", os.O_RDWR | os.O_CREAT)
    os.dup2(file, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    calls(model)
    big(model)


@odd()
def stderr_is_a_string():
    model = net()
    with contextlib.redirect_stderr(io.StringIO()) as text:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        calls(model)
        big(model)
    show(repr(text.getvalue()))


@odd(1 << 14)
@odd(1 << 20)
def file_size(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    model = net()
    calls(model)
    big(model)


@odd()
def sockets_at_our_numbers():
    model = net()
    calls(model, 1)
    one, other = socket.socketpair()
    numbers = opened()
    for number in numbers:
        if number not in (one.fileno(), other.fileno()):
            os.dup2(one.fileno(), number)
    one.send(b"hello")
    calls(model, 20)
    big(model)
    other.setblocking(False)
    show(other.recv(1 << 20))


@odd()
def a_pipe_at_our_numbers():
    model = net()
    calls(model, 1)
    out, into = os.pipe()
    for number in opened():
        if number not in (out, into):
            os.dup2(into, number)
    os.write(into, b"mine")
    calls(model, 20)
    os.set_blocking(out, False)
    show(os.read(out, 1 << 20))


@odd()
def mapped_and_closed():
    model = net()
    calls(model, 1)
    file = os.open("mapped", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 4096)
    memory = mmap.mmap(file, 4096)
    os.closerange(3, 1024)
    users(4)
    big(model)
    memory[:4] = b"mine"


@odd()
def inherited_by_exec():
    model = net()
    calls(model, 2)
    code = "import os; print(sorted(os.listdir('/proc/self/fd'))[:-1])"
    os.execv(sys.executable, [sys.executable, "-ISc", code])


@odd()
def inherited_by_children():
    model = net()
    calls(model, 2)
    done = subprocess.run(["ls", "/proc/self/fd"], close_fds=False, capture_output=True, check=True)
    show(done.stdout.split()[:-1])


@odd()
def no_umask_no_folder():
    os.umask(0o777)
    Path("gone").mkdir(0o700)
    os.chdir("gone")
    Path("../gone").rmdir()
    model = net()
    calls(model)
    os.closerange(3, 1024)
    calls(model)
    os.chdir("/")


@odd()
def another_root():
    model = net()
    calls(model, 1)
    if os.getuid() == 0:
        Path("root").mkdir()
        os.chroot("root")
        os.closerange(3, 1024)
    calls(model)
    big(model)


@odd()
def another_user():
    model = net()
    calls(model, 1)
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)
        os.closerange(3, 1024)
    calls(model)
    big(model)


# ---- processes


@odd("call")
@odd("_exit")
@odd("raise")
@odd("take")
def forks(way):
    model = net()
    calls(model, 1)
    child = os.fork()
    if child == 0:
        if way == "take":
            taken(opened())
        if way != "_exit":
            with Path("child").open("w") as file, contextlib.redirect_stdout(file):
                calls(model, 3)
        os._exit(7)
    show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    calls(model, 2)


@odd()
def forks_without_python():
    model = net()
    calls(model, 1)
    libc = ctypes.PyDLL(None)
    child = libc.fork()
    if child == 0:
        with Path("child").open("w") as file, contextlib.redirect_stdout(file):
            calls(model, 30)
        os._exit(5)
    show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    calls(model, 2)


@odd()
def forks_in_forward():
    class Forks(nn.Module):
        def forward(self, x):
            child = os.fork()
            if child == 0:
                os._exit(3)
            show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return x * 2

    calls(nn.Sequential(net(), Forks()), 2)


@odd()
def forks_in_a_thread():
    model = net()

    def work():
        child = os.fork()
        if child == 0:
            model(X)
            os._exit(4)
        show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    calls(model, 1)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    calls(model, 2)


def _worker(model, queue):
    queue.put(model(X).sum().item())


@odd()
def multiprocessing_forks():
    model = net()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_worker, args=(model, queue))
    process.start()
    show(queue.get())
    process.join()
    show(process.exitcode)


@odd()
def workers_of_a_loader():
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(4, 8))
    model = net()
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, num_workers=1):
        show(model(batch))


@odd("SIGKILL")
@odd("SIGTERM")
@odd("SIGINT")
@odd("SIGUSR1")
@odd("SIGABRT")
def killed(name):
    model = net()
    calls(model, 3)
    os.kill(os.getpid(), getattr(signal, name))
    calls(model, 1)


@odd("os._exit", 9)
@odd("sys.exit", 4)
@odd("sys.exit", "words")
@odd("raise", 0)
def ends(how, code):
    class Ends(nn.Module):
        def forward(self, x):
            if how == "os._exit":
                os._exit(code)
            if how == "sys.exit":
                sys.exit(code)
            raise LookupError("ended")

    model = nn.Sequential(net(), Ends())
    model(X)


@odd()
def exceptions_that_are_caught():
    class Fails(nn.Module):
        def forward(self, x):
            self.count = getattr(self, "count", 0) + 1
            if self.count % 2:
                raise StopIteration(self.count)
            return x

    model = nn.Sequential(net(), Fails())
    for _ in range(4):
        refused(lambda: model(X))
    try:
        model(X)
    except StopIteration as error:
        show(error.__context__, error.__cause__, error.args)


# ---- signals


@odd()
def a_handler_calls_the_model():
    model, other = net(), net()
    signal.signal(signal.SIGUSR1, lambda *_: show(other(X)))
    model[1].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGUSR1))
    calls(model, 3)


@odd()
def a_handler_raises():
    def raises(*_):
        raise TimeoutError("in time")

    signal.signal(signal.SIGALRM, raises)
    model = net()
    model[1].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGALRM))
    refused(lambda: model(X))
    model[1]._forward_hooks.clear()
    calls(model, 2)


@odd()
def a_timer_runs():
    counted = []
    signal.signal(signal.SIGALRM, lambda *_: counted.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    model = net()
    trains(model, torch.optim.Adam(model.parameters(), 0.1, foreach=True), 5)
    signal.setitimer(signal.ITIMER_REAL, 0)
    show(bool(counted))


@odd()
def handlers_are_listed():
    model = net()
    calls(model, 1)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            show(number, signal.getsignal(number))
    show(signal.pthread_sigmask(signal.SIG_BLOCK, []))


@odd()
def a_wakeup_descriptor():
    out, into = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(into)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    model = net()
    calls(model, 2)
    signal.raise_signal(signal.SIGUSR1)
    calls(model, 2)
    show(os.read(out, 100))


@odd()
def interrupted_and_caught():
    model = net()
    model[1].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        model(X)
    except KeyboardInterrupt:
        show("interrupted")
    model[1]._forward_hooks.clear()
    calls(model, 2)


# ---- threads, and what Python knows


@odd()
def threads_call_at_once():
    models = [net() for _ in range(4)]
    results = {}

    def work(n):
        with torch.no_grad():
            results[n] = [models[n](X + k) for k in range(5)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in sorted(results):
        show(*results[n])


@odd()
def a_daemon_thread_at_exit():
    model = net()
    thread = threading.Thread(target=lambda: [model(X) for _ in range(10**5)], daemon=True)
    thread.start()
    calls(net(), 3)


@odd()
def reference_counts():
    class Counts(nn.Module):
        def forward(self, x):
            show(sys.getrefcount(x) < 12)
            return x * 1

    model = nn.Sequential(net(), Counts())
    given = X.clone()
    before = sys.getrefcount(given)
    out = model(given)
    show(sys.getrefcount(given) - before, sys.getrefcount(out))
    alive = weakref.ref(out)
    del out
    gc.collect()
    show(alive() is None)
    kept = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    show([k() is None for k in kept])


@odd()
def finalizers_run_in_order():
    class Named(torch.Tensor):
        pass

    model, order = net(), []
    for n in range(3):
        out = model(X + n).detach().as_subclass(Named)
        weakref.finalize(out, order.append, n)
        del out
    show(order)


@odd()
def the_collector_is_off():
    gc.disable()
    model = net()
    trains(model, torch.optim.SGD(model.parameters(), 0.1))
    show(gc.isenabled(), gc.get_threshold(), gc.garbage)


@odd("settrace")
@odd("setprofile")
def traced(which):
    lines = []

    def trace(frame, event, _):
        if frame.f_code.co_filename == __file__:
            lines.append((event, frame.f_lineno))
        return trace

    getattr(sys, which)(trace)
    model = net()
    model(X)
    getattr(sys, which)(None)
    show(hashlib.sha256(repr(lines).encode()).hexdigest(), len(lines))


@odd()
def warnings_are_errors():
    warnings.simplefilter("error")
    model = net()
    trains(model, torch.optim.AdamW(model.parameters(), 0.1))


@odd()
def models_are_copied():
    model = net()
    calls(model, 1)
    show(*copy.deepcopy(model).parameters())
    show(len(pickle.dumps(model)))
    torch.save(model.state_dict(), "state.pt")
    show(sorted(vars(model)), sorted(vars(model[0])))


@odd()
def modules_change_underway():
    model = net()
    calls(model, 1)
    model[1] = nn.GELU()
    model[0].forward = lambda x: x * 2
    model[2].__class__ = type("Other", (nn.Linear,), {})
    model.append(nn.Identity())
    calls(model, 2)
    show(repr(model))


# ---- versions, and what autograd says


@odd("foreach")
@odd("fused")
@odd("single")
def optimizers(kind):
    options = {} if kind == "single" else {kind: True}
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        if make is torch.optim.Adagrad and kind == "fused":
            continue
        model = net()
        trains(model, make(model.parameters(), lr=0.1, **options))


@odd("foreach")
@odd("fused")
@odd("single")
def a_second_backward(kind):
    for make in (torch.optim.SGD, torch.optim.Adam):
        model = net()
        options = {"foreach": False} if kind == "single" else {kind: True}
        optimizer = make(model.parameters(), lr=0.1, **options)
        loss = model(X).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        refused(loss.backward)
        show(*model.parameters(), *(p.grad for p in model.parameters()))


@odd()
def lists_change_in_place():
    model = net()
    loss = model(X).sum()
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)
        torch._foreach_lerp_(list(model.parameters()), [p * 0 for p in model.parameters()], 0.5)
    refused(loss.backward)
    show(*model.parameters())


@odd()
def lists_change_inside():
    class Lists(nn.Module):
        def forward(self, x):
            parts = list(x.clone().unbind(0))
            torch._foreach_exp_(parts)
            torch._foreach_clamp_min_(parts, 0.5)
            show(*parts)
            return torch.stack(parts)

    model = nn.Sequential(net(), Lists())
    with torch.no_grad():
        calls(model, 3)
    refused(lambda: model(X).sum().backward())


@odd()
def gradients_are_clipped_and_scaled():
    model = net()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    for step in range(3):
        scaler.scale(model(X + step).square().sum()).backward()
        scaler.unscale_(optimizer)
        show(nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True))
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        show(*(p.grad for p in model.parameters()), scaler.get_scale())
        optimizer.zero_grad(set_to_none=False)
    show(*model.parameters())


@odd()
def averages_move():
    model, average = net(), net()
    for step in range(3):
        trains(model, torch.optim.SGD(model.parameters(), 0.1), 1)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
        show(average(X + step), *average.parameters())


@odd()
def memory_is_replaced():
    class Replaces(nn.Module):
        def forward(self, x):
            y = x.clone()
            y.resize_(3)
            show(y._version, y.shape)
            y.set_(torch.ones(4))
            y.data = torch.zeros(2, 4)
            show(y)
            torch.add(x[:, :4], 1, out=y)
            show(y)
            return y + x

    with torch.no_grad():
        calls(nn.Sequential(net(), Replaces()), 3)
    one, other = torch.ones(2), torch.zeros(3)
    torch.utils.swap_tensors(one, other)
    show(one, other)


@odd()
def made_versions():
    class Makes(nn.Module):
        def forward(self, x):
            made = [torch.zeros(2), torch.full((2,), 2.0), torch.eye(2), torch.arange(2.0)]
            made += [
                torch.tril(torch.ones(2, 2)),
                torch.randn(2),
                nn.init.xavier_normal_(torch.ones(2, 2)),
            ]
            made += [x.sort(-1)[0], x.cumsum(0), torch.linspace(0, 1, 3), x.masked_fill(x > 0, 1)]
            show(*made)
            return x

    calls(nn.Sequential(net(), Makes()), 2)


@odd()
def views_are_written():
    class Writes(nn.Module):
        def forward(self, x):
            y = x.clone()
            y[0] = 1
            y.view(-1)[1:3].mul_(2)
            first = y.split(1)[0]
            refused(lambda: first.add_(1))
            y.detach().add_(1)
            show(y, y._is_view(), y[0]._is_view())
            return y

    refused(lambda: nn.Sequential(net(), Writes())(X).sum().backward())
    leaf = torch.ones(2, requires_grad=True)
    refused(lambda: leaf.add_(1))


@odd()
def normalisations_in_training():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(8), nn.Dropout(0.5), nn.SyncBatchNorm(8).eval(), nn.Linear(8, 2)
    )
    calls(model, 3)
    show(*model.state_dict().values())


@odd()
def inference_tensors():
    model = net()
    with torch.inference_mode():
        out = model(X)
        out.add_(1)
        show(out.is_inference())
        kept = torch.ones(2)
    refused(lambda: kept._version)
    refused(lambda: (out * torch.ones(4, requires_grad=True)).sum().backward())
    plain = [torch.ones(2), torch.ones(2)]
    with torch.inference_mode():
        torch._foreach_add_(plain, 1.0)
        plain[0].mul_(2)
    show(*plain)


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(x, y)
        ctx.mark_dirty()
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * (x + y)


@odd("saved")
@odd("changed")
def functions_of_its_own(way):
    model = net()
    out = model(X)
    y = _Saves.apply(out)
    if way == "changed":
        with torch.no_grad():
            torch._foreach_add_([y], 1.0)
    refused(lambda: y.sum().backward())
    show(*(p.grad for p in model.parameters() if p.grad is not None))


@odd()
def checkpoints():
    model = net()
    for reentrant in (True, False):
        x = X.clone().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        show(x.grad, *(p.grad for p in model.parameters()))


@odd()
def saved_tensors_are_packed():
    packed = []
    model = net()

    def pack(x):
        packed.append(tuple(x.shape))
        return x.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(X).square().sum()
    torch.autograd.graph.increment_version(model[0].weight)
    refused(loss.backward)
    show(packed, model[0].weight)


@odd()
def gradients_of_gradients():
    model = net()
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    show(first, x.grad, *(p.grad for p in model.parameters()))


@odd()
def hooks_change_gradients():
    model = net()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g.mul(2))
        parameter.register_post_accumulate_grad_hook(lambda p: torch._foreach_mul_([p.grad], 3.0))
    trains(model, torch.optim.SGD(model.parameters(), 0.1, foreach=True))


class _Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _CountsFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", "?"))
        return func(*args, **(kwargs or {}))


@odd("dispatch")
@odd("function")
def modes_of_its_own(kind):
    model = net()
    parameters = list(model.parameters())
    with (_Counts if kind == "dispatch" else _CountsFunctions)() as mode:
        out = model(X)
        with torch.no_grad():
            torch._foreach_add_(parameters, 1.0)
    show(mode.names, out, *parameters)


class _Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        _Named.count += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@odd()
def subclasses():
    _Named.count = 0
    model = net()
    out = model(X.as_subclass(_Named))
    show(type(out).__name__, out.as_subclass(torch.Tensor), _Named.count)


@odd()
def functional_transforms():
    model = net()
    parameters = dict(model.named_parameters())

    def loss(given, x):
        return torch.func.functional_call(model, given, x).square().sum()

    gradients = torch.func.grad(loss)(parameters, X)
    show(*gradients.values())
    show(torch.func.vmap(lambda x: torch.func.functional_call(model, parameters, x))(X))


@odd()
def a_library_operator():
    library = torch.library.Library("odd_ways", "FRAGMENT")
    library.define("twice_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("twice_", lambda x: x.mul_(2), "CompositeExplicitAutograd")
    library.define("hidden(Tensor x) -> Tensor")
    library.impl("hidden", lambda x: x.add_(1).clone(), "CPU")

    class Calls(nn.Module):
        def forward(self, x):
            y = torch.ones(2)
            torch.ops.odd_ways.twice_(y)
            show(torch.ops.odd_ways.hidden(y), y)
            return x

    with torch.no_grad():
        calls(nn.Sequential(net(), Calls()), 2)


@odd()
def random_numbers():
    model = nn.Sequential(net(), nn.Dropout(0.5), nn.RReLU())
    calls(model, 3)
    show(torch.get_rng_state(), torch.rand(3))


@odd()
def under_autocast():
    model = net()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(X)
        show(out.dtype, nn.functional.bilinear(X, X, torch.ones(3, 8, 8)).dtype)
    out.float().sum().backward()
    show(*(p.grad for p in model.parameters()))


@odd()
def anomalies_are_found():
    model = net()
    with torch.autograd.detect_anomaly(check_nan=True):
        refused(lambda: (model(X).sum() * 0 / 0).sqrt().backward())
    torch.use_deterministic_algorithms(True)
    calls(model, 1)


@odd()
def fused_steps_by_hand():
    tensors = [torch.ones(3), torch.ones(2)]
    model = net()

    def step(*_):
        states = [[torch.zeros_like(t) for t in tensors] for _ in range(3)]
        torch._fused_adam_(
            tensors, *states, [], [torch.tensor(1.0)] * 2, amsgrad=False, maximize=False, **ADAM
        )

    model[1].register_forward_hook(step)
    calls(model, 2)
    show(*tensors)


@odd("eager")
@odd("aot_eager")
def compiled(backend):
    model = torch.compile(net(), backend=backend)
    trains(model, torch.optim.SGD(model.parameters(), 0.1, foreach=True))
    buffer = torch.ones(2, 8)

    @torch.compile(backend=backend)
    def change(x):
        buffer.add_(1)
        return x * buffer

    show(change(X), change(X), buffer)
