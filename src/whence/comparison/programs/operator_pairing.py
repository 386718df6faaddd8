"""Pairs the operators of two programs.

They are paired along a longest common subsequence of (type, parameters), so that an inserted,
removed or fused operator shifts no other pair. Names and numbers of variables may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from whence.align.calls.sequence_alignment import blocks
from whence.records import Call, Ref, Run, in_order
from whence.records.marks import Mark, has_mark, taken_parameters
from whence.records.slots import split_slot


def operators(run: Run) -> list[Call]:
    """The operators of a program, or of a run of one, in order."""
    calls = (c for c in run.calls if not has_mark(c, Mark.PUT_TOGETHER))
    return in_order(calls)


def running_operators(calls: Sequence[Call]) -> int:
    """The number of operators that depend on inputs of the model, not on parameters alone."""
    constant = constant_records(calls)
    return sum(
        not (outputs := c.slots("output")) or any(r.record not in constant for r in outputs)
        for c in calls
    )


def pair_operators(
    longer: tuple[Run, list[Call]], shorter: tuple[Run, list[Call]]
) -> tuple[list[tuple[Call, Call]], FusedChains]:
    """(pairs of operators, chains of the longer program that the shorter one runs as one)."""
    longer_calls, shorter_calls = longer[1], shorter[1]
    by_name = _one_naming(longer_calls, shorter_calls)
    longer_tokens, shorter_tokens = (
        [_token(run, c, by_name, made_of) for c in calls]
        for run, calls in (longer, shorter)
        for made_of in (constant_records(calls),)
    )
    pairs: list[tuple[Call, Call]] = []
    gaps: list[tuple[list[Call], list[Call]]] = []
    for a0, a1, b0, b1, equal in blocks(longer_tokens, shorter_tokens):
        if equal:
            pairs += zip(longer_calls[a0:a1], shorter_calls[b0:b1], strict=True)
        else:
            gaps.append((list(longer_calls[a0:a1]), list(shorter_calls[b0:b1])))
    pairs += [
        (a, b)
        for longer_part, shorter_part in gaps
        for a in longer_part
        for b in shorter_part
        if a.scope == b.scope and plain(a.op_type) == plain(b.op_type) and _is_name(a)
    ]
    gaps = _unpaired(gaps, pairs)
    pairs += _crossing(
        gaps,
        {c.id: t for c, t in zip(longer_calls, longer_tokens)},
        {c.id: t for c, t in zip(shorter_calls, shorter_tokens)},
    )
    for longer_part, shorter_part in _unpaired(gaps, pairs):
        if len(longer_part) == len(shorter_part):
            pairs += zip(longer_part, shorter_part, strict=True)
    return _extend_fused(pairs, longer_calls)


def _unpaired(
    gaps: Sequence[tuple[list[Call], list[Call]]], pairs: Sequence[tuple[Call, Call]]
) -> list[tuple[list[Call], list[Call]]]:
    """The gaps without operators that have been paired since."""
    longer, shorter = {a.id for a, _ in pairs}, {b.id for _, b in pairs}
    return [
        ([c for c in part if c.id not in longer], [c for c in counterpart if c.id not in shorter])
        for part, counterpart in gaps
    ]


_SAME = {
    "matmul_v2": "matmul", "mul": "matmul", "fc": "matmul", "fused_matmul": "matmul",
    "fused_gemm_epilogue": "matmul", "reduce_mean": "mean", "reduce_sum": "sum",
    "reduce_max": "max", "reduce_min": "min", "reshape2": "reshape", "transpose2": "transpose",
    "fused_transpose": "transpose", "squeeze2": "squeeze", "unsqueeze2": "unsqueeze",
    "lookup_table_v2": "embedding", "fused_conv2d": "conv2d", "fused_conv2d_add_act": "conv2d",
    "elementwise_sub": "subtract", "elementwise_mul": "multiply", "elementwise_div": "divide",
    "expand_v2": "expand", "flatten_contiguous_range": "flatten",
}  # fmt: skip


_BEHIND = (
    "matmul", "fc", "fused_matmul", "fused_gemm_epilogue", "fused_conv2d", "fused_conv2d_add_act",
    "conv2d",
)  # fmt: skip


def plain(op_type: str) -> str:
    """A common name for operators that formats or passes name differently: elementwise_add and
    fused_elementwise_add become add.
    """
    name = op_type.removeprefix("fused_") if op_type.startswith("fused_elementwise_") else op_type
    return _SAME.get(name, name.removeprefix("elementwise_"))


def _crossing(
    gaps: Sequence[tuple[list[Call], list[Call]]],
    longer_tokens: Mapping[int, tuple[Any, ...]],
    shorter_tokens: Mapping[int, tuple[Any, ...]],
) -> list[tuple[Call, Call]]:
    """Pairs of operators outside the common subsequence that alone read the same parameters; passes
    may move operators.
    """
    longer, shorter = (
        [(table[c.id], c) for pair in gaps for c in pair[side] if table[c.id][1]]
        for side, table in enumerate((longer_tokens, shorter_tokens))
    )
    counts = Counter(t for t, _ in longer), Counter(t for t, _ in shorter)
    by_token = {t: c for t, c in shorter if counts[1][t] == 1}
    return [(c, by_token[t]) for t, c in longer if counts[0][t] == 1 and t in by_token]


def _fused_behind(call: Call) -> list[str]:
    """The operators, in execution order, that a pass may have fused into a call after the operator
    that names it.
    """
    attributes, out = call.arguments, []
    slots = {split_slot(r.slot)[1] for r in call.slots("input")}
    slots |= {place for _, place in taken_parameters(call)}
    if call.op_type in _BEHIND:
        out += (
            ["scale"]
            if attributes.get("matmul_alpha", attributes.get("alpha", 1.0)) not in (1.0, None)
            else []
        )
        out += ["transpose"] if attributes.get("fused_transpose_out") else []
        out += (
            ["reshape"]
            if attributes.get("fused_reshape_out") or attributes.get("fused_reshape2_shape")
            else []
        )
        out += ["add"] if call.op_type != "fused_matmul" and slots & {"Bias", "2"} else []
        out += ["batch_norm"] if plain(call.op_type) == "conv2d" and slots & {"Bias", "2"} else []
        out += (
            ["add"]
            if "ResidualData" in slots
            or (call.op_type == "fused_matmul" and "2" in slots)
            or "3" in slots
            else []
        )
    for key in ("activation_type", "fuse_activation", "activation"):
        name = str(attributes.get(key) or "")
        if name not in ("", "identity", "none"):
            out.append(
                "gelu"
                if name.startswith("gelu")
                else {"swish": "silu", "hard_swish": "hardswish"}.get(name, name)
            )
            break
    out += ["scale"] if attributes.get("fused_output_scale", 1.0) not in (1.0, None) else []
    return out


class FusedChains(NamedTuple):
    """Chains of operators that the other program runs as one. pairs: id of the last operator ->
    the chain; inside: ids of all other operators of the chains.
    """

    pairs: dict[int, list[Call]]
    inside: set[int]


def _extend_fused(
    pairs: list[tuple[Call, Call]], calls: Sequence[Call]
) -> tuple[list[tuple[Call, Call]], FusedChains]:
    """(pairs, chains). If an operator of the shorter program also does the work of the following
    ones in the longer program, it is paired with the last operator of that chain.
    """
    readers: dict[int, list[Call]] = {}
    for call in calls:
        for ref in call.slots("input"):
            readers.setdefault(ref.record, []).append(call)
    fused, moved, paired_ids = FusedChains({}, set()), [], {a.id for a, _ in pairs}
    for a, b in pairs:
        chain, own_steps = [a], _fused_behind(a)
        for step in (w for w in _fused_behind(b) if w not in own_steps):
            outputs = chain[-1].slots("output")
            following = readers.get(outputs[0].record, []) if outputs else []
            # a batch norm is folded into weights and bias
            free = step != "batch_norm" or (following and following[0].id not in paired_ids)
            if len(following) == 1 and plain(following[0].op_type) == step and free:
                chain.append(following[0])
        moved.append((chain, b))
    ends = {chain[-1].id for chain, _ in moved if len(chain) > 1}
    out = []
    for chain, b in moved:
        if len(chain) == 1 and chain[0].id in ends:
            continue  # another operator of the target does this already
        if len(chain) > 1:
            fused.pairs[chain[-1].id] = chain
            fused.inside.update(c.id for c in chain[:-1])
        out.append((chain[-1], b))
    return out, fused


def _one_naming(reference_calls: Sequence[Call], target_calls: Sequence[Call]) -> bool:
    """Whether at least half of the parameter names are the same in both programs."""
    a, b = (
        {r.slot for c in calls for r in c.slots("param")}
        for calls in (reference_calls, target_calls)
    )
    return 2 * len(a & b) >= min(len(a), len(b))


def constant_records(calls: Sequence[Call]) -> dict[int, tuple[Ref, ...]]:
    """By record that depends on parameters and constants alone, these parameters. Passes compute
    new weights from others.
    """
    out: dict[int, tuple[Ref, ...]] = {}
    for call in calls:
        inputs, params = call.slots("input"), call.slots("param")
        if call.leaf and (inputs or params) and all(r.record in out for r in inputs):
            by_slot = {r.slot: r for r in (*params, *(p for r in inputs for p in out[r.record]))}
            out.update((r.record, tuple(by_slot.values())) for r in call.slots("output"))
    return out


def _token(
    run: Run, call: Call, by_name: bool, made_of: Mapping[int, Sequence[Ref]]
) -> tuple[Any, ...]:
    """A token that paired operators share: common type and parameters (their names, or their
    shapes), also those behind a computed weight.
    """
    kind, params = (
        plain(call.op_type),
        [
            *call.slots("param"),
            *(p for r in call.slots("input") for p in made_of.get(r.record, ())),
        ],
    )
    # For products only the matrix counts, since passes fuse the addition of a vector into them.
    counted = [
        r
        for r in params
        if len(run.records[r.record].shape) > 1 or kind not in ("matmul", "conv2d")
    ]
    names = tuple(sorted(r.slot if by_name else str(run.records[r.record].shape) for r in counted))
    return kind, names


def _is_name(call: Call) -> bool:
    """Whether a call is named after a variable, not after layer, operator and number (PIR)."""
    head, _, place = call.scope.rpartition("_")
    return not (place.isdigit() and head.rpartition(".")[2] == call.op_type)
