"""Operators that have a kernel on another device only, by operators that run here.

A program that was recorded on a GPU calls what torch chose there. Replays run on the processor, so
each is computed by torch's own operator of the same function, with its rounding: in the working
dtype, and with a derivative. Each function takes the operator's arguments by schema name and
returns its outputs in schema order, as far as a program reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Named = dict[str, Any]


def attention(named: Named) -> list[Any]:
    """softmax(q kᵀ scale + mask) v by the fused kernel of the processor. query (batch, heads,
    query, dim); key, value may have fewer heads. The log of the summed exponentials is left out.
    """
    query, key, value = (named[name] for name in ("query", "key", "value"))
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    return [
        torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=named.get("attn_mask", named.get("attn_bias")),
            is_causal=bool(named.get("is_causal")),
            scale=named.get("scale"),
        )
    ]


def batch_norm(named: Named) -> list[Any]:
    """Batch norm of cuDNN and MIOpen: (x - mean) / sqrt(var + eps) * weight + bias, with the
    statistics of the batch in training. input (batch, channel, *); writes running statistics.
    """
    return list(
        torch.native_batch_norm(
            named["input"],
            named["weight"],
            named.get("bias"),
            named.get("running_mean"),
            named.get("running_var"),
            named["training"],
            named["exponential_average_factor"],
            named["epsilon"],
        )
    )


def lstm_cell(named: Named) -> list[Any]:
    """One step of an LSTM from the products of its input and state: h, c. input_gates, hidden_gates
    (batch, 4 hidden), in the order input, forget, cell, output.
    """
    gates = _with_bias(named, "input") + _with_bias(named, "hidden")
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * named["cx"] + i.sigmoid() * g.tanh()
    return [o.sigmoid() * c.tanh(), c]


def gru_cell(named: Named) -> list[Any]:
    """One step of a GRU from the products of its input and state: h. input_gates, hidden_gates
    (batch, 3 hidden), in the order reset, update, new.
    """
    of_input, of_hidden = _with_bias(named, "input"), _with_bias(named, "hidden")
    (r, z, n), (r_hidden, z_hidden, n_hidden) = of_input.chunk(3, -1), of_hidden.chunk(3, -1)
    update = (z + z_hidden).sigmoid()
    new = (n + (r + r_hidden).sigmoid() * n_hidden).tanh()
    return [new + update * (named["hx"] - new)]


def histogram(named: Named) -> list[Any]:
    """Counts of a tensor of any kind, of its dtype; the processor counts floating numbers only."""
    x = named["self"]
    values = x if x.is_floating_point() else x.double()
    counts = torch.histc(values, named.get("bins", 100), named.get("min", 0), named.get("max", 0))
    return [counts.to(x.dtype)]


def _with_bias(named: Named, of: str) -> Any:
    gates, bias = named[f"{of}_gates"], named.get(f"{of}_bias")
    return gates if bias is None else gates + bias


HERE: dict[str, Callable[[Named], list[Any]]] = {
    "_scaled_dot_product_flash_attention": attention,
    "_scaled_dot_product_efficient_attention": attention,
    "_scaled_dot_product_cudnn_attention": attention,
    "_scaled_dot_product_fused_attention_overrideable": attention,
    "cudnn_batch_norm": batch_norm,
    "miopen_batch_norm": batch_norm,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_gru_cell": gru_cell,
    "histc": histogram,
}
"""By operator without its namespace."""
