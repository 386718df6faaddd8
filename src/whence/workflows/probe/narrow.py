"""`whence.narrow`: applies a plan of `whence probe --only precision` to a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whence.errors import UsageError
from whence.results.precision import PrecisionPlan

if TYPE_CHECKING:
    from whence.workflows.probe.torch.precision.narrowing import Narrowed


def narrow(model: Any, plan: PrecisionPlan | Mapping[str, str]) -> Narrowed:
    """Let modules of a torch model compute in narrower types, in place, everything else as it is.

        plan = whence.probe(model, inputs, properties=["precision"])["precision"].precision.plans[0]
        with whence.narrow(model, plan):
            model(**inputs)

    plan: of a precision table, or types by the paths of modules ({"layers.0.mlp": "bfloat16"}). A
    module in bfloat16 or float16 runs in this dtype, with copies of its parameters; its results
    are brought back to its own. float8_e4m3fn and int8 are simulated: the weight and the input take
    the values that they have in the type, and products are computed in the module's own dtype. The
    model's own tensors are untouched. Returns an object with `remove()`, which ends it, as the end
    of a `with` block does. Raises UsageError for what is not a torch module, a path that it lacks,
    or a module that cannot be narrowed.
    """
    if "torch" not in sys.modules or not isinstance(model, sys.modules["torch"].nn.Module):
        raise UsageError(f"narrow takes a torch module, not {type(model).__name__}")
    from whence.workflows.probe.torch.precision.narrowing import Narrowed

    types = dict.fromkeys(plan.modules, plan.to) if isinstance(plan, PrecisionPlan) else plan
    return Narrowed(model, types)
