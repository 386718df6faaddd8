"""Tell what of a run overflows or becomes zero in fp16 or fp8.

\b
    whence ranges runs/ref
    whence ranges runs/ref --dtype float16 --top 20

Every floating-point tensor of RUN is rounded to each format: forward, gradients, parameters,
optimiser state. Formats of 8 bits are tried as they are and scaled per tensor. With --keep stats
only what overflows is known. Tensors at the ends of the dtype that they have are listed too:
saturated, subnormal.

Exit code: 0, or 3 when the run cannot be read.
"""

from __future__ import annotations

from whence.cli import _answers
from whence.cli._options import COUNT, TEXT_OR_JSON, argument, option, verb


@verb(
    argument("run", "RUN"),
    option("--dtype ...", "A format to try; repeatable.", str, name="formats"),
    option("--top", "Tensors named for each kind of loss.", COUNT, default=3),
    TEXT_OR_JSON,
)
def command(run: str, formats: tuple[str, ...], top: int, form: str) -> None:
    """Words -> `api.ranges` -> report."""
    from whence import api
    from whence.report.ranges import ranges_text

    result = api.ranges(run, formats) if formats else api.ranges(run)
    _answers.told(result, form, lambda each: ranges_text(each, top))
