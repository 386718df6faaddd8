"""Complete commands, options and paths with the TAB key.

\b
    whence completion install                 for the shell that $SHELL names
    whence completion install --shell zsh
    whence completion bash                    prints the script and changes nothing

`install` writes the script to a file that the shell loads when it starts: for bash and zsh it adds
one line to ~/.bashrc or ~/.zshrc, for fish it needs none. zsh has a builtin named whence; there the
script makes the word `whence` mean this command at the prompt.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from whence.cli._options import argument, option, verb

_SHELLS = ("bash", "zsh", "fish")
_MARK = "# whence completion"
_ZSH = """\
# zsh has a builtin of this name; at the prompt the command is meant.
alias whence='command whence'
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
"""


@verb(
    argument("action", "", ("install", *_SHELLS)),
    option("--shell", "With install.  [default: from $SHELL]", _SHELLS),
)
def command(action: str, shell: str | None) -> int:
    """Print the completion script of a shell, or install it."""
    if action != "install":
        if shell is not None:
            raise click.UsageError(f"--shell belongs to install: whence completion {shell}")
        click.echo(_script(action), nl=False)
        return 0
    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in _SHELLS:
        raise click.UsageError(
            f"$SHELL names {shell or 'no shell'}; choose one: whence completion install --shell "
            f"{'|'.join(_SHELLS)}"
        )
    for line in _install(shell):
        click.echo(line)
    return 0


def _script(shell: str) -> str:
    from click.shell_completion import get_completion_class

    from whence import cli

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli.group, {}, "whence", "_WHENCE_COMPLETE").source()
    if shell == "fish":  # click's cuts what a command does at its first comma
        script = script.replace('string split ","', 'string split -m 1 ","')
    return (_ZSH if shell == "zsh" else "") + script


def _install(shell: str) -> list[str]:
    """Write the script, and the line that loads it; what to tell. Raises StoreFailed."""
    from whence.cli import _files

    home = Path.home()
    if shell == "fish":
        base = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        script, start = base / "fish" / "completions" / "whence.fish", None
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
        script = base / "whence" / f"completion.{shell}"
        start = home / ".bashrc"
        if shell == "zsh":
            start = Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
    _files.write(script, _script(shell), force=True)
    told = [f"written to {script}"]
    if start is not None:
        told.append(_load(start, script))
    return [*told, f"new {shell} sessions complete `whence` with TAB; for this one: . {script}"]


def _load(start: Path, script: Path) -> str:
    """Add the line that loads the script to the start file of a shell, once; what to tell."""
    import shlex

    from whence.errors import StoreFailed

    quoted = shlex.quote(str(script))
    line = f"[ -f {quoted} ] && . {quoted}  {_MARK}"
    try:
        before = start.read_bytes() if start.exists() else b""
        if line.encode() in before.splitlines():
            return f"{start} loads it already"
        with start.open("ab") as file:
            file.write(b"\n" * (before[-1:] not in (b"", b"\n")) + line.encode() + b"\n")
    except OSError as error:
        raise StoreFailed(
            f"cannot add to {start}: {error.strerror or error}; add this line yourself: {line}"
        ) from error
    return f"added to {start}: {line}"
