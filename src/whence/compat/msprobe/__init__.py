"""msprobe (MindStudio-Probe); `whence.compat.msprobe.pytorch` has its Python names."""
