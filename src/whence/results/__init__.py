"""What a comparison and the other verbs produce: plan, verdicts, findings, comparison."""

from whence.results.comparison import Comparison, Coverage, Declared, Nearest, Remark, Repetition, Row, ThirdRun
from whence.results.generation import Generation, Prompted, Token
from whence.results.measured import Measured
from whence.results.origin import Counted, Occurrence, Occurrences, Origin, TracedInput, TracedStep
from whence.results.plan import TENSOR_RULE, CallPair, Joined, Made, Parted, Plan, SlotPair
from whence.results.tokens import Disagreement, OutputMatch, PromptMatch, TokenComparison, TokenMatch
from whence.results.verdict import VERDICTS, Finding, Verdict, severity
from whence.results.views import Shown, ViewRow
from whence.results.workflows import (
    Checkup,
    Clean,
    Explained,
    FacedWeight,
    Ladder,
    Location,
    OutputError,
    Pass,
    PlantedFault,
    Reproduction,
    Rung,
    WeightMap,
)

__all__ = [
    "TENSOR_RULE",
    "VERDICTS",
    "CallPair",
    "Checkup",
    "Clean",
    "Comparison",
    "Counted",
    "Coverage",
    "Declared",
    "Disagreement",
    "Explained",
    "FacedWeight",
    "Finding",
    "Generation",
    "Joined",
    "Ladder",
    "Location",
    "Made",
    "Measured",
    "Nearest",
    "Occurrence",
    "Occurrences",
    "Origin",
    "OutputError",
    "OutputMatch",
    "Parted",
    "Pass",
    "Plan",
    "PlantedFault",
    "PromptMatch",
    "Prompted",
    "Remark",
    "Repetition",
    "Reproduction",
    "Row",
    "Rung",
    "Shown",
    "SlotPair",
    "ThirdRun",
    "Token",
    "TokenComparison",
    "TokenMatch",
    "TracedInput",
    "TracedStep",
    "Verdict",
    "ViewRow",
    "WeightMap",
    "severity",
]
