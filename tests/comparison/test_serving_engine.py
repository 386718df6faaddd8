"""A serving engine against the library that its model comes from: no map, no fault of its own; one
that is planted is named.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whence
from whence import api
from whence.report.plan import plan_map

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from served_net import Engine, EngineRotary, Library, ask, serve  # noqa: E402

Plant = Callable[[Any], object]


def _engine() -> Engine:
    return Engine(Library()).eval()


def _run(path: Path, plant: Plant | None = None, **how: Any) -> Path:
    model = _engine()
    if plant is not None:
        plant(model)
    with torch.no_grad(), whence.capture(model, path):
        serve(model, **how)
    return path


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, model = tmp_path_factory.mktemp("served") / "ref", Library().eval()
    with torch.no_grad(), whence.capture(model, path):
        ask(model)
    return path


def test_the_engine_computes_what_the_library_does() -> None:
    """The stand-in itself: its scores are those of the library, by numpy."""
    library, seen, wanted = Library().eval(), [], []
    engine = Engine(library)
    engine.logits_processor.register_forward_hook(lambda m, a, out: seen.append(out.numpy()))
    library.register_forward_hook(lambda m, a, out: wanted.append(out["logits"][0].numpy()))
    with torch.no_grad():
        ask(library)
        serve(engine)
    assert [len(s) for s in seen] == [
        2,
        3,
        3,
        3,
        2,
    ]  # rows of the steps: 0 has two chunks of its prompt, 2 comes later
    np.testing.assert_allclose(seen[1][0], wanted[0][8], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(seen[-1][-1], wanted[2][7], rtol=1e-3, atol=1e-5)


def test_clean(asked: Path, tmp_path: Path) -> None:
    found = whence.compare(asked, _run(tmp_path / "tgt"))
    assert (found.status, found.findings, found.inputs_differ) == ("same", (), ())
    assert found.coverage.share > 0.95
    assert found.coverage.root_outputs_measured
    faces = {a.scope: b.scope for a, b in _pairs(asked, tmp_path / "tgt", found)}
    assert faces["lm_head"] == "logits_processor"
    assert faces["model.layers.1.self_attn.k_proj"] == "model.layers.1.self_attn.qkv_proj"
    assert faces["model.layers.2.mlp.up_proj"] == "model.layers.2.mlp.gate_up_proj"
    notes = " ".join(found.plan.notes)
    assert "3 of 3 sequences are paired" in notes
    assert "are empty in the target (packed by its engine)" in notes


def test_the_map_that_is_proposed_says_what_was_found(asked: Path, tmp_path: Path) -> None:
    """Read back it gives the same answer, and a fault is named as without it."""
    target, chart = _run(tmp_path / "tgt"), tmp_path / "map.yaml"
    aligned = api.align_runs(asked, target)
    chart.write_text(plan_map(aligned.as_said(), aligned.reference, aligned.target))
    assert "rearrange(qkv_proj[..., 48:96], 'a b -> 1 a b')" in chart.read_text()
    found, plain = whence.compare(asked, target, mapping=chart), whence.compare(asked, target)
    assert (found.status, found.coverage, found.counts) == ("same", plain.coverage, plain.counts)
    faulty = _run(
        tmp_path / "faulty",
        lambda m: m.model.layers[1].mlp.down_proj.register_forward_hook(_scaled(_all)),
    )
    names = [
        [f.name for f in whence.compare(asked, faulty, mapping=m).findings] for m in (None, chart)
    ]
    assert names == [["model.layers.1.mlp.down_proj"]] * 2


def _pairs(reference: Path, target: Path, found: Any) -> list[tuple[Any, Any]]:
    from whence import align
    from whence.store import open_run

    aligned = align.align(open_run(reference), open_run(target))
    assert len(aligned.plan.pairs) == len(found.plan.pairs)
    return [
        (aligned.reference.calls[p.reference], aligned.target.calls[p.target])
        for p in aligned.plan.pairs
    ]


def test_clean_with_a_warm_up_and_other_chunks(asked: Path, tmp_path: Path) -> None:
    found = whence.compare(asked, _run(tmp_path / "tgt", warm_up=True, chunk=4))
    assert (found.status, found.findings) == ("same", ())
    assert "1 sequences of the target have no partner" in " ".join(found.plan.notes)


def test_one_engine_twice(tmp_path: Path) -> None:
    found = whence.compare(_run(tmp_path / "ref"), _run(tmp_path / "tgt", chunk=20))
    assert (found.status, found.coverage.share) == ("same", 1.0)


def test_the_other_way_round(asked: Path, tmp_path: Path) -> None:
    found = whence.compare(_run(tmp_path / "ref"), asked)
    assert (found.status in ("same", "undecided"), found.findings, found.inputs_differ) == (
        True,
        (),
        (),
    )
    assert found.coverage.root_outputs_measured


def _scaled(
    rows: Callable[[int], slice | None], by: float = 1.01, channels: slice = slice(None)
) -> Any:
    def hook(module: Any, given: Any, out: Any) -> Any:
        at = rows(len(out))
        if at is None:
            return None
        out = out.clone()
        out[at, channels] *= by
        return out

    return hook


def _all(n: int) -> slice:
    return slice(None)


def _base(model: Engine) -> None:
    model.model.layers[0].self_attn.rotary_emb.cos_sin_cache.copy_(EngineRotary(2e4).cos_sin_cache)


def _eps(model: Engine) -> None:
    model.model.layers[1].post_attention_layernorm.eps = 1e-2


FAULTS: dict[str, tuple[Plant, str]] = {
    "all tokens": (
        lambda m: m.model.layers[2].mlp.down_proj.register_forward_hook(_scaled(_all)),
        "model.layers.2.mlp.down_proj",
    ),
    "prefill": (
        lambda m: m.model.layers[1].mlp.down_proj.register_forward_hook(
            _scaled(lambda n: slice(None) if n > 3 else None)
        ),
        "model.layers.1.mlp.down_proj",
    ),
    "decode": (
        lambda m: m.model.layers[1].self_attn.attn.register_forward_hook(
            _scaled(lambda n: slice(None) if n <= 3 else None)
        ),
        "model.layers.1.self_attn",
    ),
    "one request": (
        lambda m: m.model.layers[1].self_attn.o_proj.register_forward_hook(
            _scaled(lambda n: slice(0, 6) if n == 9 else None)
        ),
        "model.layers.1.self_attn.o_proj",
    ),
    "q": (
        lambda m: m.model.layers[1].self_attn.qkv_proj.register_forward_hook(
            _scaled(_all, channels=slice(0, 48))
        ),
        "model.layers.1.self_attn.q_proj",
    ),
    "eps": (_eps, "model.layers.1.post_attention_layernorm"),
    "rotary base": (_base, "model.layers.0.self_attn"),
    "scores": (lambda m: m.logits_processor.register_forward_hook(_scaled(_all)), "lm_head"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(asked: Path, tmp_path: Path, fault: str) -> None:
    plant, name = FAULTS[fault]
    found = whence.compare(asked, _run(tmp_path / "tgt", plant))
    assert (found.status, found.findings[0].name) == ("different", name)
