"""The tensors of a predictor's run: which record the name shown by a hook currently has."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from whence import dtypes
from whence.frameworks import paddle_arrays as tensors
from whence.frameworks.paddle_programs import FOLDED, Program
from whence.instrument.engines.values import Seen
from whence.instrument.paddle.call_forms import OperatorFrame
from whence.instrument.paddle.tensor_identity import FindExternal, SeenTensor, Tensors, look
from whence.instrument.session import Form, Origin, Session


class RunTensors:
    """Records the tensors of one predictor, run by run.

    name: strips from a hook's name what changes between processes. feeds: names of the predictor's
    inputs. named: (record, digest) by name, as last shown in this run; the record is -1 where the
    tensor was not recorded. folds: whether a constant folded by Paddle was seen.
    """

    def __init__(
        self,
        session: Session,
        find: FindExternal | None,
        name: Callable[[str], str],
        feeds: Collection[str],
        program: Program | None,
    ) -> None:
        self.session, self._name, self.feeds, self.program = session, name, feeds, program
        self.tensors = Tensors(session, find)
        self.folds = False
        self._names: dict[str, str] = {}
        self._constant: dict[str, bool] = {}
        self.clear()

    def clear(self) -> None:
        """Forget the run."""
        self.named: dict[str, tuple[int, bytes]] = {}
        self._last_seen: dict[str, SeenTensor | None] = {}
        self._later: dict[tuple[int, str], tuple[Seen, bytes]] = {}

    def begin(self) -> None:
        """A run begins."""
        self.clear()
        self.tensors.begin()

    def skip(self, name: str) -> None:
        """Note that the current tensor of this name is not recorded."""
        self.named[name] = (-1, b"")
        self._last_seen.pop(name, None)

    def plain(self, name: str) -> str:
        """A hook's name without what changes between processes."""
        plain = self._names.get(name)
        if plain is None:
            plain = self._names[name] = self._name(name)
        return plain

    def is_parameter(self, name: str) -> bool:
        """Whether this is a parameter or a constant."""
        if name in self.named:
            return False
        constant = self._constant.get(name)
        if constant is None:
            constant = self._constant[name] = name not in self.feeds and self._is_constant(name)
        return constant

    def _is_constant(self, name: str) -> bool:
        if self.program is not None and name in self.program.parameters:
            return True
        if name.startswith(FOLDED):
            self.folds = True
            return True
        return (
            "inner_var" not in name
            and "block_arg" not in name
            and (self.program is None or not self.program.writes(name))
        )

    def read(self, name: str, tensor: Any, top: OperatorFrame, *, waits: bool) -> tuple[int, str]:
        """(record, edge) of a tensor that the operator reads. waits: whether the operator is
        selected is known only when its outputs have names; until then the bytes are kept, and the
        record is -1.
        """
        previous = self._last_seen.get(name)
        if previous is not None and self.tensors.unmoved(previous, tensor, top.order):
            return previous.record, "content"
        sight = look(tensor)
        if sight.why:
            return self.tensors.unreadable(sight), ""
        digest = sight.digest()
        named = self.named.get(name)
        if named is not None and named[1] == digest and named[0] >= 0:
            self._last_seen[name] = self.tensors.remember(sight, digest, named[0], top.order)
            return named[0], "content"
        number = self.tensors.known(sight, digest, top.order)
        edge = "content"
        if number is None and waits:
            data = (
                sight.data
                if sight.data is not None
                else tensors.viewed(sight.address, sight.nbytes)
            ).copy()
            self._later[top.order, name] = (sight._replace(address=0, data=data), digest)
            return -1, ""
        if number is None:
            plain = self.plain(name)
            origin = Origin(plain, f"input.{plain}", top.op_type, top.keep)
            number = self.tensors.record(tensor, sight, digest, origin)
            self._last_seen[name] = self.tensors.remember(sight, digest, number, top.order)
            edge = ""
        self.named[name] = (number, digest)
        return number, edge

    def take(
        self,
        value: Any,
        sight: Seen,
        name: str,
        slot: str,
        scope: str,
        top: OperatorFrame,
        *,
        since: int | None = None,
    ) -> tuple[int, str]:
        """(record, edge) of a tensor that this call made or that the root was given. since: reuse a
        record that was seen from this call number on.
        """
        self._last_seen.pop(name, None)
        if sight.why:
            number = self.tensors.unreadable(sight)
            self.named[name] = (number, b"")
            return number, ""
        digest = sight.digest()
        record = (
            self.tensors.known(sight, digest, top.order, since=since) if since is not None else None
        )
        edge = "content" if record is not None else ""
        if record is None:
            origin = Origin(scope, slot, top.op_type, top.keep)
            record = self.tensors.record(value, sight, digest, origin)
            self._last_seen[name] = self.tensors.remember(sight, digest, record, top.order)
        self.named[name] = (record, digest)
        return record, edge

    def rewrote(self, name: str, tensor: Any, top: OperatorFrame) -> None:
        """Record a parameter that this operator may have written (batch norm) as a mutation, if its
        bytes changed.
        """
        record = top.params[name][0]
        if record < 0:
            return
        number, _ = self.tensors.parameter(
            tensor, name, Origin(top.op_type, f"mutated.{name}", top.op_type), sure=True
        )
        if number != record:
            top.outputs[name] = (number, "")

    def fetched(self, predictor: Any, name: str, top: OperatorFrame) -> tuple[int, str]:
        """(record, edge) of an output that no hook showed."""
        try:
            value = tensors.of_handle(predictor.get_output_handle(name))
        except Exception as error:  # noqa: BLE001 - what the program will see when it asks for it
            why = f"Paddle does not hand it out: {' '.join(str(error).split())[:200]}"
            return self.session.unreadable(Form("", (), device=""), why), ""
        return self.take(value, of_array(value), name, f"output.{name}", "", top)

    def take_later(self, frame: OperatorFrame) -> None:
        """Record the inputs whose bytes were kept by `read`."""
        for name in [name for name, (record, _) in frame.inputs.items() if record < 0]:
            waiting = self._later.pop((frame.order, name), None)
            if waiting is not None:
                sight, digest = waiting
                named = self.named.get(name)
                if named is None or named[0] < 0 or named[1] != digest:
                    plain = self.plain(name)
                    origin = Origin(plain, f"input.{plain}", frame.op_type, frame.keep)
                    number = self.tensors.record(sight.data, sight, digest, origin)
                    named = self.named[name] = (number, digest)
                frame.inputs[name] = (named[0], "")


def of_array(array: np.ndarray[Any, Any]) -> Seen:
    """The form of an array on the host, as of a tensor."""
    data = array.reshape(-1).view(np.uint8)
    try:
        return Seen(dtypes.of(array).name, array.shape, 0, data.size, data)
    except KeyError:
        why = f"dtype {array.dtype} has no host form"
        return Seen(str(array.dtype), array.shape, why=why, device="")
