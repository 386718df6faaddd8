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
import threading
from collections.abc import Callable
from typing import Any

import orjson

from whence.cli._agent_tools import TOOLS
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
