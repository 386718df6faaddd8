"""The hook of docs/howto/by-hand.md, as a user pastes it."""

import re
from pathlib import Path

import pytest

import whence

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "by-hand.md"


def test_the_hook_names_a_fault(tmp_path):
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    names = {}
    exec(code, names)  # noqa: S102 - the page is ours
    for side in ("reference", "target", "again"):
        torch.manual_seed(0)
        parts = [
            torch.nn.Linear(8, 8),
            torch.nn.Tanh(),
            torch.nn.Linear(8, 8),
            torch.nn.Linear(8, 4),
        ]
        model = torch.nn.Sequential(*parts)
        if side == "target":
            model[2].register_forward_hook(lambda _module, _given, made: -made)
        names["tap"](model, tmp_path / side)
        with torch.no_grad():
            for _ in range(2):
                model(torch.randn(3, 8))
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert (result.status, result.findings[0].name) == ("different", "2")
    assert {row.step for row in result.rows} == {0, 1}
    assert whence.compare(tmp_path / "reference", tmp_path / "again").status == "same"
