"""What two runs generated, token by token: coin flips are explained, faults are not, and what was
not compared is no pass.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whence
from whence.report.answer import answer
from whence.store import open_run

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from generating import NEW, PROMPTS, from_step, generate, loop, model  # noqa: E402


def _captured(path: Path, net: Any, run: Any = generate, **options: Any) -> Any:
    with whence.capture(net, path, **({"logits": True} | options)):
        return run(net)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    path = tmp_path_factory.mktemp("generation") / "ref"
    return path, _captured(path, model())


def _one_by_one(net: Any) -> list[list[int]]:
    return [loop(net, prompt) for prompt in PROMPTS]


def _again_and_again(net: Any) -> list[list[int]]:
    return [loop(net, prompt, cached=False) for prompt in PROMPTS]


def test_the_table_holds_the_prompts_and_the_tokens_that_were_generated(reference, tmp_path):
    path, tokens = reference
    _captured(tmp_path / "tgt", model())
    found = whence.compare(path, tmp_path / "tgt")
    made = found.generation
    assert (found.status, set(found.counts)) == ("same", {"identical"})
    assert [p.ids for p in made.prompts] == list(PROMPTS)
    assert [(p.step, p.row, p.outcome, p.compared, p.of) for p in made.prompts] == [
        (0, n, "equal", NEW, NEW) for n in range(len(PROMPTS))
    ]
    table = [
        [t.reference for t in sorted(made.tokens, key=lambda t: t.index) if t.prompt == n + 1]
        for n in range(len(PROMPTS))
    ]
    assert table == tokens


@pytest.mark.parametrize(
    "way",
    [
        _one_by_one,
        _again_and_again,
        lambda net: [row for p in PROMPTS for row in generate(net, [p])],
    ],
)
def test_a_batch_against_loops_with_and_without_a_cache(reference, tmp_path, way):
    assert _captured(tmp_path / "tgt", model(), way) == reference[1]
    found = whence.compare(reference[0], tmp_path / "tgt")
    made = found.generation
    assert (found.status, found.findings) == ("same", ())
    assert (made.compared, made.of, {p.outcome for p in made.prompts}) == (
        NEW * len(PROMPTS),
        NEW * len(PROMPTS),
        {"equal"},
    )
    assert [p.target_step for p in made.prompts] == [NEW * n for n in range(len(PROMPTS))]
    assert 0 < made.noise < 1e-5


def test_flips_of_bf16_are_explained_and_the_rest_is_not_counted_as_compared(reference, tmp_path):
    path, tokens = reference
    others = _captured(tmp_path / "tgt", model(torch.bfloat16))
    found = whence.compare(path, tmp_path / "tgt")
    made = found.generation
    parted = [
        next((k for k, (a, b) in enumerate(zip(x, y)) if a != b), NEW)
        for x, y in zip(tokens, others)
    ]
    assert any(k < NEW for k in parted), "the test needs a flip"
    assert [p.compared for p in made.prompts] == [min(k + 1, NEW) for k in parted]
    assert [p.outcome for p in made.prompts] == [
        "explained" if k < NEW else "equal" for k in parted
    ]
    assert found.findings == ()
    enough = made.compared >= 0.9 * made.of
    assert found.status == ("same" if enough else "undecided")
    assert enough or "--force-tokens" in found.headline
    assert whence.compare(path, tmp_path / "tgt", min_coverage=0.0).status == "same"


def test_forced_tokens_keep_every_token_comparable(reference, tmp_path):
    path, tokens = reference
    assert _captured(tmp_path / "tgt", model(torch.bfloat16), force_tokens=path) == tokens
    found = whence.compare(path, tmp_path / "tgt")
    made = found.generation
    assert (found.status, made.compared, made.of, made.forced) == (
        "same",
        NEW * len(PROMPTS),
        NEW * len(PROMPTS),
        True,
    )
    assert sum(p.flips[0] for p in made.prompts) > 0
    assert sum(p.flips[1] for p in made.prompts) == 0


@pytest.mark.parametrize(
    ("dtype", "forced"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)]
)
def test_a_fault_from_step_3_on(reference, tmp_path, dtype, forced):
    path = reference[0]
    net = model(dtype)
    from_step(net, "model.layers.1.mlp", 3, by=3.0)
    _captured(tmp_path / "tgt", net, **({"force_tokens": path} if forced else {}))
    found = whence.compare(path, tmp_path / "tgt")
    assert found.status == "different"
    [finding] = found.findings
    assert (finding.name, finding.step, finding.slot) == ("LlamaForCausalLM", 3, "output.logits")
    assert "token 3" in finding.sentence
    made = found.generation
    assert {t.verdict for t in made.tokens if t.step < 3} <= {"identical", "noise", "explained"}
    assert any(not p.passes for p in made.prompts)


def test_full_captures_lead_from_the_token_to_the_module(tmp_path):
    prompts = PROMPTS[:3]
    _captured(tmp_path / "ref", model(), lambda net: generate(net, prompts, 6), logits=False)
    net = model()
    from_step(net, "model.layers.1.mlp", 3, by=3.0)
    _captured(tmp_path / "tgt", net, lambda net: generate(net, prompts, 6), logits=False)
    found = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    made = found.generation
    assert (found.findings[0].name, found.findings[0].step) == ("model.layers.1.mlp", 3)
    assert made.led_to == "model.layers.1.mlp"
    assert made.tokens[made.suspect].step == 3
    text = answer(found)
    assert "  behind it        model.layers.1.mlp" in text
    assert not made.logits_only


def test_a_fault_without_effect_on_tokens_is_said_to_have_none(tmp_path):
    prompts = PROMPTS[:2]
    _captured(tmp_path / "ref", model(), lambda net: generate(net, prompts, 4), logits=False)
    net = model()
    from_step(net, "model.layers.1.mlp.down_proj", 2, by=1.0001)
    _captured(tmp_path / "tgt", net, lambda net: generate(net, prompts, 4), logits=False)
    found = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert found.status == "different"
    assert {p.passes for p in found.generation.prompts} == {True}
    assert all(
        any("model.layers.1.mlp.down_proj" in n for n in p.no_effect)
        for p in found.generation.prompts
    )
    assert (
        "  no effect        on the tokens of prompts 1, 2: model.layers.1.mlp.down_proj "
        "(introduced)" in answer(found)
    )


def test_logits_against_a_full_capture(reference, tmp_path):
    _captured(tmp_path / "tgt", model(), logits=False)
    found = whence.compare(reference[0], tmp_path / "tgt")
    assert (found.status, found.generation.logits_only, set(found.counts)) == (
        "same",
        True,
        {"identical"},
    )


def test_a_fault_from_the_first_token_on_has_no_noise_to_hide_in(reference, tmp_path):
    net = model()
    with torch.no_grad():
        net.model.layers[0].self_attn.o_proj.weight *= 2
    _captured(tmp_path / "tgt", net)
    found = whence.compare(reference[0], tmp_path / "tgt")
    assert (found.status, found.findings[0].step) == ("different", 0)


def test_sampling_with_one_seed_and_with_two(tmp_path):
    def sample(seed: int) -> Any:
        def run(net: Any) -> Any:
            torch.manual_seed(seed)
            return generate(net, do_sample=True, temperature=1.5)

        return run

    first = _captured(tmp_path / "ref", model(), sample(1))
    assert _captured(tmp_path / "same", model(), sample(1)) == first
    assert _captured(tmp_path / "other", model(), sample(2)) != first
    assert whence.compare(tmp_path / "ref", tmp_path / "same").status == "same"
    found = whence.compare(tmp_path / "ref", tmp_path / "other")
    assert (found.status, found.findings) == ("undecided", ())
    assert "sampled" in {p.outcome for p in found.generation.prompts}
    assert {p.outcome for p in found.generation.prompts} <= {"sampled", "equal"}
    assert "sampled or searched" in answer(found)


def test_beams_are_compared_up_to_the_first_row_that_parts(tmp_path):
    def beams(net: Any) -> Any:
        return generate(net, PROMPTS[:2], num_beams=3)

    _captured(tmp_path / "ref", model(), beams)
    _captured(tmp_path / "same", model(), beams)
    assert whence.compare(tmp_path / "ref", tmp_path / "same").status == "same"
    _captured(tmp_path / "bf16", model(torch.bfloat16), beams)
    found = whence.compare(tmp_path / "ref", tmp_path / "bf16")
    assert found.findings == ()
    with (
        pytest.raises(whence.errors.UsageError, match="several times in one call"),
        whence.capture(model(), tmp_path / "forced", logits=True, force_tokens=tmp_path / "ref"),
    ):
        pass
    assert not (tmp_path / "forced").exists()


def test_a_target_that_stops_early_is_no_pass(reference, tmp_path):
    _captured(tmp_path / "tgt", model(), lambda net: generate(net, new=NEW // 2))
    found = whence.compare(reference[0], tmp_path / "tgt")
    assert found.status == "undecided"
    assert {p.outcome for p in found.generation.prompts} == {"not compared"}
    assert "the target ends early" in found.headline


def test_other_prompts_are_undecided(reference, tmp_path):
    _captured(tmp_path / "tgt", model(), lambda net: generate(net, [(1, 1, 1, 1)]))
    found = whence.compare(reference[0], tmp_path / "tgt")
    assert (found.status, found.generation.alone_reference, found.generation.alone_target) == (
        "undecided",
        len(PROMPTS),
        1,
    )


def test_rows_that_end_before_others_are_filled_up_and_end_there(tmp_path):
    net = model()
    ends = generate(net)[3][4]
    net.generation_config.eos_token_id = ends
    tokens = _captured(tmp_path / "ref", net)
    again = model()
    again.generation_config.eos_token_id = ends
    _captured(tmp_path / "one", again, lambda n: [generate(n, [p])[0] for p in PROMPTS])
    found = whence.compare(tmp_path / "ref", tmp_path / "one")
    wanted = [row.index(ends) + 1 if ends in row else NEW for row in tokens]
    assert min(wanted) < NEW
    assert [p.of for p in found.generation.prompts] == wanted
    assert (found.status, {p.outcome for p in found.generation.prompts}) == ("same", {"equal"})


def test_nan_logits_are_never_noise(reference, tmp_path):
    net = model()
    calls = [0]

    def poison(module: Any, given: Any, out: Any) -> Any:
        calls[0] += 1
        return out.index_fill(-1, torch.tensor([63]), float("nan")) if calls[0] == 4 else None

    net.lm_head.register_forward_hook(poison)
    _captured(tmp_path / "tgt", net, force_tokens=reference[0])
    found = whence.compare(reference[0], tmp_path / "tgt")
    assert (found.status, found.findings[0].step) == ("different", 3)
    assert "NaN" in found.findings[0].sentence


def test_the_files(reference, tmp_path):
    _captured(tmp_path / "tgt", model(torch.bfloat16), force_tokens=reference[0])
    found = whence.compare(reference[0], tmp_path / "tgt", output=tmp_path / "cmp")
    rows = list(csv.DictReader((tmp_path / "cmp" / "generation.csv").read_text().splitlines()))
    assert len(rows) == found.generation.compared
    left, right = open_run(reference[0]), open_run(tmp_path / "tgt")
    for row in rows[::17]:
        x, y = (_logits(run, int(row["step"]), int(row["row"])) for run in (left, right))
        assert float(row["cosine_similarity"]) == pytest.approx(
            x @ y / np.linalg.norm(x) / np.linalg.norm(y)
        )
        assert float(row["margin"]) == pytest.approx(np.sort(x)[-1] - np.sort(x)[-2])
        assert int(row["reference"]) == x.argmax()
        assert float(row["rank"]) == (y > y[x.argmax()]).sum()
    assert whence.load_comparison(tmp_path / "cmp") == found


def _logits(run: Any, step: int, row: int) -> Any:
    call = next(c for c in run.calls if c.step == step)
    return run.array(call.slots("output")[0].record)[row, 0].astype(np.float64)


@pytest.mark.parametrize("level", ["logits", "modules"])
def test_a_serving_engine_that_scores_its_last_tokens_behind_the_model(tmp_path, level):
    """Against one forward for each text: only its last token has logits of its own; in full
    captures all of them.
    """
    from served_net import Engine, Library, ask, serve

    library, engine = Library().eval(), Engine(Library()).eval()
    with torch.no_grad():
        _captured(tmp_path / "ref", library, ask, logits=level == "logits")
        _captured(tmp_path / "tgt", engine, serve, logits=level == "logits")
        engine.logits_processor.register_forward_hook(
            lambda module, given, out: out * torch.linspace(1, 2, out.shape[-1])
        )
        _captured(tmp_path / "wrong", engine, serve, logits=level == "logits")
    found = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    made = found.generation
    assert (found.status, [p.outcome for p in made.prompts], made.compared) == (
        "same",
        ["equal"] * 3,
        3 if level == "logits" else 13,
    )
    assert whence.compare(tmp_path / "ref", tmp_path / "wrong").generation.suspect == 0


def test_a_generation_that_goes_on_is_not_the_same(tmp_path):
    class Next(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.head = torch.nn.Embedding(30, 8), torch.nn.Linear(8, 30)

        def forward(self, ids):
            return self.head(self.words(ids))

    for name, tokens in (("ref", 3), ("tgt", 5)):
        net, ids = Next(), torch.tensor([[4, 9, 2, 7]])
        with torch.no_grad(), whence.capture(net, tmp_path / name):
            for _ in range(tokens):
                ids = torch.cat((ids, net(ids)[:, -1:].argmax(-1)), 1)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert result.status == "undecided"
    assert "the target generates 5 tokens and the reference 3" in result.headline


def test_again_says_how_far_the_reference_is_from_itself(reference, tmp_path):
    """A small change of the weights: noise for whoever takes it as a repetition of the reference, a
    fault for who does not.
    """
    nets = [model(), model()]
    for net, by in zip(nets, (1.001, 0.999)):
        with torch.no_grad():
            net.model.layers[0].mlp.down_proj.weight *= by
    for name, net in zip(("again", "tgt"), nets):
        _captured(tmp_path / name, net, force_tokens=reference[0])
    assert whence.compare(reference[0], tmp_path / "tgt").status != "same"
    assert (
        whence.compare(reference[0], tmp_path / "tgt", again=[tmp_path / "again"]).status == "same"
    )


class Experts(torch.nn.Module):
    """A model that sends each token to one of two experts, whose scores are a hair apart."""

    class Router(torch.nn.Module):
        def __init__(self, tilt: float) -> None:
            super().__init__()
            self.tilt = tilt

        def forward(self, x: Any) -> Any:
            return (x[..., 0] + self.tilt >= 0).long()

    def __init__(self, tilt: float = 0.0, wrong: float = 1.0, score: float = -1e-7) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.wrong = wrong
        self.embed = torch.nn.Embedding(16, 8)
        self.router = Experts.Router(tilt)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.head = torch.nn.Linear(8, 16)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, generator=generator)
        torch.nn.init.constant_(self.embed.weight[:, 0].detach(), score)

    def forward(self, input_ids: Any) -> Any:
        x = self.embed(input_ids)
        chosen = self.router(x).unsqueeze(-1)
        y = torch.where(chosen == 0, self.experts[0](x), self.experts[1](x)) * self.wrong
        return self.head(y)


def _asked(net: Any) -> None:
    with torch.no_grad():
        for step in range(6):
            net((torch.arange(10).reshape(2, 5) + step) % 16)


@pytest.mark.parametrize("tilt, wrong", ((1e-6, 1.0), (0.0, 1.5)))
def test_logits_of_experts_do_not_tell_a_near_tie_from_a_fault(tmp_path, tilt, wrong):
    """Neither another expert at a near tie nor a wrong factor: both move logits alike."""
    for name, net in (("ref", Experts()), ("tgt", Experts(tilt, wrong))):
        _captured(tmp_path / name, net, _asked)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert result.status == "undecided" and result.findings[0].confidence == "suspect"
    assert "the model sends tokens to experts" in result.headline
    assert any(s.command.startswith("whence run --keep full ") for s in result.next)
    text = answer(result)
    assert "\nSUSPECT " in text and "FAULT" not in text


def test_not_a_number_is_a_fault_of_experts_too(tmp_path):
    for name, wrong in (("ref", 1.0), ("tgt", float("nan"))):
        _captured(tmp_path / name, Experts(0.0, wrong), _asked)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert result.status == "different"


def _written(net: Any) -> None:
    ids = torch.arange(8).reshape(4, 2)
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, net(ids)[:, -1:].argmax(-1)], 1)


def test_tokens_that_no_module_gets_wrong_are_inherited(tmp_path):
    """bfloat16 rounds a score across the threshold: another expert, and no operator is wrong."""
    for name, dtype in (("ref", torch.float32), ("tgt", torch.bfloat16)):
        net = Experts(-0.3335, score=0.33305)
        _captured(tmp_path / name, net.to(dtype), _written, logits=False)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    generation = result.generation
    assert result.status == "same" and all(prompt.passes for prompt in generation.prompts)
    assert {t.verdict for t in generation.tokens if t.reference != t.target} == {"inherited"}
    text = answer(result)
    assert "\n  inherited " in text and "not explained by" not in text and "FAIL" not in text


def test_behind_a_parameter_that_differs_no_token_is_explained_by_rounding(tmp_path):
    prompts = PROMPTS[:3]
    _captured(tmp_path / "ref", model(), lambda net: generate(net, prompts, 4), logits=False)
    net = model()
    with torch.no_grad():
        net.model.layers[1].mlp.down_proj.weight[:, ::2] *= 1.5
    _captured(tmp_path / "tgt", net, lambda net: generate(net, prompts, 4), logits=False)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    generation = result.generation
    assert result.findings[0].verdict == "param-diff"
    failing = [p for p in generation.prompts if not p.passes]
    assert failing and {p.led_to for p in failing} == {result.findings[0].name}
    assert not any(t.verdict in ("explained", "noise") for t in generation.tokens)
    assert not any(p.flips[0] for p in generation.prompts)
    assert f"behind {result.findings[0].name}" in answer(result)


class Coded(torch.nn.Module):
    """A model whose head has codes of 8 bits."""

    def __init__(self, scale: float = 1.0, scaled_first: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scale, self.scaled_first = scale, scaled_first
        self.embed = torch.nn.Embedding(16, 8)
        torch.nn.init.normal_(self.embed.weight, generator=generator)
        codes = torch.randint(-127, 128, (8, 32), generator=generator, dtype=torch.int8)
        self.codes = torch.nn.Parameter(codes, requires_grad=False)

    def forward(self, input_ids: Any) -> Any:
        x, steps = self.embed(input_ids).cumsum(1), self.codes.float()
        scale = torch.ones(32).index_fill(0, torch.arange(16), self.scale) / 127
        return x @ (steps * scale) if self.scaled_first else (x @ steps) * scale


@pytest.mark.parametrize(("scale", "status"), [(1.0, "same"), (1.8, "different")])
def test_codes_are_no_reason_for_logits_that_part(tmp_path, scale, status):
    for name, net in (("ref", Coded()), ("tgt", Coded(scale, scaled_first=False))):
        _captured(tmp_path / name, net, _asked)
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert result.status == status
    assert {t.verdict for t in result.generation.tokens} <= (
        {"off", "unexplained"} if status == "different" else {"identical", "noise"}
    )
