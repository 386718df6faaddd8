"""`dump.json` of an operator dump: what each call was given and made, as JSON beside the run that
holds the elements.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from whence import disk
from whence.records.slots import split_slot


def write(run: Path, path: Path) -> bool:
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
            slots.setdefault(kind, {})[name] = _tensor(opened, ref.record)
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


def _tensor(run: Any, number: int) -> dict[str, Any]:
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
        entry |= {
            "min": figures.min,
            "max": figures.max,
            "mean": figures.mean,
            "nan": figures.nan,
            "inf": figures.inf,
        }
    return entry
