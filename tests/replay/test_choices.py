"""Operators that choose: what they saw as rows, and what they return when told to choose others."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from whence.replay.choices import Choices

pytestmark = pytest.mark.torch
NOTHING = SimpleNamespace(args=())


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


X = draw(3, 4, 5)
CASES = {
    "argmax of all elements": ("argmax", {"self": X, "dim": None}, torch.argmax(X)),
    "argmin of all elements": ("argmin", {"self": X}, torch.argmin(X)),
    "argmax along an axis": ("argmax", {"self": X, "dim": 1}, torch.argmax(X, 1)),
    "argmax that keeps its axis": ("argmax", {"self": X, "dim": 1}, torch.argmax(X, 1, True)),
    "argmax of a single value": ("argmax", {"self": draw(), "dim": 0}, torch.argmax(draw(), 0)),
    "top of a single value": ("topk", {"self": draw(), "dim": 0}, torch.topk(draw(), 1)),
    "top of the last axis": ("topk", {"self": X}, torch.topk(X, 2)),
    "top of the first axis": ("topk", {"self": X, "dim": 0}, torch.topk(X, 2, 0)),
    "sort": ("sort", {"self": X, "dim": 1}, torch.sort(X, 1)),
    "maximum": ("max", {"self": X, "dim": 2}, torch.max(X, 2)),
    "running maximum": ("cummax", {"self": X, "dim": 0}, torch.cummax(X, 0)),
    "pooling": (
        "max_pool2d_with_indices",
        {"self": X},
        torch.nn.functional.max_pool2d(X, 2, return_indices=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_at_the_chosen_places_are_the_values_chosen(case):
    base, named, out = CASES[case]
    choices = Choices()
    returned = choices.made(0, base, NOTHING, named, out, 7)
    seen = choices.seen[0]
    results = list(returned) if isinstance(returned, tuple) else [returned]
    given = list(out) if isinstance(out, tuple) else [out]
    assert all(torch.equal(r, g) for r, g in zip(results, given, strict=True))
    assert np.array_equal(seen.own, seen.used)
    assert seen.own.shape[0] == seen.scores.shape[0] == max(int(np.prod(seen.shape)), 1)
    chosen = np.take_along_axis(seen.scores, seen.own, 1)
    values = given[0].double().numpy() if len(given) > 1 else None
    if values is None:
        wanted = seen.scores.min(1) if "argmin" in base else seen.scores.max(1)
        assert np.array_equal(chosen[:, 0], wanted)
    else:
        assert np.array_equal(np.sort(chosen.ravel()), np.sort(values.ravel()))
    assert (seen.length, seen.dtype) == (7, "float32")


@pytest.mark.parametrize("case", CASES)
def test_an_operator_that_is_told_its_choice_returns_it_and_the_values_there(case):
    base, named, out = CASES[case]
    free = Choices()
    free.made(0, base, NOTHING, named, out, 1)
    told = np.zeros_like(free.seen[0].own)  # the first of each row
    choices = Choices(told={0: told})
    returned = choices.made(0, base, NOTHING, named, out, 1)
    assert np.array_equal(choices.seen[0].used, told)
    assert np.array_equal(choices.seen[0].own, free.seen[0].own)
    results = list(returned) if isinstance(returned, tuple) else [returned]
    given = list(out) if isinstance(out, tuple) else [out]
    assert [(r.shape, r.dtype) for r in results] == [(g.shape, g.dtype) for g in given]
    assert not results[-1].any()
    if len(results) > 1:
        first = choices.seen[0].scores[:, 0]
        assert set(results[0].double().ravel().tolist()) == set(first.tolist())


def test_a_row_that_is_told_nothing_chooses_by_itself():
    out = torch.topk(X, 2)
    told = np.where(np.arange(12)[:, None] == 5, np.array([[4, 3]]), -1)
    choices = Choices(told={0: told})
    values, indices = choices.made(0, "topk", NOTHING, {"self": X}, out, 1)
    expected = out.indices.reshape(12, 2).clone()
    expected[5] = torch.tensor([4, 3])
    assert torch.equal(indices.reshape(12, 2), expected)
    assert torch.equal(values, torch.gather(X, 2, indices))


def test_what_is_told_of_another_number_of_choices_is_not_followed():
    out = torch.topk(X, 2)
    choices = Choices(told={0: np.zeros((12, 3), np.int64)})
    _, indices = choices.made(0, "topk", NOTHING, {"self": X}, out, 1)
    assert torch.equal(indices, out.indices)


def test_nothing_is_seen_where_there_is_nothing_to_choose_from():
    empty = torch.empty(0, 4)
    choices = Choices()
    choices.made(0, "topk", NOTHING, {"self": empty}, torch.topk(empty, 2), 1)
    assert choices.seen == {}
