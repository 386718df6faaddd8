"""Serve whence to a coding agent, over stdio (MCP).

\b
    whence mcp                                 an MCP client starts this, and talks to it
    {"mcpServers": {"whence": {"command": "whence", "args": ["mcp"]}}}

Tools: capture, compare, show, trace, repro. They do what the commands of the same names do, in the
folder where the server was started, and answer with the same JSON, of 20 kB at most; so are errors
(`error`, `kind`). capture runs the commands that the agent gives, with your rights. Needs the
package mcp (docs/answer.md).
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from whence.cli._options import verb

_INSTRUCTIONS = """\
whence compares two runs of one neural network and tells rounding from a fault. Three calls: capture
the reference command, capture the target command, compare the two runs. `findings[0]` names the
module and operator at fault, with cause and source line; `next` has commands that take the answer
further; repro writes a script that reproduces the finding."""


@verb()
def command() -> int:
    """Run the server until its client closes stdin."""
    _server().run("stdio")
    return 0


def _server() -> Any:
    """The server with its tools. Raises MissingDependency."""
    from whence import extras
    from whence._version import __version__

    extras.needed("mcp", "whence mcp")
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    class Server(MCPServer):  # type: ignore[misc]
        """A server whose errors are JSON, also of arguments that its tools do not take."""

        async def call_tool(self, name: str, *arguments: Any, **named: Any) -> Any:
            try:
                return await super().call_tool(name, *arguments, **named)
            except ToolError as error:
                raise ToolError(_error_json(name, error)) from error

    server = Server("whence", instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING")
    alone = threading.Lock()
    for tool in TOOLS:
        server.tool(structured_output=False)(_told(tool, alone, ToolError))
    return server


def _error_json(tool: str, error: BaseException) -> str:
    """What went wrong as `{"error": ..., "kind": ...}`. kind: the class of an error of whence, or
    "arguments", where `arguments` says of each what is wrong.
    """
    cause = error
    while cause.__cause__ is not None and not hasattr(cause, "errors"):
        cause = cause.__cause__
    answer: dict[str, Any] = {"error": str(cause), "kind": type(cause).__name__}
    if hasattr(cause, "errors"):
        wrong = {str(item["loc"][0]): item["msg"] for item in cause.errors()}
        words = "; ".join(f"{name}: {text}" for name, text in wrong.items())
        answer = {"error": f"{tool}: {words}", "kind": "arguments", "arguments": wrong}
    elif cause is error:
        tools = ", ".join(entry.__name__ for entry in TOOLS)
        answer = {"error": f"{error}; the tools are {tools}", "kind": "arguments"}
    return orjson.dumps(answer).decode()


def _told(
    tool: Callable[..., str], alone: threading.Lock, error_type: type[Exception]
) -> Callable[..., str]:
    """A tool that runs alone, and whose errors are those of the protocol."""
    from whence.errors import WhenceError

    @functools.wraps(tool)
    def called(*arguments: Any, **named: Any) -> str:
        with alone:
            try:
                return tool(*arguments, **named)
            except WhenceError as error:
                raise error_type(str(error)) from error
            # one tool that fails must not end the server, whatever it raises
            except Exception as error:
                raise error_type(
                    f"unexpected {type(error).__name__}: {error}; this is a bug in whence"
                ) from error

    return called


# What `whence mcp` offers an agent: the verbs of whence as functions that answer in JSON of a
# bounded size.

LIMIT = 20_000
"""Bytes of an answer."""
_MOST_CALLS = 200
_TAIL = 2000
_SHORT = 200  # characters that are never cut


def capture(
    command: str | list[str],
    output: str,
    level: str = "modules",
    include: str = "",
    steps: str = "",
    seed: int | None = None,
    force: bool = False,
) -> str:
    """Run a command and capture what its models compute, without editing it.

    command: what runs Python with torch or paddle, as one line ("python infer.py") or as a list of
    words (["python", "infer.py"]), which needs no quotes.
    output: folder for the run, which must not exist yet unless force is true. level: "modules",
    "op" (also every operator), "graph" (also compiled graphs) or "logits" (tokens and logits only).
    include: only modules whose name matches this pattern. steps: only these steps, as "0:10". seed:
    seeds every framework.
    Returns the exit code of the command (3 when nothing was captured), what was captured, and the
    end of what the command printed.
    """
    from whence import api
    from whence.cli._options import words_of

    options: dict[str, Any] = {"level": level, "force": force}
    options |= {"include": include} if include else {}
    options |= {"steps": steps} if steps else {}
    options |= {"seed": seed} if seed is not None else {}
    words = words_of(command) if isinstance(command, str) else command
    lines: list[str] = []
    with tempfile.TemporaryFile() as log:
        code = api.run_command(words, output, log=log, tell=lines.append, **options)
        size = log.tell()
        log.seek(max(0, size - _TAIL))
        printed = log.read().decode("utf-8", "replace")
    return bounded(
        {
            "run": output if Path(output).is_dir() else "",
            "exit_code": code,
            "captured": [line.removeprefix("whence: ") for line in lines],
            "printed": printed,
        }
    )


def compare(
    reference: str,
    target: str,
    output: str = "",
    again: list[str] | None = None,
    third: str = "",
    model: str = "",
    mapping: str = "",
) -> str:
    """Compare two runs or dumps: the same, different, or undecided, and which operator is at fault.

    reference, target: folders of runs, or dumps of other tools. output: a new folder to write the
    whole comparison to. again: further runs of the reference; what differs between them is no
    fault. third: the reference in higher precision. model: MODULE:FACTORY that makes the
    reference's model, to replay what was not recorded. mapping: a map file (whence align).
    Read `status`, `findings` (the first is the most upstream; `name`, `cause`, `sentence`,
    `source`), `effect` (at the outputs) and `next` (commands that take the answer further).
    """
    from whence import api
    from whence.report.summary import summary_data

    if output:
        api.check_output(Path(output), force=False)
    result = api.compare(
        reference,
        target,
        again=tuple(again or ()),
        third=third or None,
        model=model or None,
        mapping=mapping or None,
    )
    if output:
        api.write(result, Path(output))
    api.keep_latest(result, output or None)
    return bounded(summary_data(result))


def show(run: str, name: str = "", step: int | None = None) -> str:
    """Show what a run holds: its command, versions, steps and calls; or one tensor in full.

    name: of a module (layers.3.mlp), a tree number (7_1) or one of them with :SLOT (input.0,
    output.0, param.weight); with it the answer is that tensor's record: dtype, shape, statistics.
    step: only this step.
    """
    from whence import api
    from whence.report import run as shown

    opened = api.open_to_show(run, every=False)
    choice = shown.Choice(step=step)
    if name:
        return bounded(orjson.loads("".join(shown.one_json(opened, name, choice))))
    lines = iter(shown.json(opened, choice))
    data = orjson.loads(next(lines).removesuffix(', "calls": [') + "}")
    calls = len(choice.places(opened))
    data["calls"] = list(itertools.islice(_calls(lines), _MOST_CALLS))
    more = calls - len(data["calls"])
    return bounded(data, {"calls": more} if more else {})


def trace(comparison: str = "", tensor: str = "") -> str:
    """Follow a difference back through the program to the operator it comes from.

    comparison: a folder that compare wrote; "" is the last comparison. tensor: NAME[@STEP] of a
    call of the reference; "" is the first significant one.
    """
    from whence import api
    from whence.report.origin import origin_json

    return bounded(orjson.loads(origin_json(api.trace(comparison or api.latest()[0], tensor))))


def repro(output: str, comparison: str = "", finding: int = 1, force: bool = False) -> str:
    """Write one script that reproduces a finding in one operator with its real inputs, and run it
    both ways: as the target ran it fails, as the reference ran it passes.

    output: folder for repro.py. comparison: a folder that compare wrote; "" is the last comparison.
    finding: its number in the comparison, from 1.
    `holds` says whether the script reproduces the finding.
    """
    import msgspec

    from whence import api

    result = api.repro(comparison or api.latest()[0], output, finding=finding, force=force)
    return bounded(msgspec.to_builtins(result))


TOOLS = (capture, compare, show, trace, repro)


def _calls(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The calls of a run in a few words each."""
    from whence.records.slots import is_output

    for line in lines:
        if line == "]}":
            return
        call = orjson.loads(line.rstrip(","))
        outputs = [ref for ref in call["refs"] if is_output(ref["slot"])]
        where = {name: call[name] for name in ("op", "step", "rank") if call.get(name)}
        yield {
            "number": call.get("number", ""),
            "name": call.get("scope") or call.get("root", ""),
            "class": call.get("op_type", ""),
            **where,
            "outputs": [f"{ref['record']['dtype']} {ref['record']['shape']}" for ref in outputs],
        }


def bounded(data: Any, omitted: dict[str, int] | None = None, limit: int = LIMIT) -> str:
    """An object as JSON of at most `limit` bytes: the largest lists are cut from their ends, then
    the longest texts, and `omitted` counts by field what is missing.
    """
    plain = orjson.loads(orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS))
    counts = {**plain.get("omitted", {}), **(omitted or {})}
    while True:
        if counts:
            plain["omitted"] = counts
        text = orjson.dumps(plain)
        if len(text) <= limit or not _cut(plain, counts):
            return text.decode()


def _cut(plain: dict[str, Any], counts: dict[str, int]) -> bool:
    """Halve the largest list, or the longest text where no list has two items; False where neither
    is left.
    """
    lists: list[tuple[int, str, Any, Any]] = []
    texts: list[tuple[int, str, Any, Any]] = []

    def visit(holder: Any, path: str) -> None:
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in items:
            place = f"{path}.{key}" if path else str(key)
            if isinstance(value, list) and len(value) > 1:
                lists.append((len(orjson.dumps(value)), place, holder, key))
            if isinstance(value, str) and len(value) > _SHORT:
                texts.append((len(value), place, holder, key))
            if isinstance(value, (dict, list)):
                visit(value, place)

    visit(plain, "")
    if not lists and not texts:
        return False
    _, place, holder, key = max(lists or texts, key=lambda entry: entry[0])
    value = holder[key]
    kept = len(value) // 2
    counts[place] = counts.get(place, 0) + len(value) - kept
    if isinstance(value, list):
        del value[kept:]
    else:
        holder[key] = value[:kept] + "…"
    return True
