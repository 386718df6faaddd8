"""torch_xray (Kunlun): the module dump `PrecisionDebugger`, and the operator dump `begin_dump` /
`end_dump`.

    from whence.compat.torch_xray import PrecisionDebugger

    debugger = PrecisionDebugger(dump_path="./dump", hook_name="dump", rank=[0], step=[1, 2], model=model)
    debugger.start()                        # in every step, before the model is called

writes `globalrank-<N>_localrank-<N>.h5` and `..._summary.csv` into dump_path, which is a run of
whence too.

`dump.json` of an operator dump says what each call was given and made, beside the run that holds
the elements.
"""  # noqa: E501

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence import disk, extras
from whence.compat._said import once, same_as, without
from whence.compat._steps import Stepped, numbers
from whence.records.slots import split_slot

if TYPE_CHECKING:
    from whence.api import Dump

__all__ = ["PrecisionDebugger", "begin_dump", "end_dump"]

DEBUG = 0x102
"""X_DEBUG: 0x2 operators with shapes, dtypes and range; 0x100 into files. There is no other kind
here.
"""


class PrecisionDebugger(Stepped):
    """Dumps what the modules of a model are given and make, between `start` and `stop`.

    dump_path: folder of the dump. hook_name: "dump", the only one. rank, step: those wanted, None
    for all; ranks count from 0, steps from 1, as the groups of the file do. model: a
    torch.nn.Module, None for every model that is called. dump_torch_api: every operator too. A
    debugger that is made anew with the same dump_path in the same process goes on with the dump of
    the one before. Nothing of the program changes. Raises UsageError for what is not understood,
    StoreFailed when nothing can be written.
    """

    def __init__(
        self,
        dump_path: str | os.PathLike[str] = "./xray_dump",
        hook_name: str = "dump",
        rank: Sequence[int] | int | None = None,
        step: Sequence[int] | int | None = None,
        model: Any = None,
        dump_torch_api: bool = False,
        **others: Any,
    ) -> None:
        from whence.errors import UsageError

        if hook_name != "dump":
            raise UsageError(f"PrecisionDebugger(hook_name={hook_name!r}): only 'dump' is known")
        without(
            "PrecisionDebugger",
            others,
            {},
            ("dump_path", "hook_name", "rank", "step", "model", "dump_torch_api"),
        )
        self._path, self._model = Path(dump_path), model
        steps = numbers("step", step)
        if steps is not None and 0 in steps:
            raise UsageError(
                "PrecisionDebugger(step=...): steps count from 1, the first inference is step 1"
            )
        self._steps = None if steps is None else frozenset(number - 1 for number in steps)
        ranks = numbers("rank", rank)
        self._options: dict[str, Any] = {"level": "op"} if dump_torch_api else {}
        if ranks is not None:
            self._options["ranks"] = tuple(ranks)

    def start(self, model: Any = None) -> None:
        """Take what is called from here on. Called again in one step it does nothing; after calls
        of the model the next step begins.
        """
        from whence.api import Dump

        if self._dump is None:
            self._dump = self._of_this_process(model)
        if self._dump is None:
            calls = "every operator" if "level" in self._options else "modules"
            same_as(
                "torch_xray.PrecisionDebugger",
                f"whence run -o RUN{' --level op' if calls != 'modules' else ''} -- CMD",
            )
            self._dump = Dump(
                self._path,
                self._model if model is None else model,
                steps=self._steps,
                layout=_layout(),
                layout_options={"leaves": calls == "modules", "local_ranks": _local_ranks()},
                first=1,
                **self._options,
            )
        self._dump.mark()
        self._dump.resume()

    def _of_this_process(self, model: Any) -> Dump | None:
        """The dump that an earlier debugger of this process began in the same folder. Raises
        UsageError where it is of another model.
        """
        from whence.api import opened_dump
        from whence.errors import UsageError

        dump = opened_dump(self._path)
        asked_model = self._model if model is None else model
        if dump is not None and dump.model is not asked_model:
            kinds = [
                type(m).__name__ if m is not None else "every model"
                for m in (dump.model, asked_model)
            ]
            raise UsageError(
                f"PrecisionDebugger(dump_path={str(self._path)!r}): this process already dumps "
                f"{kinds[0]} there; "
                f"choose another dump_path for {kinds[1]}"
            )
        return dump

    def close(self) -> None:
        """End the dump; it ends with the process else."""
        if self._dump is not None:
            self._dump.close()


def _layout() -> str:
    """HDF5 is loaded here: a process that loads it only as it ends crashes there (h5py 3.16)."""
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        once(
            f"dump_path becomes a run of whence without .h5 and .csv ({error}): "
            f"{extras.install('h5py')}"
        )
        return ""
    return "torch_xray"


def _local_ranks() -> dict[int, int]:
    """Rank of this process -> its rank on this machine, as its launcher says."""
    rank, local = (os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK"))
    return {int(rank): int(local)} if rank.isdigit() and local.isdigit() else {}


def begin_dump(
    X_DEBUG: int | str | None = None,  # noqa: N803
    X_DEDUP: bool | str | None = None,  # noqa: N803
    X_DUMP_NUM: int | str | None = None,  # noqa: N803
    **others: Any,
) -> None:
    """Record every operator until `end_dump`, into `xray_debug/proc_<pid>/` of the current folder:
    `dump/` and `dump.json`.

    X_DEBUG: 0x102. X_DEDUP: of equal calls one. X_DUMP_NUM: about so many calls of each operator,
    chosen by chance with a fixed seed, keep their elements; 0: none, None: all. What is not given
    is read from the environment. With X_DEBUG there the import alone begins, and the first call of
    this begins anew. Raises UsageError.
    """
    from whence import api

    without("begin_dump", others, {}, ("X_DEBUG", "X_DEDUP", "X_DUMP_NUM"))
    if _begun and _begun[0][1] == _AT_IMPORT:
        api.end_dump()
        _begun.clear()
    debug, dedup, number = (
        _given(*pair)
        for pair in (("X_DEBUG", X_DEBUG), ("X_DEDUP", X_DEDUP), ("X_DUMP_NUM", X_DUMP_NUM))
    )
    if debug is not None and debug != DEBUG:
        once(
            f"begin_dump(X_DEBUG={debug:#x}) is taken as {DEBUG:#x}: operators with shapes, "
            "dtypes, range and elements"
        )
    same_as("torch_xray.begin_dump", "whence run --level op [--dedup --samples N] -o RUN -- CMD")
    folder = _begun[0][0] if _begun else Path("xray_debug").absolute() / f"proc_{os.getpid()}"
    api.begin_dump(folder / "dump", force=True, dedup=bool(dedup), samples=number)
    _begun[:] = [(folder, "")]


def end_dump(clear_context: bool = True) -> None:
    """End it. clear_context: finish the dump and write `dump.json`; False only stops, and
    `begin_dump` goes on.
    """
    from whence import api

    api.end_dump(clear_context)
    if not clear_context or not _begun:
        return
    folder = _begun.pop()[0]
    if _write_operators(folder / "dump", folder / "dump.json"):
        once(f"{folder} is written;  whence xray jprof {folder / 'dump.json'}  makes its tests")


def _given(name: str, value: int | str | bool | None) -> int | None:
    """An argument, or the variable of its name: a number (0x102 too) or True and False."""
    from whence.errors import UsageError

    text = os.environ.get(name) if value is None else value
    if text is None or text == "":
        return None
    if isinstance(text, str) and text.lower() in ("true", "false"):
        return int(text.lower() == "true")
    try:
        return int(text, 0) if isinstance(text, str) else int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number") from None


_AT_IMPORT = "at import"
_begun: list[tuple[Path, str]] = []  # the region that is open: its folder, and what opened it
atexit.register(end_dump)
if os.environ.get("X_DEBUG"):
    begin_dump()
    _begun[:] = [(_begun[0][0], _AT_IMPORT)]


def _write_operators(run: Path, path: Path) -> bool:
    """Write the operators of a run; whether there are any. Elements stay in the run, each tensor
    says as which record of it.

    {version, tool, framework, device, run, records: [{index, name, op, args, outputs, count,
    first_stack, seconds}]}; tensors {shape, dtype, stride, device, min, max, mean, nan, inf,
    record}. count: with the equal calls that were left out. Raises UnreadableRun.
    """
    from whence import api
    from whence._version import __version__
    from whence.errors import UnreadableRun

    try:
        opened = api.open_run(str(run))
    except UnreadableRun:
        return False
    repeats = {
        group.calls[0]: 1 + group.count - len(group.calls)
        for group in api.signatures(opened)
        if group.calls
    }
    records: list[dict[str, Any]] = []
    for call in opened.calls:
        if call.kind != "operator":
            continue
        slots: dict[str, dict[str, Any]] = {"input": {}, "output": {}, "mutated": {}}
        for ref in call.refs:
            kind, name = split_slot(ref.slot)
            slots.setdefault(kind, {})[name] = _tensor_as_json(opened, ref.record)
        plain = {
            name: value for name, value in call.arguments.items() if name not in slots["input"]
        }
        records.append(
            {
                "index": len(records),
                "name": f"{call.id:05d}-{call.op.partition('.')[0]}",
                "op": call.op,
                "module": call.scope,
                "phase": call.phase,
                "args": {**slots["input"], **plain},
                "outputs": {
                    **slots["output"],
                    **{f"mutated.{k}": v for k, v in slots["mutated"].items()},
                },
                "count": repeats.get(call.id, 1),
                "first_stack": call.source,
                "seconds": call.seconds,
            }
        )
    devices = sorted({record.device for record in opened.records if record.device})
    whole = {
        "version": 1,
        "tool": f"whence {__version__}",
        "framework": "torch",
        "device": devices[0] if devices else "cpu",
        "run": run.name,
        "records": records,
    }
    disk.write_file(path, json.dumps(whole, indent=1, default=str) + "\n")
    return True


def _tensor_as_json(run: Any, number: int) -> dict[str, Any]:
    record = run.records[number]
    entry: dict[str, Any] = {
        "shape": list(record.shape),
        "dtype": f"torch.{record.dtype}",
        "stride": list(record.stride),
        "device": record.device,
        "record": number,
    }
    figures = record.statistics
    if figures is not None:
        entry |= {name: getattr(figures, name) for name in ("min", "max", "mean", "nan", "inf")}
    return entry
