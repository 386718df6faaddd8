"""msquickcmp: labels in a chat loop, at high level (tensors) and low level (files of the
library).
"""

import csv

import pytest
from scripts import HEAD, python, whence

import warm
from whence import load_comparison

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CHAT_LOOP = """
import numpy as np
from whence.compat.msquickcmp.pta_acl_cmp.compare import gen_id, set_label, set_task_id

weight = torch.randn(8, 8, dtype=torch.bfloat16)
for turn in range(2):
    set_task_id()
    for token in range(2):
        x = torch.randn(4, 8).bfloat16()
        data_id = gen_id()
        set_label(data_src="pta", data_id=data_id, data_val=x @ weight)
        set_label(data_src="acl", data_id=data_id, data_val=torch.einsum("ij,jk->ik", x, weight) * (2 if BUG and turn else 1))
    data_id = gen_id()
    path = f"0_LinearOperation_{turn}.npy"
    set_label("acl", data_id, tensor_path=path)
    set_label("pta", data_id, x.float())
    np.save(path, x.float().numpy())
print(torch.randn(1).item())
"""


@pytest.mark.parametrize("bug", ["", " bug"])
def test_labels_at_high_and_low_level_in_a_chat_loop(tmp_path, bug):
    (tmp_path / "chat.py").write_text(HEAD + CHAT_LOOP)
    words = [
        "ait",
        "debug",
        "compare",
        "aclcmp",
        "--exec",
        f"{warm.TORCH} chat.py{bug}",
        "-o",
        "cmp",
    ]
    said = whence(tmp_path, *words, code=1 if bug else 0)
    assert (
        said.stderr.count("set_label is  whence.label(")
        == said.stderr.count("set_task_id is  whence.task()")
        == 1
    )
    assert (
        "ait debug compare aclcmp is  whence run --compare -o cmp --library acltransformer"
        in said.stderr
    )
    rows = list(csv.DictReader((tmp_path / "cmp" / "cmp_report.csv").read_text().splitlines()))
    assert len(rows) == 6
    assert len({row["data_id"] for row in rows}) == 6
    assert sum(row["acl_data_path"].endswith(".npy") for row in rows) == 2
    bad = [
        row["data_id"]
        for row in rows
        if float(row["cosine_similarity"]) < 0.999 or float(row["max_relative_error"]) > 0.5
    ]
    found = load_comparison(tmp_path / "cmp")
    if not bug:
        assert (found.status, bad) == ("same", [])
    else:
        assert len(bad) == 2
        assert all(name.startswith("task1/chat.py") for name in bad)
        assert found.findings[0].step == 1


def test_what_was_exported_is_kept_and_the_table_lies_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ACLTRANSFORMER_SAVE_TENSOR_MAX", "2")
    monkeypatch.setenv("ACLTRANSFORMER_SAVE_TENSOR_RUNNER", "SelfAttentionOpsChatglm6bRunner")
    shown = (
        "import os; print([os.environ['ACLTRANSFORMER_SAVE_TENSOR_' + n] for n in ('MAX', "
        "'RUNNER')])\n"
    )
    (tmp_path / "chat.py").write_text(HEAD + CHAT_LOOP + shown)
    (tmp_path / "run_performance.sh").write_text(f"{warm.TORCH} $1\n")
    for table in ("cmp_report.csv", "cmp_report-2.csv"):
        said = whence(
            tmp_path,
            "ait",
            "debug",
            "compare",
            "aclcmp",
            "--exec",
            "bash run_performance.sh chat.py",
        )
        assert "['2', 'SelfAttentionOpsChatglm6bRunner']" in said.stdout
        assert said.stdout.endswith(f"written to {table}\n")
        assert len(list(csv.DictReader((tmp_path / table).read_text().splitlines()))) == 6


def test_without_a_run_nothing_happens(tmp_path):
    with_labels = python(tmp_path, CHAT_LOOP)
    assert with_labels.stderr == ""
    plain = "".join(
        f"{line}\n"
        for line in CHAT_LOOP.splitlines()
        if "set_" not in line and "data_id" not in line
    )
    assert python(tmp_path, plain).stdout == with_labels.stdout


def test_another_side_is_an_error():
    from whence.compat.msquickcmp.pta_acl_cmp.compare import set_label
    from whence.errors import UsageError

    with pytest.raises(UsageError, match="pta"):
        set_label("gpu", "x", torch.ones(1))
