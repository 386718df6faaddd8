"""What a listener remembers of a module, of the tensors it holds and of the root it belongs to,
without keeping any of them alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from whence.frameworks.torch_arrays import address_of
from whence.instrument.call_frames import Root
from whence.instrument.torch.tensor_content import Probe
from whence.records import Placement, Ref


class ModuleInfo:
    """What is known of one module: its place in the model, and the tensors it holds with the
    records they were last seen as. closed: its class hides what runs inside.
    """

    __slots__ = (
        "branches", "closed", "deep", "entries", "op_type", "programs", "ref", "root", "scope",
        "serial", "sizes", "source",
    )  # fmt: skip

    def __init__(
        self,
        module: Any,
        scope: str,
        root: ModuleRoot,
        serial: int,
        forget_module: Callable[[int, int], None],
    ) -> None:
        # Unique, unlike id(module): a module made in a forward pass dies, and the next one may get
        # the same address.
        self.serial = serial
        self.programs = 0  # how many were recorded
        kind = type(module)
        place, forget = id(module), weakref.WeakMethod(forget_module)  # the listener may die first

        def died(_: Any) -> None:
            if (call := forget()) is not None:
                call(place, serial)

        self.ref, self.scope, self.root = weakref.ref(module, died), scope, root
        self.op_type, self.source = kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
        self.branches = any(child is not None for child in module._modules.values())
        self.closed = isinstance(module, torch.jit.ScriptModule) or is_optimized(module)
        # True where children are used without being called (a fused path): their parameters then
        # count as the module's own.
        self.deep = isinstance(module, torch.nn.MultiheadAttention)
        self.entries: list[HeldTensor] | None = None
        self.sizes: tuple[int, int, int] = (-1, -1, -1)


def is_optimized(module: Any) -> bool:
    """Whether the module is the wrapper that `torch.compile(module)` returns."""
    return type(module).__name__ == "OptimizedModule"


def is_boundary(info: ModuleInfo, module: Any) -> bool:
    """Whether the module is compiled or scripted as a whole, so that its inside is not observed."""
    return info.closed or getattr(module, "_compiled_call_impl", None) is not None


class Home(NamedTuple):
    """Where a tensor is stored: the module, the name of its table ("" for plain attributes), and
    the name in that table. No reference to the table itself is kept: it would keep its tensors
    alive.
    """

    owner: weakref.ref[Any] | None
    table: str
    name: str


class HeldTensor:
    """A tensor that a module holds, and the record that it was last seen as.

    The tensor is read from its module, so that `module.weight = ...` is followed; it is not kept
    alive. looked: number of the root's call in which its bytes were last checked.
    """

    __slots__ = (
        "_name", "_owner", "_probe", "_ref", "_table", "last_ref", "looked", "placement", "pointer",
        "slot", "version",
    )  # fmt: skip

    def __init__(self, slot: str, tensor: Any, home: Home | None) -> None:
        self.slot = slot
        self._owner, self._table, self._name = home or Home(None, "", "")
        self._ref = weakref.ref(tensor)
        self.pointer, self.looked = 0, -1
        self._probe: Probe | None = None
        self.version: int | None = None
        self.last_ref: Ref | None = None
        self.placement: Placement | None = None

    def remember(self, tensor: Any) -> None:
        """Remember the address of the tensor and a sample of its bytes."""
        self.pointer, self._probe = address_of(tensor), None
        if tensor.is_cpu and tensor.layout is torch.strided and self.pointer and tensor.numel():
            nbytes = tensor.nbytes if tensor.is_contiguous() else tensor.element_size()
            self._probe = Probe(self.pointer, nbytes)

    def looks_the_same(self) -> bool:
        """Whether a sample of the bytes is unchanged. Call it only while the tensor is at the
        remembered address.
        """
        return self._probe is None or self._probe.is_unchanged()

    def tensor(self) -> Any:
        """The tensor, None when it is gone."""
        owner = None if self._owner is None else self._owner()
        if owner is None:
            return self._ref()
        table = owner.__dict__
        value = (table[self._table] if self._table else table).get(self._name)
        return value if isinstance(value, torch.Tensor) else None


class RunsAgain(Protocol):
    """Gives (step, micro-batch) of the calls that a backward pass on this thread runs again, None
    outside of such a recomputation.
    """

    def run_again(self) -> tuple[int, int] | None: ...


class ModuleRoot(Root):
    """A root that is a torch module, with its step counters. calls: outermost calls so far.
    trained: whether a training call began since the last optimiser step; micro: how many did.
    has_stepped: whether an optimiser ever stepped.
    """

    def __init__(self, name: str, ref: Callable[[], Any]) -> None:
        super().__init__(name, ref)
        self.steps: dict[str, int] = {}
        self.micro = 0
        self.calls = 0
        self.trained = self.has_stepped = False
        self.occurrences: dict[tuple[str, int, int, str], dict[str, int]] = {}

    def begin(self, frame: Any, passes: RunsAgain | None = None) -> None:
        """Set phase, step, micro-batch and the shared occurrence counts of an outermost call that
        begins. passes: gives the step of calls that a backward pass runs again.
        """
        frame.root, scope = self, frame.scope
        self.calls += 1
        if torch._C._current_graph_task_id() != -1:
            frame.phase = "recompute"
            again = passes.run_again() if passes is not None else None
            frame.step, frame.micro = again or (self.steps.get("", 0), max(self.micro - 1, 0))
            key = (scope, frame.step, frame.micro, frame.phase)
            frame.counts = self.occurrences.setdefault(key, {})
            return
        frame.phase, frame.counts = "forward", {}
        training = frame.training and torch.is_grad_enabled()
        frame.step = self.steps.get("" if training else scope, 0)
        frame.micro = self.micro if training else 0
        if training:
            self.micro += 1
            self.trained = True
        else:
            self.steps[scope] = frame.step + 1

    @property
    def trained_step(self) -> int:
        """The step that the last training calls belong to. After the first optimiser has ended the
        step, a second optimiser, and training with a loss in parts, still belong to it.
        """
        step = self.steps.get("", 0)
        return step if self.trained else max(0, step - 1)

    def optimizer_stepped(self) -> bool:
        """Note a step of an optimiser. A root that trained since the last one goes on to its next
        step; returns whether it did.
        """
        self.has_stepped = True
        if not self.trained:
            return False
        self.steps = {scope: n + 1 for scope, n in (self.steps or {"": 0}).items()}
        self.steps.setdefault("", 1)
        self.micro, self.trained = 0, False
        self.occurrences.clear()
        return True


def home_of(module: Any, name: str) -> Home | None:
    """Where a module itself holds the tensor called `name`; None for a tensor held deeper."""
    own = vars(module)
    for table in ("_parameters", "_buffers", ""):
        held = own.get(table) if table else own
        # a scripted module's is not a dict
        if isinstance(held, dict) and isinstance(held.get(name), torch.Tensor):
            return Home(weakref.ref(module), table, name)
    return None
