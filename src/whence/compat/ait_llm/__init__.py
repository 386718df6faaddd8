"""ait_llm: dumps of PyTorch models for `ait llm compare`.

from whence.compat.ait_llm import DumpConfig, register_hook

register_hook(model, DumpConfig(dump_path="./dump", token_range=[0, 1, 2]))
"""

from whence.compat._llm import DumpConfig, registering, seed_all

__all__ = ["DumpConfig", "register_hook", "seed_all"]

register_hook = registering("ait_llm")
