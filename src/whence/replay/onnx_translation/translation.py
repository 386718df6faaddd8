"""Translates nodes of ONNX graphs to programs of aten operators, so that a call of an engine that
runs such a graph can be replayed like any other.

The translation reads the node's type, opset, attributes and operands alone; neither onnx nor an
engine is needed. Semantics: the specification of ONNX operators and of ONNX Runtime's own; a fused
operator is written out. Some inputs decide what an operator does (the axes of a reduction, the
shape of a Reshape): the program compares their elements with the recorded ones and serves only
these.
"""

from __future__ import annotations

from collections.abc import Sequence

from whence.errors import ReplayRefused
from whence.records import Program
from whence.records.marks import Mark, mark
from whence.replay.onnx_translation import (
    attention,
    convolution,
    elementwise,
    fused,
    fused_attention,
    indexing,
    normalisation,
    pooling,
    products,
    quantised,
    quantised_fused,
    recurrent,
    reductions,
    resize,
    shape,
    signal,
)
from whence.replay.onnx_translation.writer import UNSIGNED, Node, Writer, Writes
from whence.replay.program_writing import Tensor

TRANSLATED = mark(Mark.TRANSLATED, "ONNX")
"""The note of a program that was not recorded but translated from the node's description."""

_MODULES = (
    elementwise, shape, indexing, products, convolution, pooling, normalisation, reductions,
    resize, recurrent, quantised, quantised_fused, attention, fused, fused_attention,
    signal,
)  # fmt: skip
_KNOWN: dict[str, Writes] = {}
for _module in _MODULES:
    _KNOWN |= _module.KNOWN
_ANY_BITS = elementwise.ANY_BITS | shape.ANY_BITS | indexing.ANY_BITS
_DOMAINS = {"": "", "ai.onnx": "", "com.microsoft": "com.microsoft.",
            "com.microsoft.nchwc": "com.microsoft.nchwc."}  # fmt: skip
_REFUSED = {
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), "its branches are not recorded"),
    **dict.fromkeys(
        ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial",
         "Bernoulli", "com.microsoft.Sampling"),
        "it draws random numbers",
    ),
    **dict.fromkeys(
        ("SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
         "SequenceLength", "SplitToSequence", "ConcatFromSequence"),
        "it works on a sequence of tensors",
    ),
    **dict.fromkeys(
        ("Optional", "OptionalGetElement", "OptionalHasElement"), "it works on an optional value"
    ),
    **dict.fromkeys(
        ("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
        "it works on text",
    ),
    "NonMaxSuppression": "one box after the other decides what is kept",
}  # fmt: skip


def known() -> tuple[str, ...]:
    """Returns the operators whose calls can be replayed, with their domain unless it is
    ONNX's own.
    """
    return tuple(sorted(_KNOWN))


def families() -> list[tuple[str, tuple[str, ...]]]:
    """Returns (description, operators) of each module of operators."""
    first = [str(module.__doc__).split(". ")[0].split("\n\n")[0] for module in _MODULES]
    return [
        (" ".join(title.split()).rstrip("."), tuple(sorted(module.KNOWN)))
        for title, module in zip(first, _MODULES)
    ]


def qualified(op_type: str, domain: str) -> str:
    """Returns the name of an operator with its domain, "" for ONNX's own."""
    prefix = _DOMAINS.get(domain)
    return f"{domain}.{op_type}" if prefix is None else f"{prefix}{op_type}"


def program(node: Node) -> Program:
    """Returns the program that one node computes. Raises ReplayRefused for an unknown operator or
    an unsupported use of a known one.
    """
    name = qualified(node.op_type, node.domain)
    write = _KNOWN.get(name)
    if write is None:
        reason = _REFUSED.get(name, "not known to whence")
        raise ReplayRefused(f"operator {name[:100]} of ONNX: {reason}")
    writer = Writer(node, any_bits=name in _ANY_BITS)
    try:
        results = write(writer)
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ReplayRefused(
            f"{node.op_type}: its attributes make no sense ({type(error).__name__}: {error})"
        ) from error
    return writer.written(
        _outputs(writer, [results] if isinstance(results, Tensor) else results),
        {operand.slot: operand.dtype for operand in node.inputs if operand is not None},
        TRANSLATED,
        writer.fixed,
    )


def _outputs(writer: Writer, results: Sequence[Tensor | None]) -> list[tuple[str, Tensor]]:
    """Returns (slot, tensor) of the outputs that the node has and the translation computes."""
    outputs = []
    for result, value in zip(writer.node.outputs, results):
        if result is None or value is None:
            continue
        if result.dtype in UNSIGNED:
            value = value.to(result.dtype)
        outputs.append((result.slot, value))
    if not outputs:
        raise writer.refuse("none of the outputs that it has is known to whence")
    return outputs
