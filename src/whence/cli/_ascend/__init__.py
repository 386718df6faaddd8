"""`ait` and `msit`, one tool of two ages: their commands, as words of ours."""

from whence.cli._ascend.commands import group

__all__ = ["group"]
