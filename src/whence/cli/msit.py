"""Commands of msit: llm dump, llm compare (docs/switching.md)."""

from whence.cli._ascend import group

command = group("msit", __doc__, debug=False)
