"""Capture of logits alone: what is kept of each call, and that the program goes on as if nobody
looked.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import inside
import warm
import whence
from whence import store
from whence.align import prompts as sequences
from whence.errors import UsageError
from whence.instrument import options
from whence.instrument.session import Session
from whence.records import RunInfo
from whence.store import open_run

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent.parent / "comparison"))

from generating import NEW, PROMPTS, generate, loop, model, padded  # noqa: E402

from whence.instrument.torch.logits import LogitsListener  # noqa: E402


def _run(path: Path, net: Any, do: Any, **options: Any) -> tuple[Any, Any]:
    with whence.capture(net, path, level="logits", **options):
        out = do(net)
    return open_run(path), out


def _scores(net: Any, do: Any) -> list[Any]:
    """What the model returned, by a hook of our own."""
    seen: list[Any] = []
    handle = net.register_forward_hook(
        lambda module, given, out: seen.append(out.logits.detach().clone())
    )
    do(net)
    handle.remove()
    return seen


def test_generate_is_kept_call_by_call(tmp_path):
    run, tokens = _run(tmp_path / "run", model(), generate)
    seen = _scores(model(), generate)
    assert len(run.calls) == NEW
    for call, logits in zip(run.calls, seen):
        [ref] = call.slots("output")
        assert (ref.slot, call.step, call.parent, call.leaf) == ("output.logits", call.id, -1, True)
        np.testing.assert_array_equal(run.array(ref.record), logits[:, -1:].numpy())
        assert not call.slots("param")
    assert tokens == generate(model())


def test_the_program_does_not_change(tmp_path):
    def sample(net: Any) -> Any:
        torch.manual_seed(3)
        return (
            generate(net, do_sample=True),
            torch.rand(3).tolist(),
            [len(m._forward_hooks) for m in net.modules()],
        )

    assert _run(tmp_path / "run", model(), sample)[1] == sample(model())


def test_the_last_real_token_of_every_row_whatever_side_is_padded(tmp_path):
    for left in (True, False):
        ids, mask = padded(PROMPTS, left)

        def ask(net: Any, ids: Any = ids, mask: Any = mask) -> Any:
            with torch.no_grad():
                return net(input_ids=ids, attention_mask=mask).logits

        run, logits = _run(tmp_path / f"{left}", model(), ask)
        at = [ids.shape[1] - 1] * len(PROMPTS) if left else [len(p) - 1 for p in PROMPTS]
        wanted = logits[torch.arange(len(PROMPTS)), torch.tensor(at)].numpy()
        np.testing.assert_array_equal(
            run.array(run.calls[0].slots("output")[0].record)[:, 0], wanted
        )
        found = sequences.prompts(run)
        assert [p.ids for p in found] == list(PROMPTS)
        assert all(set(p.scores) == {len(p.ids) - 1} for p in found)
        for row, prompt in enumerate(found):
            np.testing.assert_array_equal(
                sequences.logits(run, prompt.scores[len(prompt.ids) - 1]), wanted[row]
            )


def test_logits_that_come_through_the_staging_ring(tmp_path):
    """As those of a device do."""
    runs = []
    for staged in (False, True):
        path = tmp_path / f"{staged}"
        chosen = options.make(logits=True)
        store.create(str(path), RunInfo(options=chosen.asdict()))
        session = Session(
            lambda rank, path=path: store.Writer(str(path), rank), chosen, max_bytes=10**9
        )
        net = model()
        listener = LogitsListener(session, net, staged=staged)
        listener.install()
        try:
            generate(net)
        finally:
            listener.remove()
            session.close()
        runs.append(open_run(path))
    found = whence.compare(*runs)
    assert (found.status, set(found.counts), found.generation.compared) == (
        "same",
        {"identical"},
        NEW * len(PROMPTS),
    )


def test_all_positions(tmp_path):
    ids, mask = padded(PROMPTS, left=False)

    def ask(net: Any) -> Any:
        with torch.no_grad():
            return net(input_ids=ids, attention_mask=mask).logits.numpy()

    run, logits = _run(tmp_path / "run", model(), ask, positions="all")
    for row, prompt in enumerate(sequences.prompts(run)):
        assert set(prompt.scores) == set(range(len(prompt.ids)))
        for i, scored in prompt.scores.items():
            np.testing.assert_array_equal(sequences.logits(run, scored), logits[row, i])


@pytest.mark.parametrize("cached", [True, False])
def test_a_plain_loop_is_one_sequence(tmp_path, cached):
    run, tokens = _run(
        tmp_path / "run", model(), lambda net: [loop(net, p, cached=cached) for p in PROMPTS[:3]]
    )
    found = sequences.prompts(run)
    assert [p.ids for p in found] == list(PROMPTS[:3])
    assert [p.tokens for p in found] == [(*p, *t[:-1]) for p, t in zip(PROMPTS, tokens)]
    for prompt, made in zip(found, tokens):
        chosen = [
            int(sequences.logits(run, prompt.scores[i]).argmax()) for i in sorted(prompt.scores)
        ]
        assert chosen == made


@pytest.mark.parametrize(("token", "left"), [(0, False), (3, False), (3, True)])
def test_rows_of_one_length_without_a_mask(tmp_path, token, left):
    """The padding shows in what is written over it: each generated token is the choice of the
    logits that are read for it.
    """
    length, texts = max(map(len, PROMPTS)) + NEW + 2, [list(prompt) for prompt in PROMPTS]

    def ask(net: Any) -> Any:
        rows = [list(text) for text in texts]
        for _ in range(NEW):
            ids = torch.full((len(rows), length), token)
            for row, text in zip(ids, rows, strict=True):
                row[slice(length - len(text), None) if left else slice(0, len(text))] = (
                    torch.tensor(text)
                )
            with torch.no_grad():
                logits = net(input_ids=ids).logits
            for n, text in enumerate(rows):
                text.append(int(logits[n, -1 if left else len(text) - 1].argmax()))
        return [row[len(text) :] for row, text in zip(rows, texts, strict=True)]

    run, tokens = _run(tmp_path / "run", model(), ask)
    found = sequences.prompts(run)
    assert [p.ids for p in found] == list(PROMPTS)
    for prompt, made in zip(found, tokens, strict=True):
        assert [
            int(sequences.logits(run, prompt.scores[i]).argmax())
            for i in sorted(prompt.scores)
            if i >= prompt.prompt - 1
        ] == made


def test_padding_of_a_single_call_is_not_guessed(tmp_path):
    ids = torch.tensor([[*PROMPTS[0], *[7] * 6]])

    def ask(net: Any) -> Any:
        with torch.no_grad():
            return net(input_ids=ids).logits

    runs = [_run(tmp_path / name, model(), ask)[0] for name in ("a", "b")]
    result = whence.compare(*runs)
    assert result.status == "undecided"
    assert result.generation.tokens == ()
    assert "is not known" in result.headline


def test_a_model_without_an_axis_for_the_batch(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)

        def forward(self, ids: Any) -> Any:
            return self.head(self.embed(ids).cumsum(0))

    def go(net: Any) -> list[int]:
        tokens = [3, 4]
        for _ in range(4):
            tokens.append(int(net(torch.tensor(tokens))[-1].argmax()))
        return tokens

    run, tokens = _run(tmp_path / "run", Net().eval(), go)
    assert run.records[run.calls[-1].slots("output")[0].record].shape == (1, 50)
    [found] = sequences.prompts(run)
    assert (found.ids, found.tokens) == ((3, 4), tuple(tokens[:-1]))
    assert [
        int(sequences.logits(run, found.scores[i]).argmax()) for i in sorted(found.scores)
    ] == tokens[2:]


class Hidden(torch.nn.Module):
    """Returns hidden states; its head is called inside, and its scores go nowhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)

    def forward(self, ids: Any) -> Any:
        hidden = self.embed(ids)
        self.best = self.head(hidden).argmax(-1)
        return hidden


def test_a_module_is_named_where_the_model_returns_no_logits(tmp_path):
    net = Hidden().eval()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    run, _ = _run(tmp_path / "silent", net, lambda net: net(ids))
    assert not run.calls[0].slots("output")
    assert "--logits-module" in next(n.text for n in run.notes if n.kind == "logits")
    run, hidden = _run(tmp_path / "named", net, lambda net: net(ids), logits_module="head")
    wanted = net.head(hidden)[:, -1:].detach().numpy()
    np.testing.assert_array_equal(run.array(run.calls[0].slots("output")[0].record), wanted)
    run, _ = _run(tmp_path / "wrong", net, lambda net: net(ids), logits_module="haed")
    assert any("was never called" in n.text for n in run.notes)
    assert whence.compare(tmp_path / "silent", tmp_path / "silent").status == "undecided"


def test_steps(tmp_path):
    run, _ = _run(tmp_path / "run", model(), generate, steps="0:5")
    assert [c.step for c in run.calls if c.slots("output")] == [0, 1, 2, 3, 4]
    assert whence.compare(tmp_path / "run", tmp_path / "run").generation.compared == 5 * len(
        PROMPTS
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"include": "lm_head"}, "include chooses modules"),
        ({"max_depth": 1}, "max_depth chooses modules"),
        ({"keep": "stats"}, "keeps the elements"),
        ({"positions": "first"}, "not one of last, all"),
        ({"level": "modules", "positions": "all"}, "needs --level logits"),
        ({"level": "modules", "logits_module": "lm_head"}, "needs --level logits"),
        ({"level": "logit"}, "did you mean logits"),
        ({"force_tokens": "nowhere"}, "nowhere"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path, given, words):
    with (
        pytest.raises((UsageError, whence.errors.UnreadableRun), match=words),
        whence.capture(model(), tmp_path / "run", **({"level": "logits"} | given)),
    ):
        pass
    assert not (tmp_path / "run").exists()


# ---- forced tokens


def test_forced_tokens_through_every_way_of_choosing(tmp_path):
    """Cached or not, batched otherwise, greedy or sampled: the program goes on with the reference's
    tokens, its own logits are kept.
    """
    _, tokens = _run(tmp_path / "ref", model(), generate)
    other = model(seed=1)
    own = generate(other)
    assert own != tokens
    ways = {
        "generate": generate,
        "one": lambda net: [generate(net, [p])[0] for p in PROMPTS],
        "loop": lambda net: [loop(net, p) for p in PROMPTS],
        "again": lambda net: [loop(net, p, cached=False) for p in PROMPTS],
        "sampled": lambda net: generate(net, do_sample=True, temperature=0.7, top_k=5, top_p=0.9),
        "penalty": lambda net: generate(net, repetition_penalty=1.3),
        "backwards": lambda net: generate(net, PROMPTS[::-1])[::-1],
    }
    for name, way in ways.items():
        run, forced = _run(tmp_path / name, other, way, force_tokens=tmp_path / "ref")
        assert forced == tokens, name
        found = {p.ids: p for p in sequences.prompts(run)}
        chosen = [
            [
                int(sequences.logits(run, found[p].scores[i]).argmax())
                for i in sorted(found[p].scores)
            ]
            for p in PROMPTS
        ]
        assert chosen != tokens, name
        assert np.isfinite(sequences.logits(run, found[PROMPTS[0]].scores[3])).all()
    assert generate(other) == own


def test_a_sampled_reference_is_forced_up_to_its_last_token(tmp_path):
    def sample(net: Any) -> Any:
        torch.manual_seed(1)
        return generate(net, do_sample=True, temperature=2.0)

    _, tokens = _run(tmp_path / "ref", model(), sample)
    _, forced = _run(tmp_path / "tgt", model(seed=1), generate, force_tokens=tmp_path / "ref")
    assert [t[:-1] for t in forced] == [t[:-1] for t in tokens]


def test_forced_in_a_full_capture_too(tmp_path):
    _, tokens = _run(tmp_path / "ref", model(), generate)
    net = model(seed=1)
    with whence.capture(net, tmp_path / "tgt", force_tokens=tmp_path / "ref"):
        forced = generate(net)
    assert forced == tokens


def test_what_the_reference_does_not_have_is_left_alone_and_said(tmp_path):
    _run(tmp_path / "ref", model(), lambda net: generate(net, PROMPTS[:2]))
    net = model(seed=1)
    run, forced = _run(
        tmp_path / "tgt",
        net,
        lambda net: generate(net, PROMPTS[4:6]),
        force_tokens=tmp_path / "ref",
    )
    assert forced == generate(net, PROMPTS[4:6])
    assert any("goes another way" in n.text for n in run.notes if n.kind == "force-refused")
    assert any(n.text.startswith("0 tokens") for n in run.notes if n.kind == "forced")


SCRIPT = """
import sys
sys.path.insert(0, {api!r})
from generating import *
print(generate(model(seed=int(sys.argv[1]))))
"""


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    script = tmp_path / "generate.py"
    script.write_text(SCRIPT.format(api=str(Path(__file__).parent.parent / "comparison")))

    def run(name: str, seed: int, *options: str) -> str:
        command = [
            warm.TORCH,
            "-m",
            "whence",
            "run",
            "-o",
            str(tmp_path / name),
            "--level",
            "logits",
            *options,
        ]
        done = subprocess.run(
            [*command, "--", warm.TORCH, str(script), str(seed)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    tokens = run("ref", 0, "--steps", "0:1000")
    assert run("forced", 1, "--force-tokens", str(tmp_path / "ref")) == tokens
    assert run("own", 1) != tokens
    done = inside.whence(tmp_path, "compare", "ref", "forced", "-o", "cmp")
    assert done.returncode == 1
    assert "TOKENS             0 of 8 prompts pass; 96 of 96 tokens compared" in done.stdout
    assert (tmp_path / "cmp" / "generation.csv").read_text().startswith("verdict,prompt,token,")
