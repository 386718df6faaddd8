"""Makes a program continue with the tokens of another run: after each call of the model, its logits
are replaced so that only that token can be chosen.

The model's own logits are recorded before. Any way to pick the token (argmax, top-k, sampling,
`generate`) then picks the forced one, so that the text, the cache and the end of generation match
the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whence.frameworks.torch_trees import rebuilt
from whence.instrument.session import Session
from whence.instrument.torch.logits import logits_of, tokens_of, widest
from whence.instrument.torch.modes import ModesOff, NoFunctions
from whence.instrument.wording import raised

Tokens = tuple[int, ...]


@dataclass(slots=True)
class _Row:
    """One row of the batch: the reference sequence that it follows (None for none), and how many of
    its tokens the row has got so far.
    """

    sequence: Tokens | None = None
    fed: int = 0


class ForcedTokens:
    """Feeds `sequences`, the tokens of the reference starting with the prompt. path: of the
    reference, for notes.
    """

    def __init__(self, session: Session, sequences: Sequence[Tokens], path: str) -> None:
        self._session, self._path = session, path
        self._free = list(sequences)
        self._all = list(sequences)
        self._rows: dict[str, list[_Row]] = {}
        self._vocabulary: dict[str, int] = {}
        self._tokens = 0
        self._noted: set[str] = set()

    def left(self, frame: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """The value that the program gets from a call of the model that returned `out`."""
        if (
            frame.parent is not None
            or frame.scope
            or frame.phase != "forward"
            or self._session.failed
        ):
            return out
        try:
            with ModesOff() if torch._C._len_torch_dispatch_stack() else NoFunctions():
                arguments = {str(i): v for i, v in enumerate(args)} | kwargs
                return self._left(
                    frame, {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}, out
                )
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            self._refuse(frame, raised(error))
            return out

    def finish(self) -> None:
        """Note in the run how many tokens were forced."""
        self._session.note("forced", f"{self._tokens} tokens of {self._path} forced")

    def _left(self, frame: Any, inputs: dict[str, Any], out: Any) -> Any:
        ids, name = tokens_of(inputs), frame.root.name
        if name not in self._vocabulary:
            self._vocabulary[name] = widest(frame.module)
        named_logits = None if ids is None else logits_of(out, ids, self._vocabulary[name])
        if named_logits is None:
            self._refuse(
                frame, "it was given no token ids" if ids is None else "it returns no logits"
            )
            return out
        slot, logits = named_logits
        rows = [[int(t) for t in row] for row in (ids[None] if ids.ndim == 1 else ids).tolist()]
        bounds = _real(inputs, len(rows), len(rows[0]))
        new = logits.detach().clone()
        for row, (tokens, (start, stop)) in enumerate(zip(rows, bounds, strict=True)):
            token = self._next(frame, row, len(rows), tuple(tokens[start:stop]))
            if token is not None and token < logits.shape[-1]:
                place = _place(logits, ids, row, stop)
                best = new[place].nan_to_num().max()
                new[place] = -torch.inf
                new[place][token] = best
                self._tokens += 1
        return rebuilt(out, lambda where, tensor: new if where == slot else tensor)

    def _next(self, frame: Any, row: int, batch: int, tokens: Tokens) -> int | None:
        """The token that follows those the row has got so far, None where the reference has
        none.
        """
        rows = self._rows.get(frame.root.name, [])
        if len(rows) != batch:
            rows = self._rows[frame.root.name] = [_Row() for _ in range(batch)]
        now, n = rows[row], len(tokens)
        if now.sequence is not None and tokens == now.sequence[now.fed : now.fed + n]:
            now.fed += n
        elif now.sequence is not None and n > now.fed and tokens == now.sequence[:n]:
            now.fed = n
        else:
            now.sequence, now.fed = self._starting(tokens), n
            if now.sequence is None:
                self._refuse(
                    frame, f"row {row} goes another way than every sequence of {self._path}"
                )
        if now.sequence is None or now.fed >= len(now.sequence):
            return None
        return now.sequence[now.fed]

    def _starting(self, tokens: Tokens) -> Tokens | None:
        """A reference sequence that starts with these tokens. Each is used once as long as unused
        ones are left.
        """
        for pool in (self._free, self._all):
            sequence = next((s for s in pool if s[: len(tokens)] == tokens), None)
            if sequence is not None:
                if pool is self._free:
                    self._free.remove(sequence)
                return sequence
        return None

    def _refuse(self, frame: Any, why: str) -> None:
        if why not in self._noted:
            self._noted.add(why)
            name = frame.root.name
            self._session.note(
                "force-refused",
                f"{name} at step {frame.step}: tokens were not forced: {why}",
                "",
                frame.step,
            )


def _real(inputs: dict[str, Any], batch: int, width: int) -> list[tuple[int, int]]:
    """(start, stop) of the real tokens of each row, from the attention mask."""
    best = next(
        (
            (n, t)
            for n, t in inputs.items()
            if "mask" in n and t.ndim == 2 and t.shape[0] == batch and t.shape[1] >= width
        ),
        None,
    )
    if best is None:
        return [(0, width)] * batch
    name, mask = best
    lines = ((mask[:, -width:] == 0) if "pad" in name else (mask[:, -width:] != 0)).tolist()
    return [
        (line.index(True), width - line[::-1].index(True)) if any(line) else (0, width)
        for line in lines
    ]


def _place(logits: Any, ids: Any, row: int, stop: int) -> tuple[int, ...]:
    """Index of the logits of a row's last token."""
    if logits.ndim == 3:
        return row, max(stop - (ids.shape[1] - logits.shape[1]), 1) - 1
    return (row,) if ids.ndim == 2 else (logits.shape[0] - 1,)
