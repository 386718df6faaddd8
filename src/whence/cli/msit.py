"""The commands of msit: llm dump, llm compare."""

from whence.cli._ascend import group

command = group("msit", __doc__, debug=False)
