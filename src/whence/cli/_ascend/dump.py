"""`msit llm dump`: run a command and dump what its models compute."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from whence.cli._ascend.words import command, free_path, tell, tell_same, word
from whence.cli._options import option, words_of
from whence.errors import UsageError

_TYPES = ("model", "layer", "op", "kernel", "tensor", "cpu_profiling", "onnx", "stats")
_DUMP = (
    option("--exec CMD", "The command, quoted.", name="command", required=True),
    option(
        "--type ...",
        "What to record; several words are allowed.  [default: tensor model]",
        _TYPES,
        name="types",
    ),
    option("-sd, --only-save-desc", "Statistics only."),
    option(
        "-ids, --ids, --save-operation-ids 3,7_1",
        "Only these tree numbers.",
        name="ids",
        is_flag=False,
        flag_value="",
    ),
    option("-er, --execute-range 0,1000", "First and last token.", default="0,0"),
    option(
        "-child, --save-operation-child",
        "With -ids: also the calls inside them.",
        click.BOOL,
        name="child",
        default=True,
    ),
    option(
        "-time, --save-time",
        "0 inputs, 1 outputs, 2 and 3 both.",
        click.IntRange(0, 3),
        name="when",
        default=3,
    ),
    option(
        "-stp, --save-tensor-part",
        "0 inputs, 1 outputs, 2 both.",
        click.IntRange(0, 2),
        name="part",
        default=2,
    ),
    option(
        "-opname, --operation-name linear,rms",
        "Only classes whose names begin like this; case does not matter.",
    ),
    option("-device, --device-id", "Only this rank.", int, name="device"),
    option(
        "-tiling, --save-tiling",
        "Changes nothing: tiling data stays in the library.",
        name="tiling",
    ),
    option("-symlink, --enable-symlink", "Changes nothing: equal tensors are stored once."),
    option(
        "-config, --config-path FILE",
        "Not supported: what is dumped is chosen when the command starts.",
    ),
    option(
        "-seed, --set-random-seed",
        "Seed every framework, and use deterministic kernels.",
        int,
        name="seed",
        is_flag=False,
        flag_value="2024",
    ),
    option(
        "-o, --output DIR", "The dump becomes a folder in DIR.", show_default=False, default="."
    ),
    option("-l, --log-level", "Changes nothing.", str),
)


def dump_command(tool: str) -> click.Command:
    def dump(command: str, output: str, **values: Any) -> int:
        """Run CMD and dump what its models compute: `whence run`."""
        from whence import api

        options = _options(**values)
        stamp = time.strftime("%Y%m%d_%H%M%S")
        # ait gathers the dumps of all processes in one folder, msit has one for each call.
        folder = Path(output) / ("ait_dump" if tool == "ait" else f"{tool}_dump_{stamp}")
        run = free_path(folder / f"whence-run-{stamp}") if tool == "ait" else folder
        words = [
            f"--{k.replace('_', '-')}{'' if v is True else f' {word(v)}'}"
            for k, v in options.items()
        ]
        tell_same(
            f"{tool} llm dump",
            " ".join(["whence run -o", shlex.quote(str(run)), *words, "--", command]),
        )
        code = api.run_command(words_of(command), str(run), **options)
        if run.exists():  # else nothing was captured
            _lay_out(run, folder, values["types"] or ("tensor", "model"))
        return code

    return command("dump", dump, _DUMP)


def _lay_out(run: Path, folder: Path, types: Sequence[str]) -> None:
    """Write the tool's own files beside the run, and say where they are. What cannot be written is
    told; the run is there.
    """
    from whence import api
    from whence.errors import WhenceError

    try:
        layout = api.lay_out_atb(run, folder, kinds=types)
    except WhenceError as error:
        tell(f"the files of this tool could not be written: {error}")
        return
    for sentence in layout.left_out:
        tell(sentence)
    for layer in layout.layers:
        tell(f"layer {layer.number}: {layer.kind} {layer.name}, {layer.file}")
    if layout.layers:
        last = layout.layers[-1].number
        tell(f"the last layer has number {last}; --ids {last} dumps only that layer")
    # one process: its run goes where its tensors are
    if run != folder and len(layout.tensors) == 1:
        (place,) = layout.tensors.values()
        run = run.rename(place / "whence-run")
    for place in layout.tensors.values():
        tell(f"tensors: {place}")
    if run != folder:
        tell(f"the run: {run}")


def _options(
    types: Sequence[str],
    only_save_desc: bool,
    ids: str | None,
    execute_range: str,
    child: bool,
    when: int,
    part: int,
    operation_name: str | None,
    device: int | None,
    tiling: bool,
    config_path: str | None,
    seed: int | None,
    **_: Any,
) -> dict[str, Any]:
    """The options of `whence run` for the tool's; what has none is told. Raises UsageError."""
    if config_path:
        raise UsageError(
            "-config: what is dumped cannot be changed while the command runs; give -er, -ids "
            "and -opname"
        )
    kinds = set(types or ("tensor", "model"))
    _tell_without_effect(kinds, tiling)
    out: dict[str, Any] = {"steps": _range(execute_range)}
    if kinds & {"op", "kernel"}:
        out["level"] = "op"
    if "stats" in kinds or only_save_desc:
        out["keep"] = "stats"
    elif "tensor" not in kinds:
        out["keep"] = "none"
    slots = {0: "input", 1: "output"}.get(part, {0: "input", 1: "output"}.get(when, "both"))
    if slots != "both":
        out["slots"] = slots
    if ids:
        out["ids"] = ids
        if not child:
            out["no_children"] = True
    if operation_name:
        import re

        out["classes"] = tuple(
            f"re:(?i:{re.escape(name.strip())}.*)" for name in operation_name.split(",")
        )
    if device is not None:
        out["ranks"] = (device,)
    if seed is not None:
        out |= {"seed": seed, "deterministic": True}
    return out


def _tell_without_effect(kinds: set[str], tiling: bool) -> None:
    for kind, why in (
        ("cpu_profiling", "whence ops list RUN has times of operators"),
        ("onnx", "whence show RUN --tree shows the calls"),
    ):
        if kind in kinds:
            tell(f"--type {kind} is not supported: {why}")
    if tiling:
        tell("-tiling changes nothing: tiling data stays in the library")


def _range(text: str) -> tuple[int, int]:
    """ "0,1000" as (0, 1001): both ends count there. Of several pairs what spans them. Raises
    UsageError.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if (
        not numbers
        or len(numbers) % 2
        or any(a > b for a, b in zip(numbers[::2], numbers[1::2], strict=True))
        or min(numbers) < 0
    ):
        raise UsageError(
            f"-er {text!r}: expected pairs of a first and a last token, such as 0,1000"
        )
    first, last = min(numbers), max(numbers)
    if len(numbers) > 2:
        tell(f"-er {text}: tokens {first} to {last} are dumped, including those between the ranges")
    return first, last + 1
