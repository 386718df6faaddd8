"""Names of modules as different programs give them, brought to one form."""

from __future__ import annotations

WRAPPERS = frozenset(
    {
        "module",  # DataParallel, DistributedDataParallel
        "_orig_mod",  # torch.compile
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_fpw_module",
        "_forward_module",  # Lightning
        "inner_module",
    }
)
WRAPPER_CLASSES = frozenset(
    {"DistributedDataParallel", "DataParallel", "OptimizedModule", "FullyShardedDataParallel", "CheckpointWrapper", "DeepSpeedEngine"}
)


def normal_scope(scope: str) -> str:
    """A dotted scope without wrapper components, with `layers[3]` written `layers.3`."""
    scope = scope.replace("[", ".").replace("]", "")
    return ".".join(part for part in scope.split(".") if part and part not in WRAPPERS)


def starred(scope: str) -> str:
    """The scope with every numeric component starred: siblings share it (`layers.*.mlp`)."""
    return ".".join("*" if part.isdigit() else part for part in scope.split("."))
