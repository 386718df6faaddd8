"""Checkpoints of codes packed into words of 32 bits against their float source, without a run: GPTQ,
AWQ and compressed-tensors.
"""

import numpy as np
import pytest
from safetensors.numpy import save_file

import whence
from whence.cli import execute

ROWS, COLUMNS, GROUP = 48, 64, 16
GROUPS = COLUMNS // GROUP
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(numbers, axis, order=range(8)):
    """Eight numbers of 4 bits in a word, along an axis."""
    parts = np.moveaxis(numbers.astype(np.uint32), axis, -1)
    parts = parts.reshape(*parts.shape[:-1], -1, 8)
    words = sum(parts[..., k] << np.uint32(4 * place) for place, k in enumerate(order))
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def affine(weight, group_of):
    """(codes, scales, zero points), both of groups, (rows, groups)."""
    scales, zeros = np.zeros((2, ROWS, GROUPS))
    for group in range(GROUPS):
        part = weight[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[:, group] = np.float16((high - low) / 15)
        zeros[:, group] = np.rint(-low / scales[:, group])
    return scales, zeros


def rounded(weight, scales, zeros, group_of):
    return np.clip(np.rint(weight / scales[:, group_of] + zeros[:, group_of]), 0, 15)


def compensated(weight, scales, zeros, group_of):
    """Codes as GPTQ makes them: what a column loses is taken over by those behind it, as far as
    the inputs are correlated.
    """
    inputs = np.random.default_rng(1).standard_normal((256, COLUMNS)) @ (
        np.eye(COLUMNS) + 0.1 * np.random.default_rng(2).standard_normal((COLUMNS, COLUMNS))
    )
    hessian = inputs.T @ inputs
    upper = np.linalg.cholesky(
        np.linalg.inv(hessian + 0.01 * np.mean(np.diag(hessian)) * np.eye(COLUMNS))
    )
    upper = upper.T
    left, codes = weight.copy(), np.zeros_like(weight)
    for k in range(COLUMNS):
        s, z = scales[:, group_of[k]], zeros[:, group_of[k]]
        codes[:, k] = np.clip(np.rint(left[:, k] / s + z), 0, 15)
        lost = (left[:, k] - (codes[:, k] - z) * s) / upper[k, k]
        left[:, k + 1 :] -= lost[:, None] * upper[k, k + 1 :]
    return codes


def gptq(weight, *, order=None, codes_of=rounded, scale=1.0, zero=0.0, stated=None):
    group_of = np.arange(COLUMNS) // GROUP if order is None else order
    scales, zeros = affine(weight, group_of)
    codes = codes_of(weight, scales, zeros, group_of)
    return {
        "qweight": packed(codes.T, 0),
        "qzeros": packed((zeros.T - 1 + zero) % 16, 1),
        "scales": (scales.T * scale).astype(np.float16),
        "g_idx": (group_of if stated is None else stated).astype(np.int32),
    }


def awq(weight, order=INTERLEAVED):
    group_of = np.arange(COLUMNS) // GROUP
    scales, zeros = affine(weight, group_of)
    codes = rounded(weight, scales, zeros, group_of)
    return {
        "qweight": packed(codes.T, 1, order),
        "qzeros": packed(zeros.T, 1, order),
        "scales": scales.T.astype(np.float16),
    }


def compressed(weight):
    parts = weight.reshape(ROWS, GROUPS, GROUP)
    scales = (np.abs(parts).max(-1) / 7.5).astype(np.float16)
    codes = np.clip(np.rint(parts / scales[..., None]), -8, 7).reshape(ROWS, COLUMNS)
    return {
        "weight_packed": packed(codes + 8, 1),
        "weight_scale": scales,
        "weight_shape": np.array([ROWS, COLUMNS], np.int64),
    }


def weights(folder, *layers):
    """The answer on a float file and one of these layers. layers: functions of the weight."""
    source, target = {}, {}
    for number, layer in enumerate(layers):
        weight = np.random.default_rng(number).standard_normal((ROWS, COLUMNS)) * 0.05
        source[f"layers.{number}.fc.weight"] = weight.astype(np.float32)
        stored = {key: np.ascontiguousarray(v) for key, v in layer(weight).items()}
        target.update({f"layers.{number}.fc.{key}": value for key, value in stored.items()})
    save_file(source, folder / "float.safetensors")
    save_file(target, folder / "codes.safetensors")
    return whence.map_weights(folder / "float.safetensors", folder / "codes.safetensors")


SHUFFLED = np.random.default_rng(5).permutation(COLUMNS) // GROUP
SOUND = {
    "gptq": gptq,
    "gptq, compensated": lambda w: gptq(w, codes_of=compensated),
    "gptq, columns by activation": lambda w: gptq(w, order=SHUFFLED),
    "awq": awq,
    "compressed-tensors": compressed,
}


@pytest.mark.parametrize("layer", SOUND.values(), ids=SOUND)
def test_packed_codes_are_the_float_weights(tmp_path, layer):
    result = weights(tmp_path, layer, layer)
    assert [w.state for w in result.pairs] == ["codes", "codes"]
    assert all("int4 per group of 16" in w.why and 0 < w.rel_l2 < 0.2 for w in result.pairs)
    assert (result.only_reference, result.only_target) == ((), ())


FAULTS = {
    "a scale twice": (lambda w: gptq(w, scale=2.0), "in the whole tensor"),
    "zero points off by one": (lambda w: gptq(w, zero=1.0), "off by one from what those of 2"),
    "zero points off by two": (lambda w: gptq(w, zero=-2.0), "zero point off"),
    "columns in another order than stated": (
        lambda w: gptq(w, order=SHUFFLED, stated=np.arange(COLUMNS) // GROUP),
        "",
    ),
}


@pytest.mark.parametrize(("layer", "words"), FAULTS.values(), ids=FAULTS)
def test_a_layer_that_is_packed_wrongly_is_named(tmp_path, layer, words):
    result = weights(tmp_path, gptq, layer, gptq)
    states = {w.reference: w for w in result.pairs}
    assert states["layers.0.fc"].state == "codes"
    wrong = states["layers.1.fc"]
    assert wrong.state == "differs" and words in wrong.why
    files = [str(tmp_path / f"{name}.safetensors") for name in ("float", "codes")]
    assert execute(["map-weights", *files]) == 1


def test_words_in_another_order_are_no_weights(tmp_path):
    """Nothing is said of what no layout explains: the parameters have no partner."""
    result = weights(tmp_path, awq, lambda w: awq(w, INTERLEAVED[::-1]))
    assert [w.reference for w in result.pairs] == ["layers.0.fc"]
    assert result.only_reference == ("layers.1.fc.weight",)


def test_the_packing_is_that_of_compressed_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    pack = pytest.importorskip("compressed_tensors.compressors").pack_to_int32
    codes = np.random.default_rng(0).integers(-8, 8, (ROWS, COLUMNS)).astype(np.int8)
    theirs = pack(torch.from_numpy(codes), 4)
    np.testing.assert_array_equal(theirs.numpy(), packed(codes + 8, 1))
