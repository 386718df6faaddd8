"""TF32 that the target allows, where a kernel of a GPU is further off than float32 rounds: it is a
setting, so it is named beside what is wrong.
"""

from __future__ import annotations

from whence.align.environment import settings_of
from whence.comparison.paired_runs import PairedRuns
from whence.frameworks.operator_names import base_name
from whence.replay.allowed_operators import CONTRACTIONS
from whence.results import CauseKind, Verdict


class AllowedTF32:
    """What the settings of the target say of TF32."""

    def __init__(self, paired: PairedRuns) -> None:
        self._paired, self._settings = paired, settings_of(paired.target)

    def words(self, verdict: Verdict) -> str:
        """The setting that may explain a verdict on a kernel, "" where none may."""
        call = self._paired.calls[self._paired.plan.pairs[verdict.pair].reference]
        settings = self._settings.get(call.root, {})
        program = self._paired.reference.programs.get(call.program)
        if (
            verdict.cause != CauseKind.KERNEL
            or program is None
            or "cuda" not in str(settings.get("devices", ""))
        ):
            return ""
        bases = {base_name(operation.name) for operation in program.operations}
        if settings.get("cudnn_tf32") and any("conv" in base for base in bases):
            setting = "torch.backends.cudnn.allow_tf32"
        elif bases & CONTRACTIONS and settings.get("matmul_precision", "highest") != "highest":
            setting = "torch.set_float32_matmul_precision"
        else:
            return ""
        return (
            f"the target allows TF32 ({setting}), which keeps 10 bits of what is multiplied: "
            "switch it off, or declare it (whence compare --policy)"
        )
