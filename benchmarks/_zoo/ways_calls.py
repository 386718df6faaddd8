"""The same model called otherwise: caches, padding, batches, modes, compilers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from _zoo.sides import Drive, Inputs, NotHere, Side, call, first, ids, tensors
from _zoo.ways import way


def _needs(side: Side, *traits: str) -> None:
    missing = set(traits) - side.traits
    if missing:
        raise NotHere(f"not {missing}")


def _scores(model: nn.Module, inputs: Inputs) -> Tensor:
    return first(call(model, inputs))


def _tokens(side: Side) -> str:
    return "input_ids" if "input_ids" in side.inputs else "0"


# ---- caches


def _cached(side: Side) -> Side:
    _needs(side, "decoder")
    return side


def _in_pieces(*ends: int, cache: str = "") -> Drive:
    def drive(model: nn.Module, inputs: Inputs) -> Tensor:
        made: dict[str, Any] = {} if not cache else {"past_key_values": _cache(model, cache)}
        out, start, tokens = [], 0, inputs["input_ids"]
        for end in (*ends, tokens.shape[1]):
            result = model(input_ids=tokens[:, start:end], use_cache=True, **made)
            held = next(
                (
                    k
                    for k in ("past_key_values", "cache_params", "state")
                    if getattr(result, k, None) is not None
                ),
                "",
            )
            if not held:
                raise NotHere("no cache")
            made = {held: result[held]}
            out.append(result.logits)
            start = end
        return torch.cat(out, 1)

    return drive


def _cache(model: Any, kind: str) -> Any:
    from transformers import DynamicCache, StaticCache

    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=32)
    return DynamicCache(config=model.config)


@way("prompt-in-two-pieces")
def _two_pieces(side: Side, seed: int) -> Side:
    _cached(side).drive = _in_pieces(7)
    return side


@way("prompt-in-pieces-of-three")
def _three(side: Side, seed: int) -> Side:
    _cached(side).drive = _in_pieces(3, 6, 9)
    return side


@way("token-by-token")
def _steps(side: Side, seed: int) -> Side:
    _cached(side).drive = _in_pieces(*range(6, 12))
    return side


@way("static-cache")
def _static(side: Side, seed: int) -> tuple[Side, Side]:
    _cached(side).drive = _in_pieces(7, cache="dynamic")
    other = side.copied()
    other.drive = _in_pieces(7, cache="static")
    return side, other


@way("static-cache-in-pieces")
def _static_pieces(side: Side, seed: int) -> Side:
    _cached(side).drive = _in_pieces(5, 10, cache="static")
    return side


@way("without-cache")
def _without(side: Side, seed: int) -> tuple[Side, Side]:
    _cached(side)
    other = side.copied()
    side.drive = lambda m, i: m(**i, use_cache=True).logits
    other.drive = lambda m, i: m(**i, use_cache=False).logits
    return side, other


@way("generated-without-cache")
def _generated(side: Side, seed: int) -> tuple[Side, Side]:
    """Three greedy steps, with a cache and by running all tokens again."""
    _cached(side)
    other = side.copied()

    def cached(model: nn.Module, inputs: Inputs) -> Tensor:
        tokens, more, out = inputs["input_ids"], {}, []
        for _ in range(4):
            result = model(input_ids=tokens, use_cache=True, **more)
            if getattr(result, "past_key_values", None) is None:
                raise NotHere("no cache")
            more = {"past_key_values": result.past_key_values}
            out.append(result.logits[:, -1])
            tokens = out[-1].argmax(-1, keepdim=True)
        return torch.stack(out, 1)

    def again(model: nn.Module, inputs: Inputs) -> Tensor:
        tokens, out = inputs["input_ids"], []
        for _ in range(4):
            out.append(model(input_ids=tokens, use_cache=False).logits[:, -1])
            tokens = torch.cat([tokens, out[-1].argmax(-1, keepdim=True)], 1)
        return torch.stack(out, 1)

    side.drive, other.drive = cached, again
    return side, other


# ---- padding and masks


def _padded(side: Side, left: bool, by: int = 4) -> Side:
    """Rows of two lengths in one rectangle; what stands at padding is left out of the result."""
    tokens = side.inputs["input_ids"]
    rows, n = tokens.shape
    pad = torch.zeros(rows, by, dtype=torch.long)
    ones = torch.ones_like(tokens)
    zeros = torch.zeros_like(pad)
    parts = ([pad, tokens], [zeros, ones]) if left else ([tokens, pad], [ones, zeros])
    inputs = {"input_ids": torch.cat(parts[0], 1), "attention_mask": torch.cat(parts[1], 1)}
    if left and "decoder" in side.traits:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    side.inputs = {**side.inputs, **inputs}

    def drive(model: nn.Module, inputs: Inputs) -> Tensor:
        try:
            out = _scores(model, inputs)
        except TypeError:
            given = {k: v for k, v in inputs.items() if k != "position_ids"}
            out = _scores(model, given)
        return out[:, by:] if left else out[:, :n]

    side.drive = drive
    return side


@way("padded-right")
def _right(side: Side, seed: int) -> Side:
    _needs(side, "transformers", "text", "rows")
    if "decoder_input_ids" in side.inputs or not side.traits & {"decoder", "encoder"}:
        raise NotHere("another model of text")
    return _padded(side, left=False)


@way("padded-left")
def _left(side: Side, seed: int) -> Side:
    _needs(side, "decoder")
    return _padded(side, left=True)


@way("padding-on-the-other-side")
def _other_side(side: Side, seed: int) -> tuple[Side, Side]:
    _needs(side, "decoder")
    return _padded(side.copied(), left=False), _padded(side.copied(), left=True)


@way("padding-on-the-other-side-with-attentions")
def _with_weights(side: Side, seed: int) -> tuple[Side, Side]:
    _needs(side, "decoder")
    reference, other = _padded(side.copied(), left=False), _padded(side.copied(), left=True)
    for which in (reference, other):
        inner = which.drive

        def drive(model: nn.Module, inputs: Inputs, inner: Drive = inner) -> Any:
            asks: Any = lambda **given: model(**given, output_attentions=True)  # noqa: E731
            return inner(asks, inputs)

        which.drive = drive
    return reference, other


@way("encoder-padded-right")
def _encoder_padded(side: Side, seed: int) -> tuple[Side, Side]:
    if "decoder_input_ids" not in side.inputs or "input_ids" not in side.inputs:
        raise NotHere("no encoder of text before a decoder")
    side.drive = _scores
    reference, tokens = side.copied(), side.inputs["input_ids"]
    side.inputs["input_ids"] = torch.cat([tokens, torch.zeros(len(tokens), 4, dtype=torch.long)], 1)
    mask = torch.ones_like(side.inputs["input_ids"])
    mask[:, tokens.shape[1] :] = 0
    side.inputs["attention_mask"] = mask
    return reference, side


@way("mask-of-ones")
def _ones(side: Side, seed: int) -> Side:
    _needs(side, "transformers", "text")
    side.inputs["attention_mask"] = torch.ones_like(side.inputs["input_ids"])
    return side


@way("positions-given")
def _positions(side: Side, seed: int) -> Side:
    _needs(side, "transformers", "decoder")
    rows, n = side.inputs["input_ids"].shape
    side.inputs["position_ids"] = torch.arange(n).expand(rows, n)
    return side


@way("embeddings-given")
def _embeddings(side: Side, seed: int) -> Side:
    """The caller looks the embeddings up."""
    _needs(side, "transformers", "text")
    if "decoder_input_ids" in side.inputs:
        raise NotHere("two texts")
    table: Any = side.model.get_input_embeddings()  # type: ignore[operator]
    side.touched |= {n for n, m in side.model.named_modules() if m is table}

    def drive(model: Any, inputs: Inputs) -> Any:
        given = {k: v for k, v in inputs.items() if k != "input_ids"}
        return model(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]), **given)

    side.drive = drive
    return side


@way("last-token-alone")
def _last(side: Side, seed: int) -> tuple[Side, Side]:
    _needs(side, "transformers", "decoder")
    other = side.copied()
    side.drive = lambda m, i: m(**i).logits[:, -1:]
    other.drive = lambda m, i: m(**i, logits_to_keep=1).logits
    return side, other


@way("longer-prompt")
def _longer(side: Side, seed: int) -> Side:
    """What stands behind does not matter to what stands before."""
    _needs(side, "causal")
    key = _tokens(side)
    n = side.inputs[key].shape[1]
    more = ids("more", len(side.inputs[key]), 3, 97)
    side.inputs[key] = torch.cat([side.inputs[key], more], 1)
    side.drive = lambda m, i: _scores(m, i)[:, :n]
    return side


# ---- batches


def _rowwise(side: Side) -> int:
    _needs(side, "rows")
    sizes = {len(v) for v in side.inputs.values() if v.dim()}
    if len(sizes) != 1 or sizes == {1}:
        raise NotHere("no rows")
    return sizes.pop()


def _by_rows(parts: Callable[[int], list[Tensor]], back: Tensor | None = None) -> Drive:
    def drive(model: nn.Module, inputs: Inputs) -> Tensor:
        n = len(next(iter(inputs.values())))
        out = [
            _scores(model, {k: v[rows] if v.dim() else v for k, v in inputs.items()})
            for rows in parts(n)
        ]
        joined = torch.cat(out)
        return joined if back is None else joined[back]

    return drive


@way("rows-one-by-one")
def _singles(side: Side, seed: int) -> Side:
    _rowwise(side)
    side.drive = _by_rows(lambda n: list(torch.arange(n).split(1)))
    return side


@way("batch-in-halves")
def _halves(side: Side, seed: int) -> Side:
    if _rowwise(side) < 3:
        raise NotHere("two rows")
    side.drive = _by_rows(lambda n: list(torch.arange(n).tensor_split(2)))
    return side


@way("rows-in-another-order")
def _order(side: Side, seed: int) -> Side:
    n = _rowwise(side)
    order = torch.arange(n).roll(1)
    side.drive = _by_rows(lambda _: [order], order.argsort())
    return side


@way("calls-in-another-order")
def _calls(side: Side, seed: int) -> tuple[Side, Side]:
    """Prompts one by one, first to last and last to first."""
    n = _rowwise(side)
    other = side.copied()
    side.drive = _by_rows(lambda n: list(torch.arange(n).split(1)))
    other.drive = _by_rows(
        lambda n: list(torch.arange(n).flip(0).split(1)), torch.arange(n).flip(0)
    )
    return side, other


@way("rows-repeated")
def _repeated(side: Side, seed: int) -> Side:
    """The batch is filled up with rows that are thrown away."""
    n = _rowwise(side)
    side.inputs = {k: torch.cat([v, v[:2]]) for k, v in side.inputs.items()}
    side.drive = lambda m, i: _scores(m, i)[:n]
    return side


@way("warm-up-call")
def _warm(side: Side, seed: int) -> Side:
    """A call on other numbers comes before."""

    def drive(model: nn.Module, inputs: Inputs) -> Any:
        call(model, {k: v.flip(-1) if v.dim() else v for k, v in inputs.items()})
        return call(model, inputs)

    side.drive = drive
    return side


@way("called-twice")
def _twice(side: Side, seed: int) -> Side:
    def drive(model: nn.Module, inputs: Inputs) -> Any:
        call(model, inputs)
        return call(model, inputs)

    side.drive = drive
    return side


@way("vectorised-over-rows")
def _vmapped(side: Side, seed: int) -> Side:
    _needs(side, "plain")
    _rowwise(side)

    def drive(model: nn.Module, inputs: Inputs) -> Tensor:
        single: Any = lambda *a: first(model(*(t[None] for t in a)))[0]  # noqa: E731
        return torch.vmap(single)(*inputs.values())

    side.drive = drive
    return side


@way("tuples-returned")
def _tuples(side: Side, seed: int) -> Side:
    _needs(side, "transformers")
    side.drive = lambda m, i: tensors(m(**i, return_dict=False))
    return side


@way("hidden-states-returned")
def _hidden(side: Side, seed: int) -> tuple[Side, Side]:
    _needs(side, "transformers")
    other = side.copied()
    side.drive = _scores
    other.drive = lambda m, i: first(m(**i, output_hidden_states=True))
    return side, other


# ---- modes, threads, compilers


@way("inference-mode")
def _inference(side: Side, seed: int) -> Side:
    side.around = torch.inference_mode
    return side


@way("with-gradients")
def _gradients(side: Side, seed: int) -> Side:
    side.around = torch.enable_grad
    return side


@way("without-onednn", ("float32", "bfloat16"))
def _onednn(side: Side, seed: int) -> Side:
    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with torch.backends.mkldnn.flags(enabled=False), torch.no_grad():
            yield

    side.around = around
    return side


@way("autocast", ("float32",))
def _autocast(side: Side, seed: int) -> Side:
    """float32 against bfloat16 autocast."""

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            yield

    side.around = around
    return side


@way("autocast-against-bfloat16", ("float32",))
def _autocast_narrow(side: Side, seed: int) -> tuple[Side, Side]:
    other = _autocast(side.copied(), seed)
    assert isinstance(other, Side)
    narrow = side.copied()
    inner = narrow.drive

    def drive(model: nn.Module, inputs: Inputs) -> Any:
        if next(model.parameters()).dtype == torch.float64:
            return inner(model, inputs)
        model.to(torch.bfloat16)
        inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
        return inner(model, inputs)

    narrow.drive = drive
    return narrow, other


@way("compiled-eager", slow=True)
def _dynamo(side: Side, seed: int) -> Side:
    side.drive = lambda m, i: call(torch.compile(m, backend="eager"), i)
    return side


@way("compiled-inductor", slow=True)
def _inductor(side: Side, seed: int) -> Side:
    side.drive = lambda m, i: call(torch.compile(m), i)
    return side


@way("encoder-called-by-the-caller")
def _encoder_first(side: Side, seed: int) -> tuple[Side, Side]:
    """The caller runs the encoder and hands its output over."""
    if "decoder_input_ids" not in side.inputs:
        raise NotHere("no encoder before a decoder")
    side.drive = _scores
    other = side.copied()

    def drive(model: Any, inputs: Inputs) -> Tensor:
        given = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
        encoded = model.get_encoder()(**given)
        return first(model(encoder_outputs=encoded, decoder_input_ids=inputs["decoder_input_ids"]))

    other.drive = drive
    return side, other
