"""`msit llm compare` and `ait debug compare aclcmp`: compare two dumps, or labels."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from whence.cli import _answers, _files
from whence.cli._answers import CODES
from whence.cli._ascend.words import command, free_path, tell, tell_same
from whence.cli._options import option, words_of
from whence.errors import UsageError

_COMPARE = (
    option("-gp, --golden-path DUMP", "The reference.", name="reference", required=True),
    option("-mp, --my-path DUMP", "The target.", name="target", required=True),
    option(
        "-cl, --cmp-level",
        "Which rows the table has.  [default: all]",
        ("token", "logits", "layer", "module", "api"),
        name="level",
    ),
    option("-o, --output DIR", "Folder for the table.", show_default=False, default="."),
    option("--layers DIR", "As `whence compare` takes it."),
    option("-mf, --op-mapping-file DIR", "Not supported: `whence compare --map` takes a map."),
    option(
        "-alg, --custom-algorithms FILE:FUNC",
        "Not supported: metrics are plug-ins (docs/metrics.md).",
    ),
    option("-w, --weight", "Changes nothing: weights are always compared."),
    option("-st, --stats", "Changes nothing: without elements, statistics are compared."),
    option("-l, --log-level", "Changes nothing.", str),
)


def compare_command(tool: str) -> click.Command:
    def compare(
        reference: str,
        target: str,
        level: str | None,
        output: str,
        layers: str | None,
        op_mapping_file: str | None,
        custom_algorithms: str | None,
        **_: Any,
    ) -> int:
        """Compare two dumps and write the tool's table: `whence compare --view msit`."""
        from whence import api
        from whence.cli import _progress
        from whence.report.answer import answer

        for name, value, instead in (
            ("-mf", op_mapping_file, "whence compare --map FILE"),
            ("-alg", custom_algorithms, "a metric plug-in"),
        ):
            if value:
                raise UsageError(f"{name} is not supported; use {instead} (docs/switching.md)")
        tell_same(
            f"{tool} llm compare",
            f"whence compare {shlex.quote(reference)} {shlex.quote(target)} --view msit",
        )

        def log(line: str) -> None:
            click.echo(f"{tool}_llm_logger - INFO - {line}", err=True)

        def show(result: Any) -> None:
            sys.stdout.write(answer(result))
            sys.stdout.flush()

        with _progress.shown() as line:
            result, path = api.cmp_report(
                reference,
                target,
                level=level or "",
                tool=tool,
                output=output,
                say=log,
                show=show,
                progress=line.count,
            )
            if layers is not None:
                result = api.compare_layers(result, output=layers, tell=line.say)
                show(result)
        _answers.kept(result)
        sys.stdout.write(f"written to {path}\n")
        return CODES[result.status]

    return command("compare", compare, _COMPARE)


_ACLCMP = (
    option("--exec CMD", "The command, quoted.", name="command"),
    option(
        "-o, --output DIR",
        "Folder of the comparison.  [default: ./cmp_dump_data, and ./cmp_report.csv]",
    ),
    option("--golden-path RUN", "Run with the labels of the reference.", name="reference"),
    option("--my-path RUN", "Run with the labels of the target.", name="target"),
    option("--clean", "Changes nothing: whence scrub removes elements from a run."),
)


def aclcmp_command() -> click.Command:
    def aclcmp(
        command: str | None,
        output: str | None,
        reference: str | None,
        target: str | None,
        clean: bool,
    ) -> int:
        """Run CMD, take its labels (set_label) and compare their two sides: `whence run
        --compare`.
        """
        from whence import api
        from whence.report.labels import labels_answer

        folder = output or str(free_path(Path("cmp_dump_data")))
        if reference and target and not command:
            runs = f"{shlex.quote(reference)} {shlex.quote(target)}"
            tell_same("ait debug compare aclcmp", f"whence labels {runs} -o {shlex.quote(folder)}")
            result: Any = api.compare_labels(reference, target, output=folder)
            code = 0
        elif command and not reference and not target:
            words = (
                f"whence run --compare -o {shlex.quote(folder)} --library acltransformer -- "
                f"{command}"
            )
            tell_same("ait debug compare aclcmp", words)
            code, result = api.run_labels(words_of(command), folder, library="acltransformer")
            if result is None:
                return code
        else:
            raise UsageError("aclcmp takes --exec CMD, or --golden-path and --my-path")
        if clean:
            tell("--clean changes nothing: whence scrub removes elements from a run")
        sys.stdout.write(labels_answer(result, folder))
        _answers.kept(result, folder)
        if not output:
            table = free_path(Path("cmp_report.csv"))
            _files.write(
                table, (Path(folder) / "cmp_report.csv").read_text(encoding="utf-8"), force=False
            )
            sys.stdout.write(f"written to {table}\n")
        return code or CODES[result.status]

    return command("aclcmp", aclcmp, _ACLCMP)
