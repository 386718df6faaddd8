"""What a reader of two Paddle runs asks first: versions, device, executor, passes, kernels,
flags.
"""

from __future__ import annotations

from typing import Any


def versions() -> dict[str, Any]:
    """Version and commit of Paddle. What flags the environment sets is in the run's own
    description.
    """
    import paddle

    return {
        "paddle": str(paddle.__version__),
        "paddle_commit": str(getattr(paddle.version, "commit", "")),
    }


def of_config(config: Any) -> dict[str, Any]:
    """How a predictor was asked to run; what a version of Paddle does not tell is left out."""
    getters = {
        "onednn": "mkldnn_enabled",
        "ir_optim": "ir_optim",
        "pir": "new_ir_enabled",
        "gpu": "use_gpu",
        "xpu": "use_xpu",
        "tensorrt": "tensorrt_engine_enabled",
        "threads": "cpu_math_library_num_threads",
    }
    facts: dict[str, Any] = {}
    for name, getter in getters.items():
        if hasattr(config, getter):
            facts[name] = getattr(config, getter)()
    if files(config)[0].endswith(".json"):
        facts["pir"] = True
    facts["memory_optim"] = said(config, "memory_optim")
    return facts


def files(config: Any) -> tuple[str, str]:
    """The files of its program and its weights; "" of those that were given in memory, whose bytes
    Paddle has in their place.
    """
    return (
        ("", "")
        if config.model_from_memory()
        else (str(config.prog_file()), str(config.params_file()))
    )


def said(config: Any, option: str) -> bool:
    """Whether the summary of a config, the only place that tells some options, has this one on.

    False for a model in memory: the summary has its bytes in it, which are not text.
    """
    if config.model_from_memory():
        return False
    for line in str(config.summary()).splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if option in cells:
            return "true" in cells
    return False


def of_layer(layer: Any) -> dict[str, Any]:
    """Mode and dtypes of a layer, and the device its parameters are on."""
    kinds: dict[str, int] = {}
    devices: dict[str, int] = {}
    for parameter in layer.parameters():
        kind, device = str(parameter.dtype).rpartition(".")[2], str(parameter.place)[6:-1]
        kinds[kind] = kinds.get(kind, 0) + 1
        devices[device] = devices.get(device, 0) + 1
    import paddle

    return {
        "training": bool(layer.training),
        "parameter_dtypes": kinds,
        "devices": devices,
        "default_dtype": paddle.get_default_dtype(),
        "grad": bool(paddle.is_grad_enabled()),
    }
