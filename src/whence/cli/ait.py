"""Commands of ait: llm dump, llm compare, debug compare aclcmp (docs/switching.md)."""

from whence.cli._ascend import group

command = group("ait", __doc__, debug=True)
