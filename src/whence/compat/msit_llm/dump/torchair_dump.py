"""Configurations with which torchair dumps graphs (`whence.compat.torchair`, or torchair itself
where it is installed).
"""

from whence.compat._torchair import get_fx_dump_config, get_ge_dump_config

__all__ = ["get_fx_dump_config", "get_ge_dump_config"]
