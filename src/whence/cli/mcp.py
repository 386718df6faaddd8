"""Serve whence to a coding agent, over stdio (MCP).

\b
    whence mcp                                 an MCP client starts this, and talks to it
    {"mcpServers": {"whence": {"command": "whence", "args": ["mcp"]}}}

Tools: capture, compare, show, trace, repro. They do what the commands of the same names do, in the
folder where the server was started, and answer with the same JSON, of 20 kB at most. capture runs
the commands that the agent gives, with your rights. Needs the package mcp (docs/answer.md).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

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
    from whence.cli._agent_tools import TOOLS

    extras.needed("mcp", "whence mcp")
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer(
        "whence", instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING"
    )
    alone = threading.Lock()
    for tool in TOOLS:
        server.tool(structured_output=False)(_told(tool, alone, ToolError))
    return server


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
