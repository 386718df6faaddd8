"""Which label the tensors in a library's files belong to: by number, by time, by shape."""

import os
import subprocess
import sys

import numpy as np
import pytest

from whence.instrument.labels.labels import Waiting
from whence.instrument.labels.library import Library, Profile, encoded
from whence.workflows.capture.collect_labels import resolved

STEP_NS = 50_000_000  # between two tokens
LIMIT = "LIBRARY_MAX"


def labels_of(folder, files, start=10**18):
    """A label for each file, STEP_NS apart."""
    return [
        Waiting(
            "acl", "target", f"id{n}", "", 0, file, start + n * STEP_NS, 1, 1, 0, str(folder), "a:1"
        )
        for n, file in enumerate(files)
    ]


def save(path, array, at):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)
    os.utime(path, ns=(at, at))


def found(folder, labels, shapes=(), most=None):
    """The first number in each label's tensor, None without one; the reasons."""
    profile = Profile(variables={} if most is None else {LIMIT: "{max}"}, places=("{file}",))
    library = Library("lib", profile, str(folder), {} if most is None else {LIMIT: str(most)})
    got = resolved(labels, encoded(library), 0.0, 0.0, lambda: dict(shapes))
    first = [
        int(label.source.load().flat[0]) if label.source is not None and not label.why else None
        for label in got
    ]
    return first, [label.why for label in got]


def test_the_number_in_front_of_the_path_counts_the_tokens(tmp_path):
    labels = labels_of(tmp_path, ["0_Encoder/3_Attention/out.npy"] * 3)
    for token, label in enumerate(labels):
        save(tmp_path / f"{token}_Encoder/3_Attention/out.npy", np.full(4, token), label.at - 10**6)
    assert found(tmp_path, labels)[0] == [0, 1, 2]


def test_numbers_that_count_operations_are_not_tokens(tmp_path):
    """All of them are written again for every token: the last one's are there."""
    labels = labels_of(tmp_path, ["0_Linear/out.npy"] * 3)
    for operation in range(3):
        save(tmp_path / f"{operation}_Linear/out.npy", np.full(4, operation), labels[2].at - 10**6)
    first, whys = found(tmp_path, labels)
    assert first == [None, None, 0]
    assert "written over" in whys[0]


def test_a_file_that_is_written_once_belongs_to_the_label_behind_it(tmp_path):
    labels = labels_of(tmp_path, ["0_Encoder/out.npy"] * 3)
    save(tmp_path / "0_Encoder/out.npy", np.full(4, 7), labels[0].at - 10**6)
    first, whys = found(tmp_path, labels)
    assert first == [7, None, None]
    assert all("earlier token" in why for why in whys[1:])


def test_a_shape_says_whose_a_file_is(tmp_path):
    """Labels are set before the library writes here, and only the prompt has several rows."""
    labels = labels_of(tmp_path, ["out.npy"] * 3)
    save(tmp_path / "out.npy", np.full((4, 2), 7), labels[0].at + 10**7)
    shapes = {("", f"id{n}"): (4 if n == 0 else 1, 2) for n in range(3)}
    assert found(tmp_path, labels, shapes)[0] == [7, None, None]


@pytest.mark.parametrize("literal", [False, True])
def test_a_limit_that_hides_files_is_named(tmp_path, literal):
    files = [f"{0 if literal else n}_Encoder/out.npy" for n in range(3)]
    labels = labels_of(tmp_path, files)
    for token in range(2):
        save(tmp_path / f"{token}_Encoder/out.npy", np.full(4, token), labels[token].at - 10**6)
    first, whys = found(tmp_path, labels, most=2)
    assert first == [0, 1, None]
    assert f"{LIMIT}=2 hides it" in whys[2]
    assert f"set {LIMIT}=3" in whys[2]


def test_a_layer_beside_it_is_no_later_token_of_a_limited_library(tmp_path):
    """The library writes the first token only; its layers follow each other as tokens would."""
    files = ["0_Model/0_Layer/out.npy", "0_Model/1_Layer/out.npy"]
    labels = labels_of(tmp_path, files * 2)
    for layer, file in enumerate(files):
        save(tmp_path / file, np.full(4, layer), labels[layer].at - 10**6)
    first, whys = found(tmp_path, labels, most=1)
    assert first == [0, 1, None, None]
    assert all(
        why.startswith(f"{LIMIT}=1 hides it: this line was reached 2 times") for why in whys[2:]
    )


def test_a_white_list_that_hides_a_file_is_named(tmp_path):
    profile = Profile(variables={"LIBRARY_ONLY": "{runner}"}, places=("{file}",))
    library = Library("lib", profile, str(tmp_path), {"LIBRARY_ONLY": "NormRunner, 线性Runner"})
    files = ["0_M/1_SoftmaxRunner/out.npy", "0_M/2_线性Runner/out.npy"]
    hidden, missing = (
        label.why for label in resolved(labels_of(tmp_path, files), encoded(library), 0.0, 0.0)
    )
    assert hidden.startswith("LIBRARY_ONLY=NormRunner, 线性Runner hides it")
    assert missing.startswith("0_M/2_线性Runner/out.npy never appeared")


def test_operations_of_a_library_are_shown_as_a_tree(tmp_path):
    rng = np.random.default_rng(0)
    program = tmp_path / "program.py"
    for layer in (0, 1):
        folder = tmp_path / f"0_Model/{layer}_Layer/3_Attention/after"
        folder.mkdir(parents=True)
        np.save(folder / "out.npy", rng.standard_normal((4, 8)).astype(np.float32))
    program.write_text(
        "import numpy as np\nimport whence\n"
        "for layer in (0, 1):\n"
        "    file = f'0_Model/{layer}_Layer/3_Attention/after/out.npy'\n"
        "    held = np.load(file)\n"
        "    np.save(file, held * np.float32(1 + 0.05 * layer))\n"
        "    whence.label(f'attention {layer}', held, side='reference')\n"
        "    whence.label(f'attention {layer}', file=file, side='target')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "whence", "run", "--compare", "-o", "cmp", "--", sys.executable, program],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    levels = done.stdout.partition("  levels")[2].splitlines()[:5]
    assert [line.split() for line in levels] == [
        ["0_Model"],
        ["0_Layer"],
        ["3_Attention", "identical", "rel_l2", "0"],
        ["1_Layer"],
        ["3_Attention", "introduced", "rel_l2", "0.05"],
    ]
