"""`ait` and `msit`, one tool of two ages: their commands, as words of ours."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from whence.cli import _files
from whence.errors import UsageError

_TYPES = ("model", "layer", "op", "kernel", "tensor", "cpu_profiling", "onnx", "stats")
_CONTEXT = {"help_option_names": ["-h", "--help"]}


class Several(click.Command):
    """A command with options that take several words: `--type model layer` is `--type model --type
    layer`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell them so that click reads them."""
        many = {
            name
            for option in self.params
            if isinstance(option, click.Option) and option.multiple
            for name in option.opts
        }
        spelt: list[str] = []
        current = ""
        for word in args:
            if word.startswith("-"):
                current = word if word in many else ""
            elif current and spelt[-1] != current:
                spelt.append(current)
            spelt.append(word)
        return super().parse_args(ctx, spelt)


def group(tool: str, words: str | None, *, debug: bool) -> click.Group:
    """All commands of `ait` (which had `debug compare aclcmp`) or `msit`. words: for its help."""
    whole = click.Group(tool, help=words, context_settings=_CONTEXT)
    llm = click.Group("llm", help="Dump what a model computes; compare two dumps.")
    llm.add_command(_dump(tool))
    llm.add_command(_compare(tool))
    whole.add_command(llm)
    if debug:
        outer, compare = (
            click.Group("debug", help="Labels of two programs in one process."),
            click.Group("compare", help="Their comparison."),
        )
        compare.add_command(_aclcmp())
        outer.add_command(compare)
        whole.add_command(outer)
    return whole


def _dump(tool: str) -> click.Command:
    @click.command("dump", cls=Several, context_settings=_CONTEXT)
    @click.option("--exec", "command", required=True, metavar="CMD", help="The command, quoted.")
    @click.option(
        "--type",
        "types",
        multiple=True,
        type=click.Choice(_TYPES),
        help="What to record, several words.  [default: tensor model]",
    )
    @click.option("-sd", "--only-save-desc", is_flag=True, help="Statistics only.")
    @click.option(
        "-ids",
        "--ids",
        "--save-operation-ids",
        "ids",
        is_flag=False,
        flag_value="",
        metavar="3,7_1",
        help="Only these tree numbers.",
    )
    @click.option(
        "-er",
        "--execute-range",
        default="0,0",
        show_default=True,
        metavar="0,1000",
        help="Tokens, first and last.",
    )
    @click.option(
        "-child",
        "--save-operation-child",
        "child",
        type=click.BOOL,
        default=True,
        help="With -ids: what they call too.",
    )
    @click.option(
        "-time",
        "--save-time",
        "when",
        type=click.IntRange(0, 3),
        default=3,
        show_default=True,
        help="0 inputs, 1 outputs, 2 and 3 both.",
    )
    @click.option(
        "-stp",
        "--save-tensor-part",
        "part",
        type=click.IntRange(0, 2),
        default=2,
        show_default=True,
        help="0 inputs, 1 outputs, 2 both.",
    )
    @click.option(
        "-opname",
        "--operation-name",
        metavar="linear,rms",
        help="Only classes whose name begins so, in capital letters or small.",
    )
    @click.option("-device", "--device-id", "device", type=int, help="Only this rank.")
    @click.option(
        "-tiling",
        "--save-tiling",
        "tiling",
        is_flag=True,
        help="Changes nothing: tiling is the library's own.",
    )
    @click.option(
        "-symlink",
        "--enable-symlink",
        is_flag=True,
        help="Changes nothing: equal tensors are stored once.",
    )
    @click.option(
        "-config",
        "--config-path",
        metavar="FILE",
        help="Not there: what is dumped is chosen when the command starts.",
    )
    @click.option(
        "-seed",
        "--set-random-seed",
        "seed",
        is_flag=False,
        flag_value="2024",
        type=int,
        help="Seed every framework; deterministic kernels.",
    )
    @click.option("-o", "--output", default=".", metavar="DIR", help="The dump is a folder in it.")
    @click.option("-l", "--log-level", help="Changes nothing.")
    def dump(command: str, output: str, **given: Any) -> int:
        """Run CMD and dump what its models compute: `whence run`."""
        from whence import api

        options = _options(**given)
        stamp = time.strftime("%Y%m%d_%H%M%S")
        # ait gathers the dumps of all processes in one folder, msit has one for each call.
        folder = Path(output) / ("ait_dump" if tool == "ait" else f"{tool}_dump_{stamp}")
        run = _free(folder / f"whence-run-{stamp}") if tool == "ait" else folder
        words = [
            f"--{k.replace('_', '-')}{'' if v is True else f' {_word(v)}'}"
            for k, v in options.items()
        ]
        _same(
            f"{tool} llm dump",
            " ".join(["whence run -o", shlex.quote(str(run)), *words, "--", command]),
        )
        code = api.run_command(shlex.split(command), str(run), **options)
        _lay_out(run, folder, given["types"] or ("tensor", "model"))
        return code

    return dump


def _lay_out(run: Path, folder: Path, types: Sequence[str]) -> None:
    """Write the tool's own files beside the run, and say where they are. What cannot be written is
    told; the run is there.
    """
    from whence import api
    from whence.errors import WhenceError

    try:
        laid = api.lay_out_atb(run, folder, kinds=types)
    except WhenceError as error:
        _tell(f"the tool's own files are not there: {error}")
        return
    for sentence in laid.left_out:
        _tell(sentence)
    for layer in laid.layers:
        _tell(f"layer {layer.number}: {layer.kind} {layer.name}, {layer.file}")
    if laid.layers:
        _tell(
            f"the last layer is number {laid.layers[-1].number}: --ids {laid.layers[-1].number} "
            "dumps it alone"
        )
    if run != folder and len(laid.tensors) == 1:  # one process: its run goes where its tensors are
        (place,) = laid.tensors.values()
        run = run.rename(place / "whence-run")
    for place in laid.tensors.values():
        _tell(f"tensors: {place}")
    if run != folder:
        _tell(f"the run: {run}")


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
    """The tool's options as those of `whence run`; what has no counterpart is told. Raises
    UsageError.
    """
    if config_path:
        raise UsageError(
            "-config: what is dumped cannot be changed while the command runs; give -er, -ids "
            "and -opname"
        )
    kinds = set(types or ("tensor", "model"))
    for kind, why in (
        ("cpu_profiling", "whence ops list RUN has times of operators"),
        ("onnx", "whence show RUN --tree shows the calls"),
    ):
        if kind in kinds:
            _tell(f"--type {kind} is not there: {why}")
    if tiling:
        _tell("-tiling changes nothing: tiling is the library's own")
    out: dict[str, Any] = {"steps": _range(execute_range)}
    if kinds & {"op", "kernel"}:
        out["level"] = "op"
    if "stats" in kinds or only_save_desc:
        out["keep"] = "stats"
    elif "tensor" not in kinds:
        out["keep"] = "none"
    wanted = {0: "input", 1: "output"}.get(part, {0: "input", 1: "output"}.get(when, "both"))
    if wanted != "both":
        out["slots"] = wanted
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
        raise UsageError(f"-er {text!r}: pairs of a first and a last token, such as 0,1000")
    first, last = min(numbers), max(numbers)
    if len(numbers) > 2:
        _tell(f"-er {text}: tokens {first} to {last} are dumped, those between the ranges too")
    return first, last + 1


def _compare(tool: str) -> click.Command:
    @click.command("compare", context_settings=_CONTEXT)
    @click.option(
        "-gp", "--golden-path", "golden", required=True, metavar="DUMP", help="The reference."
    )
    @click.option("-mp", "--my-path", "mine", required=True, metavar="DUMP", help="The target.")
    @click.option(
        "-cl",
        "--cmp-level",
        "level",
        type=click.Choice(["token", "logits", "layer", "module", "api"]),
        help="Rows of the table.  [default: all]",
    )
    @click.option("-o", "--output", default=".", metavar="DIR", help="Folder for the table.")
    @click.option(
        "-mf",
        "--op-mapping-file",
        metavar="DIR",
        help="Not there: whence compare --map takes a map.",
    )
    @click.option(
        "-alg",
        "--custom-algorithms",
        metavar="FILE:FUNC",
        help="Not there: metrics are plug-ins (docs/metrics.md).",
    )
    @click.option(
        "-w", "--weight", is_flag=True, help="Changes nothing: weights are always compared."
    )
    @click.option(
        "-st",
        "--stats",
        is_flag=True,
        help="Changes nothing: statistics are compared where there are no elements.",
    )
    @click.option("-l", "--log-level", help="Changes nothing.")
    def compare(
        golden: str,
        mine: str,
        level: str | None,
        output: str,
        op_mapping_file: str | None,
        custom_algorithms: str | None,
        **_: Any,
    ) -> int:
        """Compare two dumps and write the tool's table: `whence compare --view msit`."""
        from whence import api, report
        from whence.cli import _progress
        from whence.cli.compare import CODES

        for name, value, instead in (
            ("-mf", op_mapping_file, "whence compare --map FILE"),
            ("-alg", custom_algorithms, "a metric plug-in"),
        ):
            if value:
                raise UsageError(f"{name} is not there; {instead} does that (docs/switching.md)")
        _same(
            f"{tool} llm compare",
            f"whence compare {shlex.quote(golden)} {shlex.quote(mine)} --view msit",
        )

        def log(line: str) -> None:
            click.echo(f"{tool}_llm_logger - INFO - {line}", err=True)

        def show(result: Any) -> None:
            sys.stdout.write(report.answer(result))
            sys.stdout.flush()

        with _progress.shown() as count:
            result, path = api.cmp_report(
                golden,
                mine,
                level=level or "",
                tool=tool,
                output=output,
                say=log,
                show=show,
                progress=count,
            )
        sys.stdout.write(f"written to {path}\n")
        return CODES[result.status]

    return compare


def _aclcmp() -> click.Command:
    @click.command("aclcmp", context_settings=_CONTEXT)
    @click.option("--exec", "command", metavar="CMD", help="The command, quoted.")
    @click.option(
        "-o",
        "--output",
        metavar="DIR",
        help="Folder of the comparison.  [default: ./cmp_dump_data, and ./cmp_report.csv]",
    )
    @click.option(
        "--golden-path",
        "golden",
        metavar="RUN",
        help="Labels of the reference, of a run of its own.",
    )
    @click.option("--my-path", "mine", metavar="RUN", help="Labels of the target.")
    @click.option(
        "--clean", is_flag=True, help="Changes nothing: whence scrub removes elements from a run."
    )
    def aclcmp(
        command: str | None, output: str | None, golden: str | None, mine: str | None, clean: bool
    ) -> int:
        """Run CMD, take its labels (set_label) and compare their two sides: `whence run
        --compare`.
        """
        from whence import api, report
        from whence.cli.compare import CODES

        folder = output or str(_free(Path("cmp_dump_data")))
        if golden and mine and not command:
            _same(
                "ait debug compare aclcmp",
                f"whence labels {shlex.quote(golden)} {shlex.quote(mine)} -o {shlex.quote(folder)}",
            )
            result: Any = api.compare_labels(golden, mine, output=folder)
            code = 0
        elif command and not golden and not mine:
            words = (
                f"whence run --compare -o {shlex.quote(folder)} --library acltransformer -- "
                f"{command}"
            )
            _same("ait debug compare aclcmp", words)
            code, result = api.run_labels(shlex.split(command), folder, library="acltransformer")
            if result is None:
                return code
        else:
            raise UsageError("aclcmp takes --exec CMD, or --golden-path and --my-path")
        if clean:
            _tell("--clean changes nothing: whence scrub removes elements from a run")
        sys.stdout.write(report.labels_answer(result, folder))
        if not output:
            table = _free(Path("cmp_report.csv"))
            _files.write(
                table, (Path(folder) / "cmp_report.csv").read_text(encoding="utf-8"), force=False
            )
            sys.stdout.write(f"written to {table}\n")
        return code or CODES[result.status]

    return aclcmp


def _free(path: Path) -> Path:
    """`path`, numbered (`name-2.csv`) where it exists: nothing that was written before is lost."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def _word(value: Any) -> str:
    """A value of an option as it is written on the command line."""
    if isinstance(value, tuple):
        return (
            f"{value[0]}:{value[1]}"
            if all(isinstance(v, int) for v in value) and len(value) == 2
            else ",".join(map(str, value))
        )
    return shlex.quote(str(value))


def _same(theirs: str, ours: str) -> None:
    _tell(f"{theirs} is  {ours}")


def _tell(text: str) -> None:
    click.echo(f"whence: {text}", err=True)
