"""`whence serve-check`: an engine that serves several requests, with faults planted into it."""

import json
import math
import re
import threading
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

import whence
from whence.cli import execute
from whence.errors import UsageError
from whence.report.serving_page import serving_html

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from whence.workflows.serving.rows import HandedOut, Kind  # noqa: E402
from whence.workflows.serving.torch.forced import Forced  # noqa: E402
from whence.workflows.serving.torch.listening import Piece, Schedule, pieces  # noqa: E402
from whence.workflows.serving.wrong_rows import WrongRows, explained  # noqa: E402

pytestmark = pytest.mark.torch

VOCABULARY, WIDTH, HEADS, LAYERS, TOKENS = 50, 32, 2, 3, 8
PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10], [11, 12]]


class Attention(nn.Module):
    """Attention with rotated keys and a cache."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.reach = layer, 10**6
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.offset = 0

    def forward(self, x, positions, cache):
        def heads(y):
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        query = rotated(heads(self.query(x)), positions)
        key = rotated(heads(self.key(x)), positions + self.offset)
        value = heads(self.value(x))
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        apart = positions[:, None] - torch.arange(key.shape[2])
        scores = scores.masked_fill((apart < 0) | (apart >= self.reach), -torch.inf)
        mixed = torch.softmax(scores, -1) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotated(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Experts(nn.Module):
    """Each token takes two of four experts; two of their scores tie, but for rounding."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        with torch.no_grad():
            self.router.weight[1:3] = self.router.weight[0]
            self.router.weight[1] *= 1 + 1e-7
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.chosen = lambda chosen: chosen

    def forward(self, x):
        scores, chosen = torch.topk(torch.softmax(self.router(x), -1), 2, -1)
        chosen = self.chosen(chosen)
        outs = torch.stack([expert(x) for expert in self.experts], -1)
        taken = outs.gather(-1, chosen[..., None, :].expand(*x.shape, 2))
        return (taken * scores[..., None, :]).sum(-1)


class Net(nn.Module):
    """A causal language model."""

    def __init__(self, experts=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Attention(n) for n in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.experts = Experts() if experts else None
        self.eval()

    def forward(self, input_ids, position_ids=None, past_key_values=None):
        count = input_ids.shape[1]
        positions = torch.arange(count) if position_ids is None else position_ids[0]
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x, positions, past_key_values)
        if self.experts is not None:
            x = x + self.experts(x)
        return self.head(self.norm(x))


class Cache:
    """Keys and values of one request. spoil: changes what is handed out, given (layer, kind, kept
    rows) and the caches of all requests so far.
    """

    def __init__(self, spoil, others):
        self.kept, self.spoil, self.others = {}, spoil, others

    def update(self, keys, values, layer_idx):
        out = []
        for kind, new in (("K", keys), ("V", values)):
            old = self.kept.get((layer_idx, kind))
            whole = new if old is None else torch.cat([old, new], 2)
            self.kept[layer_idx, kind] = whole
            out.append(self.spoil(layer_idx, kind, whole.clone(), self.others))
        return tuple(out)


class Engine:
    """Serves requests in turn, a token of each; `pieces` cuts prompts."""

    def __init__(self, model=None, spoil=lambda layer, kind, rows, others: rows, pieces=100):
        self.model = model or Net()
        self.spoil, self.pieces = spoil, pieces
        self.pick = lambda logits: int(logits.argmax())
        self.logprobs = None

    @torch.no_grad()
    def generate(self, prompts, count):
        caches = []
        for _ in prompts:
            caches.append(Cache(self.spoil, caches))
        texts, reported = [list(p) for p in prompts], [[] for _ in prompts]
        ends = [0] * len(prompts)
        for _ in range(count):
            for number, text in enumerate(texts):
                while ends[number] < len(text):
                    start, end = ends[number], min(len(text), ends[number] + self.pieces)
                    logits = self.model(
                        torch.tensor([text[start:end]]),
                        position_ids=torch.arange(start, end)[None],
                        past_key_values=caches[number],
                    )[0, -1]
                    ends[number] = end
                text.append(self.pick(logits))
                if self.logprobs is not None:
                    reported[number].append(float(self.logprobs(logits)[text[-1]]))
        answers = [text[len(p) :] for text, p in zip(texts, prompts, strict=True)]
        if self.logprobs is None:
            return answers
        return list(zip(answers, reported, strict=True))


def checked(engine, **options):
    return whence.serve_check(Net(), engine, PROMPTS, max_new_tokens=TOKENS, **options)


@pytest.mark.parametrize("pieces", [1, 2, 100])
def test_an_engine_that_is_right_is_the_same_however_it_schedules(pieces):
    result = checked(Engine(pieces=pieces))
    assert (result.status, result.fault, result.notes) == ("same", None, ())
    assert [(c.tokens, c.judged, c.first) for c in result.requests] == [(TOKENS, TOKENS, -1)] * 3
    assert all(c.error is not None for c in result.requests)
    assert repr(result).startswith("SAME ")


def test_a_narrower_engine_is_the_same():
    assert checked(Engine(Net().to(torch.bfloat16))).status == "same"


def test_capturing_changes_nothing():
    engine = Engine()
    before = engine.generate(PROMPTS, TOKENS)
    checked(engine)
    assert engine.generate(PROMPTS, TOKENS) == before
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in engine.model.modules()]
    assert not any(hooks)


def from_another(layer, kind, rows, others):
    """From the sixth position on the first request reads what the second wrote."""
    if (layer, kind) == (1, "K") and rows.shape[2] > 8 and others:
        first = others[0].kept[1, "K"]
        if rows.shape[2] == first.shape[2] + 2:  # the second request, which is two tokens longer
            rows[:, :, 2:4] = first[:, :, 0:2]
    return rows


def zeroed(layer, kind, rows, others):
    if (layer, kind) == (2, "V") and rows.shape[2] > 7:
        rows[:, 1, 3:5] = 0
    return rows


def late(layer, kind, rows, others):
    """Once there are eight positions, each holds the one before."""
    if (layer, kind) == (0, "K") and rows.shape[2] > 7:
        rows[:, :, 1:] = rows[:, :, :-1].clone()
    return rows


def flipped(layer, kind, rows, others):
    return rows.flip(1) if (layer, kind) == (1, "V") else rows


def doubled(layer, kind, rows, others):
    return rows * 2 if (layer, kind) == (1, "K") and rows.shape[2] > 7 else rows


def dropped(layer, kind, rows, others):
    return rows[:, :, 2:] * 1 if rows.shape[2] > 7 else rows


@pytest.mark.parametrize(
    ("spoil", "layer", "tensor", "words"),
    [
        (zeroed, 2, "V", "head 1: positions 3 to 4: hold zeros"),
        (late, 0, "K", "hold what belongs one position earlier"),
        (flipped, 1, "V", "hold other heads: 0 holds 1, 1 holds 0"),
        (doubled, 1, "K", "are 2 times what they should be"),
        (from_another, 1, "K", "positions 2 to 3: hold request 1's positions 0 to 1"),
    ],
)
def test_what_a_cache_hands_out_is_named(spoil, layer, tensor, words):
    fault = checked(Engine(spoil=spoil)).fault
    assert (fault.stage, fault.layer, fault.tensor) == ("cache", layer, tensor)
    assert words in fault.sentence
    assert ("prefill is right" in fault.sentence) == (fault.step > 0)


def test_a_fault_that_takes_other_requests_is_right_alone():
    assert checked(Engine(spoil=from_another)).fault.alone is False
    assert checked(Engine(spoil=flipped)).fault.alone is True


def test_an_error_that_the_cache_may_have_is_none():
    def coarse(layer, kind, rows, others):
        return rows * 1.001

    assert checked(Engine(spoil=coarse)).fault.stage == "cache"
    assert checked(Engine(spoil=coarse), cache_error=0.05).status == "same"


def test_keys_rotated_too_far_are_a_fault_of_the_layer():
    engine = Engine()
    engine.model.layers[1].offset = 2
    fault = checked(engine).fault
    assert (fault.stage, fault.layer, fault.tensor) == ("layer", 1, "K")
    assert "rotated by 2 positions too many" in fault.sentence


def test_a_window_that_the_reference_lacks_is_code_in_front_of_a_module():
    engine = Engine()
    engine.model.layers[2].reach = 3
    fault = checked(engine).fault
    assert (fault.stage, fault.layer, fault.name) == ("layer", 2, "layers.2.out")
    assert "what layers.2 computes in front of layers.2.out" in fault.sentence


class OtherTies(Net):
    """Chooses otherwise among experts whose scores are within `within` of each other."""

    def __init__(self, within):
        super().__init__(experts=True)
        self.within = within

    def forward(self, *args, **kwargs):
        def flipped(scores, count, dim):
            noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1))
            chosen = topk(scores + self.within * noise, count, dim).indices
            return torch.return_types.topk((scores.gather(-1, chosen), chosen))

        topk = torch.topk
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "topk", flipped)
            return super().forward(*args, **kwargs)


def routed(engine):
    return whence.serve_check(Net(experts=True), engine, PROMPTS, max_new_tokens=TOKENS)


def test_a_route_that_rounding_flips_is_no_fault():
    result = routed(Engine(OtherTies(1e-6)))
    assert (result.status, result.fault) == ("same", None)
    assert sum(check.routes for check in result.requests) > 0


def test_a_fault_is_found_beside_routes_that_rounding_flips():
    engine = Engine(OtherTies(1e-6))
    engine.model.norm.register_forward_hook(lambda module, args, out: out * 1.003)
    fault = routed(engine).fault
    assert (fault.stage, fault.name) == ("layer", "norm")


def test_a_route_that_rounding_does_not_explain_is_named():
    fault = routed(Engine(OtherTies(1.0))).fault
    assert (fault.stage, fault.name, fault.tensor) == ("layer", "experts", "choice")
    assert "has the better score" in fault.sentence


def test_a_weight_that_was_not_synchronised_is_named():
    engine = Engine()
    with torch.no_grad():
        engine.model.layers[1].value.weight[0, 0] += 0.01
    fault = checked(engine).fault
    assert (fault.stage, fault.layer, fault.name) == ("weights", 1, "layers.1.value.weight")


def test_a_sampler_that_takes_another_token_is_at_fault_where_logits_are_right():
    engine = Engine()
    engine.pick = lambda logits: int(logits.topk(2).indices[1])
    fault = checked(engine).fault
    assert (fault.stage, fault.tensor) == ("sampler", "tokens")


class Rewriting(Engine):
    """Gives its model another text than the prompt."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def generate(self, prompts, count):
        return super().generate([self.change(list(prompt)) for prompt in prompts], count)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: [3, *text], "1 token (3) in front of it"),
        (lambda text: [2, 2, 2, 2, *text, 1], "4 tokens (2, 2, 2, ...) in front of it and 1"),
        (lambda text: text[2:], "lacks its first 2 of"),
        (lambda text: text[:-2], "only its first"),
        (lambda text: [text[0], (text[1] + 1) % VOCABULARY, *text[2:]], "token 1 is"),
    ],
)
def test_a_prompt_that_the_model_is_not_given_is_named(change, words):
    fault = checked(Rewriting(change)).fault
    assert (fault.stage, fault.request > 0) == ("prompt", True)
    assert words in fault.sentence


def test_tokens_that_are_reported_otherwise_than_they_went_on_are_the_samplers():
    engine = Engine()
    generate = engine.generate

    def reported(prompts, count):
        answers = generate(prompts, count)
        return [[(t + 3) % VOCABULARY if n > 2 else t for n, t in enumerate(a)] for a in answers]

    engine.generate = reported
    fault = checked(engine).fault
    assert (fault.stage, fault.step, fault.tensor) == ("sampler", 3, "tokens")


def test_requests_that_take_turns_are_told_apart_by_their_turns():
    schedule = Schedule([[1, 2, 9, 4, 5], [3, 4, 9, 4, 6]])
    calls = [
        ([1, 2], 0),
        ([3, 4], 0),
        *(([token], n) for n, token in ((2, 9), (2, 9), (3, 4), (3, 4))),
    ]
    served = [
        segment.request
        for tokens, position in calls
        for segment in schedule.segments([Piece(0, (0, len(tokens)), tokens, position)])
    ]
    assert served == [0, 1, 0, 1, 0, 1]


def test_tokens_of_others_at_a_position_that_a_request_passed_are_not_its_own():
    schedule = Schedule([[7, 8, 9, 5, 6], [3, 9, 4, 2]])

    def place(tokens, position):
        found = schedule.segments([Piece(0, (0, len(tokens)), tokens, position)])
        return [(segment.request, segment.start) for segment in found]

    assert place([7, 8, 9, 5], 0) == [(0, 0)]
    assert place([3, 9], 0) == [(1, 0)]
    assert place([9], 2) == []  # of the second, which reported 4; the first is further
    assert [piece.tokens for piece in schedule.strays] == [[9]]
    assert place([6], 4) == [(0, 4)]
    assert place([7, 8, 9], 0) == [(0, 0)]  # computed anew


def test_the_last_token_of_an_answer_is_not_awaited():
    schedule = Schedule([[7, 8, 6], [4, 3, 6, 9]])
    for tokens in ([7, 8], [4, 3]):
        schedule.segments([Piece(0, (0, 2), tokens, 0)])
    (segment,) = schedule.segments([Piece(0, (0, 1), [6], 2)])
    assert segment.request == 1


def test_requests_in_one_row_without_cuts_are_told_by_their_positions():
    ids = torch.tensor([[7, 8, 9, 3, 9]])
    cut = pieces(ids, {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])})
    assert [(piece.columns, piece.position) for piece in cut] == [((0, 3), 0), ((3, 5), 0)]
    padded = pieces(torch.tensor([[0, 0, 7, 8], [3, 9, 4, 2]]),
                    {"position_ids": torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])})  # fmt: skip
    assert [piece.columns for piece in padded] == [(2, 4), (0, 4)]


def nucleus(logits, share):
    """Log-probabilities of the likeliest tokens that have this share together."""
    ranked = logits.softmax(-1).sort(descending=True)
    is_over = ranked.values.cumsum(-1) - ranked.values >= share
    return logits.index_fill(-1, ranked.indices[is_over], -1e9).log_softmax(-1)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda logits: (logits / 0.6).log_softmax(-1), "temperature 0.6"),
        (
            lambda logits: logits.masked_fill(
                logits < logits.topk(10).values[-1], -1e9
            ).log_softmax(-1),
            "top-k 10",
        ),
        (
            lambda logits: (
                (logits / 0.8)
                .masked_fill(logits < logits.topk(13).values[-1], -1e9)
                .log_softmax(-1)
            ),
            "temperature 0.8, top-k 13",
        ),
        (lambda logits: nucleus(logits, 0.65), "top-p 0.65"),
        (lambda logits: nucleus(logits / 0.8, 0.9), "temperature 0.8, top-p 0.9"),
        (lambda logits: logits, "not normalised"),
    ],
)
def test_the_rule_that_log_probabilities_were_made_by_is_named(rule, words):
    engine = Engine()
    engine.logprobs = rule
    fault = checked(engine).fault
    assert fault.stage == "sampler"
    assert words in fault.sentence


def test_log_probabilities_of_the_reference_are_right():
    engine = Engine()
    engine.logprobs = lambda logits: logits.log_softmax(-1)
    assert checked(engine).status == "same"


def rolled_out(model, **options):
    """An engine that samples: its tokens are those of a seed."""
    engine = Engine(model)

    def pick(logits):
        generator = torch.Generator().manual_seed(int(logits.argmax()))
        return int(torch.multinomial(logits.double().softmax(-1), 1, generator=generator))

    engine.pick = pick
    engine.logprobs = lambda logits: logits.double().log_softmax(-1)
    reference = Net(experts=model.experts is not None)
    return whence.serve_check(reference, engine, PROMPTS, max_new_tokens=TOKENS, **options)


def test_a_rollout_need_not_take_the_best_token():
    assert rolled_out(Net()).fault.stage == "sampler"
    assert rolled_out(Net(), rollout=True).status == "same"


@pytest.mark.parametrize(
    ("module", "cause"), [("layers.1", "layers"), ("norm", "norm"), ("head", "head")]
)
def test_log_ratios_of_a_rollout_come_from_the_part_that_differs(module, cause):
    model = Net()
    model.get_submodule(module).register_forward_hook(lambda module, args, out: out * 1.01)
    ratios = rolled_out(model, rollout=True).ratios
    assert [len(ratio.tokens) for ratio in ratios] == [TOKENS, TOKENS]
    for ratio in ratios:
        sizes = {name: max(map(abs, part)) for name, part in ratio.causes.items()}
        assert max(sizes, key=sizes.get) == cause
        sums = [sum(parts) for parts in zip(*ratio.causes.values(), strict=True)]
        assert sums == pytest.approx(ratio.tokens, abs=1e-12)


def test_log_ratios_of_other_routes_are_told_from_the_rest():
    for ratio in rolled_out(OtherTies(1.0), rollout=True).ratios:
        sizes = {name: max(map(abs, part)) for name, part in ratio.causes.items()}
        assert max(sizes, key=sizes.get) == "routes"


class Together(Engine):
    """Answers prompts of one length as rows of a batch, without a cache."""

    @torch.no_grad()
    def generate(self, prompts, count):
        texts = torch.tensor(prompts)
        for _ in range(count):
            texts = torch.cat([texts, self.model(texts)[:, -1].argmax(-1)[:, None]], 1)
        return texts[:, len(prompts[0]) :].tolist()


def in_a_batch(engine):
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6]]
    return whence.serve_check(Net(), engine, prompts, max_new_tokens=4, alone=True).batch


def test_the_operator_that_depends_on_other_rows_is_named():
    engine = Together()
    engine.model.norm.register_forward_hook(lambda module, args, out: out - 0.1 * out.mean(0))
    for dependence in in_a_batch(engine):
        assert dependence.operator == "aten.sub.Tensor in norm"
        assert not dependence.is_rounding


def test_requests_that_run_one_after_another_do_not_depend_on_others():
    for dependence in in_a_batch(Engine()):
        assert dependence.operator == ""
        assert dependence.compared > 1000


def test_an_engine_in_another_dtype_whose_inside_is_hidden():
    engine = Engine(Net().to(torch.bfloat16))
    engine.logprobs = lambda logits: logits.float().log_softmax(-1)
    hidden = type("Hidden", (), {"generate": staticmethod(engine.generate)})()
    assert checked(hidden).status == "different"
    assert checked(hidden, dtype="bfloat16").status == "same"
    with pytest.raises(UsageError, match="no engine computes in 'int8'"):
        checked(hidden, dtype="int8")


def test_an_engine_that_stops_early_is_no_pass():
    engine = Engine()
    generate = engine.generate
    engine.generate = lambda prompts, count: [a[:3] for a in generate(prompts, count)]
    result = checked(engine)
    assert result.status == "undecided"
    assert any("did the engine fail?" in note for note in result.notes)


def test_an_engine_whose_inside_is_hidden_is_compared_by_its_answers():
    engine = Engine()
    hidden = type("Hidden", (), {"generate": staticmethod(engine.generate)})()
    result = checked(hidden)
    assert (result.status, result.fault) == ("undecided", None)
    engine.pick = lambda logits: int(logits.argmin())
    assert checked(hidden).fault.stage == "logits"


class Stages(HTMLParser):
    """State and words of each stage on a page, and how many cells are marked."""

    def __init__(self, page):
        super().__init__()
        self.stages, self.cells, self._kind = {}, [], ""
        self._words = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        kind = dict(attributes).get("class", "")
        if tag == "li" and kind in ("right", "wrong", "open"):
            self._kind = kind
        if tag == "rect":
            self.cells.append(kind == "off")
        assert tag != "script"
        assert not {"src", "href", "onload"} & dict(attributes).keys()

    def handle_data(self, data):
        if self._kind:
            self._words.append(data)

    def handle_endtag(self, tag):
        if tag == "li" and self._kind:
            name, *words = self._words
            self.stages[name] = self._kind, " ".join(words)
            self._kind, self._words = "", []


def test_the_page_shows_every_stage():
    page = Stages(serving_html(checked(Engine(spoil=zeroed))))
    assert {name: kind for name, (kind, _) in page.stages.items()} == {
        "prompts": "wrong", "logits": "wrong", "first token": "wrong",
        "prefill or decode": "wrong", "cache": "wrong", "layer": "right", "operator": "open",
    }  # fmt: skip
    assert page.stages["cache"][1] == "layer 2, V, head 1"
    assert page.cells == [False] * 5 + [False] * 3 + [True] * 2
    page = Stages(serving_html(checked(Engine())))
    assert {kind for kind, _ in page.stages.values()} == {"right", "open"}
    engine = Engine()
    engine.model.norm.register_forward_hook(lambda module, args, out: out * 1.01)
    page = Stages(serving_html(checked(engine)))
    assert page.stages["cache"][0] == "right"
    assert page.stages["layer"] == ("wrong", "outside of layers: norm")


def test_the_page_names_an_operator_that_depends_on_others():
    def operator(engine):
        prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
        result = whence.serve_check(Net(), engine, prompts, max_new_tokens=3, alone=True)
        return Stages(serving_html(result)).stages["operator"]

    assert operator(Engine()) == ("right", "none depends on others in the batch")
    engine = Together()
    engine.model.norm.register_forward_hook(lambda module, args, out: out - 0.1 * out.mean(0))
    kind, words = operator(engine)
    assert kind == "wrong"
    assert words.startswith("aten.sub.Tensor in norm ")


def test_what_is_no_engine_is_refused():
    with pytest.raises(UsageError, match="no method generate"):
        checked(object())
    with pytest.raises(UsageError, match="only servers of this machine"):
        checked("http://example.com/v1")
    with pytest.raises(UsageError, match=r"neither a torch\.nn\.Module nor a"):
        whence.serve_check(3, Engine(), PROMPTS)
    engine = Engine()
    engine.generate = lambda prompts, count: [[1]]
    with pytest.raises(UsageError, match="1 answers to 3 prompts"):
        checked(engine)
    engine.generate = lambda prompts: []
    with pytest.raises(UsageError, match=r"generate\(prompts, 8\) raised TypeError"):
        checked(engine)
    with pytest.raises(UsageError, match="no prompts"):
        whence.serve_check(Net(), Engine(), [])


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "served.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(__file__).rpartition('/')[0]!r})\n"
        "import test_serve_check as t\n"
        "reference, right = t.Net, t.Engine\n"
        "def wrong():\n    return t.Engine(spoil=t.zeroed)\n"
        "def knows_letters():\n    engine = right()\n    engine.tokenizer = t.Letters\n"
        "    return engine\n"
    )
    lines = [json.dumps(PROMPTS[0]), json.dumps({"src": PROMPTS[1]}), json.dumps(PROMPTS[2])]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    words = ["--prompts", "prompts.jsonl", "--tokens", str(TOKENS)]
    assert execute(["serve-check", "served:reference", "served:right", *words]) == 0
    assert capsys.readouterr().out.startswith("SAME ")
    wrong = ["serve-check", "served:reference", "served:wrong", *words]
    assert execute([*wrong, "--html", "page.html"]) == 1
    assert "cache" in Stages((tmp_path / "page.html").read_text()).stages
    text = capsys.readouterr().out
    assert text.startswith("FAULT ")
    assert "stage            the cache" in text
    assert (
        execute(["serve-check", "served:reference", "served:wrong", *words, "--format", "json"])
        == 1
    )
    assert json.loads(capsys.readouterr().out)["fault"]["heads"] == [1]
    (tmp_path / "prompts.jsonl").write_text('[1, 2]\n{"src": -1}\n')
    assert execute(["serve-check", "served:reference", "served:right", *words]) == 3
    assert "prompt 2 is neither text nor a list of token ids" in capsys.readouterr().err
    # a line for each filter of a document's answers, as lm-evaluation-harness logs them
    samples = [
        {"doc_id": n, "filter": kind, "resps": [["x"]],
         "arguments": {"gen_args_0": {"arg_0": text, "arg_1": {"until": ["."]}}}}
        for kind in ("strict", "flexible") for n, text in enumerate(("abcd", "efg"))
    ]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    assert execute(["serve-check", "served:reference", "served:knows_letters", *words]) == 0
    assert "tokens of 2 prompts compared" in capsys.readouterr().out
    assert execute(["serve-check", "served:reference", "served:right", *words]) == 3
    assert "a prompt is text; give the reference or the engine" in capsys.readouterr().err


class Letters:
    """A tokenizer."""

    encode = staticmethod(lambda text: [ord(letter) - 96 for letter in text])


@pytest.mark.slow  # transformers' continuous batching starts a thread and a scheduler
def test_the_page_as_it_stands(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    page = (Path(__file__).parents[2] / "docs" / "howto" / "serving.md").read_text("utf-8")
    code, prompts, answer = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)[:3]
    (tmp_path / "serving.py").write_text(code)
    (tmp_path / "prompts.jsonl").write_text(prompts)
    monkeypatch.chdir(tmp_path)
    (line,) = re.findall(r"^    whence (serve-check .*)$", page, re.MULTILINE)
    assert execute(line.split()) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[:3] == answer.splitlines()[:3]


def test_a_server_of_this_machine_is_asked():
    engine = Engine()
    engine.logprobs = lambda logits: logits.log_softmax(-1)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ((tokens, logprobs),) = engine.generate([asked["prompt"]], asked["max_tokens"])
            words = [f"token_id:{token}" for token in tokens]
            choice = {"logprobs": {"tokens": words, "token_logprobs": logprobs}}
            if self.path.startswith("/bare"):
                choice = {"text": "no ids"}
            body = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert checked(f"{address}/v1").status == "same"
        engine.logprobs = lambda logits: (logits / 0.8).log_softmax(-1)
        assert "temperature 0.8" in checked(f"{address}/v1").fault.sentence
        with pytest.raises(UsageError, match="holds no token ids"):
            checked(f"{address}/bare")
        server.shutdown()
    with pytest.raises(UsageError, match="completions: "):
        checked(f"{address}/v1")


class Coded(Cache):
    """A cache that keeps codes, with a scale for each token and head. decode: gives rows of codes
    and scales, (1, heads, tokens, ...).
    """

    def __init__(self, limit, decode):
        super().__init__(None, [])
        self.limit, self.decode = limit, decode

    def update(self, keys, values, layer_idx):
        out = []
        for kind, new in (("K", keys), ("V", values)):
            scale = new.abs().amax(-1, keepdim=True) / self.limit
            pair = (new / scale).round(), scale
            if old := self.kept.get((layer_idx, kind)):
                pair = tuple(torch.cat(both, 2) for both in zip(old, pair, strict=True))
            self.kept[layer_idx, kind] = pair
            is_faulty = (layer_idx, kind) == (1, "V") and pair[0].shape[2] > 7
            out.append(self.decode(*pair) if is_faulty else pair[0] * pair[1])
        return tuple(out)


def coded(limit, decode, monkeypatch, **options):
    monkeypatch.setattr(f"{__name__}.Cache", lambda spoil, others: Coded(limit, decode))
    return checked(Engine(), **options)


@pytest.mark.parametrize(("codes", "limit"), [("int8", 127), ("int4", 7)])
def test_codes_that_are_decoded_rightly_are_the_same(codes, limit, monkeypatch):
    result = coded(limit, lambda codes, scale: codes * scale, monkeypatch, cache=codes)
    assert (result.status, result.fault) == ("same", None)
    assert coded(limit, lambda codes, scale: codes * scale, monkeypatch).fault.stage == "cache"


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (lambda codes, scale: codes, "are codes: the scale is missing"),
        (lambda codes, scale: codes * scale * scale, "the scale is applied twice"),
        (lambda codes, scale: codes * scale.flip(1), "with the scale of another head"),
        (lambda codes, scale: codes * scale.roll(1, 2), "with the scale of one position earlier"),
        (lambda codes, scale: codes * scale * 1.3, " 1.3 times what they should be"),
    ],
)
@pytest.mark.parametrize(("codes", "limit"), [("int8", 127), ("int4", 7)])
def test_a_wrong_scale_is_named(decode, words, codes, limit, monkeypatch):
    fault = coded(limit, decode, monkeypatch, cache=codes).fault
    assert (fault.stage, fault.layer, fault.tensor) == ("cache", 1, "V")
    assert fault.step > 0
    assert words in fault.sentence


def in_fp8(rows, scale=1.0):
    held = (torch.from_numpy(rows) / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return held.double().numpy() * scale


@pytest.mark.parametrize(
    ("largest", "kept", "words"),
    [
        (600.0, in_fp8, "are cut off at 448: "),
        (600.0, lambda rows: rows.clip(-100, 100), "are cut off at 100: "),
        (600.0, lambda rows: in_fp8(rows, 2.0), "--cache fp8"),
        (3.0, in_fp8, "--cache fp8"),
        (600.0, lambda rows: rows * 0.7, "0.7 times"),
        (3.0, lambda rows: rows * 0.7, "0.7 times"),
    ],
)
def test_rows_of_few_bits_are_told_from_a_wrong_scale(largest, kept, words):
    held = np.random.default_rng(0).normal(size=(12, 2, 16))
    held[..., [3, 11]] = [largest, -1.1 * largest]
    positions, heads = np.divmod(np.arange(24), 2)
    truth = held[positions, heads]
    rows = WrongRows(Kind.K_READ, kept(truth), truth, positions, heads, held, 0, {})
    assert words in explained(rows)


def test_what_is_wrong_behind_a_quantised_cache_is_found(monkeypatch):
    engine = Engine()
    engine.model.layers[2].value.register_forward_hook(lambda module, args, out: out * 1.001)
    right = Coded(127, lambda codes, scale: codes * scale)
    monkeypatch.setattr(f"{__name__}.Cache", lambda spoil, others: Coded(127, right.decode))
    fault = checked(engine, cache="int8").fault
    assert (fault.stage, fault.name) == ("layer", "layers.2.value")


def test_what_does_not_fit_the_reference_is_said():
    forced, text = Forced(Net(), {"float32"}), [1, 2, 3, 4, 5]
    rows = np.zeros((3, 2, 4)), np.zeros((3, 2, 4))
    assert forced.truth(text, modules=True, handed=[HandedOut(4, {1: rows})]).unfit == {1}
    assert forced.truth(text, modules=True, handed=[HandedOut(4, {})]).unfit == set()


def test_only_what_float32_leaves_open_is_computed_in_float64(monkeypatch):
    wide, truth = [], Forced.truth

    def counted(self, sequence, **options):
        wide.append(tuple(sequence[:4]))
        return truth(self, sequence, **options)

    monkeypatch.setattr(Forced, "truth", counted)
    prompts = [[n, n + 1, n + 2, n + 3] for n in range(1, 6)]
    result = whence.serve_check(Net(), Engine(), prompts, max_new_tokens=4)
    assert (result.status, wide) == ("same", [tuple(prompt) for prompt in prompts[:2]])

    engine, asked = Engine(), []
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(kwargs["past_key_values"]), with_kwargs=True
    )
    engine.model.head.register_forward_hook(
        lambda module, args, out: out * (1 + 1e-4 * (asked[-1].others.index(asked[-1]) == 3))
    )
    result = whence.serve_check(Net(), engine, prompts, max_new_tokens=4)
    assert [check.first for check in result.requests] == [-1, -1, -1, 0, -1]


def test_numbers_of_eight_bits_are_the_same(monkeypatch):
    def narrow(layer, kind, rows, others):
        return rows.to(torch.float8_e4m3fn).to(rows.dtype)

    assert checked(Engine(spoil=narrow), cache="fp8").status == "same"
    assert checked(Engine(spoil=narrow)).fault.stage == "cache"
    with pytest.raises(UsageError, match="no cache of 'int7' is known"):
        checked(Engine(), cache="int7")


class Frozen(Cache):
    """A cache of float8 whose scales are those of the first rows; what is larger later is the
    largest number. over: dimensions that share a scale. shrink: of the later rows' range.
    """

    def __init__(self, over, shrink):
        super().__init__(None, [])
        self.over, self.shrink, self.scales = over, shrink, {}

    def update(self, keys, values, layer_idx):
        out = []
        for kind, new in (("K", keys), ("V", values)):
            key = layer_idx, kind
            largest = 448.0 if key not in self.scales else 448.0 * self.shrink
            scale = self.scales.setdefault(key, new.abs().amax(self.over, keepdim=True) / 448.0)
            codes = (new / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)
            kept = torch.cat([*self.kept.get(key, ()), codes.float() * scale], 2)
            self.kept[key] = (kept,)
            out.append(kept)
        return tuple(out)


@pytest.mark.parametrize("over", [(0, 1, 2, 3), (2, 3)])
def test_numbers_behind_the_end_of_a_frozen_scale_are_the_largest(over, monkeypatch):
    def engine(shrink):
        monkeypatch.setattr(f"{__name__}.Cache", lambda spoil, others: Frozen(over, shrink))
        return Engine()

    assert checked(engine(1.0), cache="fp8").status == "same"
    assert checked(engine(0.5), cache="fp8").fault.stage == "cache"
