"""Files that hold logits and nothing else: told by their names and their one vocabulary, and judged
token by token, so that texts that part at a tie are no fault.
"""

import numpy as np
import pytest

import whence
from whence.writers.support import encodings

PROMPTS, TOKENS, WORDS = 2, 5, 90


def logits(seed, dtype=np.float32):
    drawn = np.random.default_rng(seed).standard_normal((PROMPTS, TOKENS, WORDS))
    return (4 * drawn).astype(dtype)


def rounded(array, seed=5):
    """The same with each logit moved by a few units of its rounding."""
    unit = 2.0**-10 if array.dtype == np.float16 else 2.0**-23
    moved = 1 + unit * np.random.default_rng(seed).standard_normal(array.shape)
    return (array.astype(np.float64) * moved).astype(array.dtype)


def parted(array, seed=6):
    """(reference, target) that choose otherwise at a tie of prompt 0, token 0, and go on with
    another text.
    """
    ours, theirs = array.copy(), rounded(array)
    best = ours[0, 0].argmax()
    second = (best + 7) % WORDS
    ours[0, 0, second] = np.nextafter(ours[0, 0, best], np.float16(-9).astype(array.dtype))
    theirs[0, 0] = ours[0, 0]
    theirs[0, 0, second] = np.nextafter(ours[0, 0, best], np.float16(99).astype(array.dtype))
    theirs[0, 1:] = logits(seed, array.dtype)[0, 1:]
    return ours, theirs


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        encodings.write_torch(path, array)


def one_file_a_token(folder, array):
    for token in range(TOKENS):
        save(folder / f"token_{token}.npy", array[0, token])


def one_folder_a_token(folder, array):
    for token in range(TOKENS):
        save(folder / str(token) / "logits.npy", array[0, token][None])


def files_of_torch(folder, array):
    for token in range(TOKENS):
        save(folder / f"logits_{token}.pth", array[0, token][None])


def archive(folder, array):
    folder.mkdir()
    np.savez(folder / "logits.npz", **{f"logits_{t}": array[0, t] for t in range(TOKENS)})


def one_file_a_prompt(folder, array):
    for prompt in range(PROMPTS):
        save(folder / f"prompt_{prompt}.npy", array[prompt])


def one_folder_a_prompt(folder, array):
    for prompt in range(PROMPTS):
        for token in range(TOKENS):
            save(folder / f"prompt_{prompt}" / f"token_{token}.npy", array[prompt, token])


def one_file(folder, array):
    save(folder / "logits.npy", array)


OF_ONE_PROMPT = (one_file_a_token, one_folder_a_token, files_of_torch, archive)
OF_ALL = (one_file_a_prompt, one_folder_a_prompt, one_file)


def compared(tmp_path, layout, reference, target, target_layout=None):
    layout(tmp_path / "a", reference)
    (target_layout or layout)(tmp_path / "b", target)
    return whence.compare(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layout", [*OF_ONE_PROMPT, *OF_ALL])
def test_texts_that_part_at_a_tie_are_no_fault(tmp_path, layout, dtype):
    result = compared(tmp_path, layout, *parted(logits(0, dtype)))
    prompts = PROMPTS if layout in OF_ALL else 1
    assert (result.status, result.findings) == ("undecided", ())
    assert "1 prompts diverge at a token that is not a fault" in result.headline
    assert [p.outcome for p in result.generation.prompts] == ["explained", "equal"][:prompts]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layout", OF_ALL)
def test_a_token_that_is_off_is_named_with_its_prompt(tmp_path, layout, dtype):
    reference = logits(1, dtype)
    target = rounded(reference)
    assert compared(tmp_path / "clean", layout, reference, target).status == "same"
    target[1, 3] = target[1, 3] * dtype(1.2)
    result = compared(tmp_path, layout, reference, target)
    (finding,) = result.findings
    assert (result.status, finding.step, finding.rank) == ("different", 3, 0)
    assert "prompt 2, token 3" in finding.sentence
    assert result.generation.compared == PROMPTS * TOKENS


def test_layouts_of_the_same_logits_agree(tmp_path):
    array = logits(2)
    result = compared(tmp_path, one_file, array, rounded(array), one_folder_a_prompt)
    assert (result.status, result.generation.compared) == ("same", PROMPTS * TOKENS)


def test_a_prompt_that_one_dump_lacks_is_no_pass(tmp_path):
    array = logits(3)
    one_file_a_prompt(tmp_path / "a", array)
    save(tmp_path / "b" / "prompt_1.npy", rounded(array)[1])
    result = whence.compare(tmp_path / "a", tmp_path / "b")
    assert (result.status, result.generation.alone_reference) == ("undecided", 1)
    assert result.generation.compared == TOKENS


def test_layers_and_inputs_are_no_logits(tmp_path):
    """Neither do unequal last axes make a vocabulary, nor do numbers of layers count tokens."""
    array = logits(4)
    for side, moved in (("a", array), ("b", rounded(array))):
        for layer in range(TOKENS):
            save(tmp_path / "layers" / side / f"layer_{layer}.npy", moved[0, layer])
            save(
                tmp_path / "widths" / side / f"token_{layer}.npy", moved[0, layer, : WORDS - layer]
            )
    for kind in ("layers", "widths"):
        result = whence.compare(tmp_path / kind / "a", tmp_path / kind / "b")
        assert result.generation is None
