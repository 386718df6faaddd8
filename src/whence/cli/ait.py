"""The commands of ait: llm dump, llm compare, debug compare."""

from whence.cli._ascend import group

command = group("ait", __doc__, debug=True)
