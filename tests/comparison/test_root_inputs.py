"""Were both runs asked the same? Tokens that part by a near tie are inherited; others are the
headline.
"""

import numpy as np
import pytest

from handmade import record
from whence import api
from whence.records import Call, MemoryRun, Note, Ref, Step

VOCABULARY = 12


def generation(steps, *, noise=0.0, seed=0, logits=None, first=3, settings=None):
    """A run that turns ids into logits once per step; the next id is the argmax. logits: step ->
    array to put in place.
    """
    rng = np.random.default_rng(seed)
    calls, records, arrays = [], [], {}
    ids = np.array([[first]])
    for step in range(steps):
        scores = (
            np.random.default_rng(100 + step).standard_normal((1, 1, VOCABULARY)).astype(np.float32)
        )
        if logits and step in logits:
            scores = logits[step].astype(np.float32).reshape(1, 1, -1)
        scores = scores + np.float32(noise) * rng.standard_normal(scores.shape).astype(np.float32)
        for array in (ids, scores):
            arrays[len(records)] = array
            records.append(record(len(records), array))
        calls.append(
            Call(
                len(calls),
                "",
                "Lm",
                step,
                len(calls),
                op_type="Lm",
                leaf=True,
                refs=(
                    Ref("input.input_ids", len(records) - 2),
                    Ref("output.logits", len(records) - 1),
                ),
            )
        )
        ids = scores.argmax(-1)
    notes = [Note("settings", settings, "Lm")] if settings else []
    return MemoryRun(
        calls, records, arrays, steps=[Step("Lm", s, 0, True) for s in range(steps)], notes=notes
    )


def near_tie(gap):
    scores = np.zeros(VOCABULARY)
    scores[4], scores[7] = 1.0, 1.0 - gap
    return scores


def test_a_token_that_parts_by_a_near_tie_is_inherited():
    reference = generation(3, logits={0: near_tie(2e-7)})
    other = near_tie(2e-7)
    other[7] += 5e-7
    target = generation(3, logits={0: other})
    result = api.compare(reference, target)
    assert result.inputs_differ == ()
    assert result.status == "same"
    assert any("token 4 against 7" in note for note in result.notes)


def test_a_token_that_the_scores_do_not_explain_is_the_headline():
    # Both sides scored the same, but another token was fed.
    target = generation(2)
    arrays = dict(target._arrays)
    arrays[2] = (arrays[2] + 1) % VOCABULARY
    records = [record(i, arrays[i]) for i in range(len(arrays))]
    result = api.compare(generation(2), MemoryRun(target.calls, records, arrays))
    assert result.status == "undecided"
    assert result.inputs_differ[0].startswith("Lm step 1: input_ids at [0, 0]: ")


def test_a_different_prompt_is_the_headline():
    result = api.compare(generation(2), generation(2, first=5))
    assert result.inputs_differ[0] == "Lm step 0: input_ids at [0, 0]: 3 against 5 (1 of 1 differ)"


def test_conditions_that_differ_are_told():
    a = '{"attention": "sdpa", "threads": 2, "parameter_dtypes": {"float32": 3}}'
    b = '{"attention": "eager", "threads": 2, "parameter_dtypes": {"bfloat16": 3}}'
    result = api.compare(generation(1, settings=a), generation(1, settings=b))
    assert "Lm: attention sdpa against eager" in result.environment
    assert "Lm: parameter_dtypes float32 against bfloat16" in result.environment
    assert not any("threads" in line for line in result.environment)


def test_what_only_one_kind_of_model_states_is_no_difference():
    """A session of an engine has no mode of training; a module that states none is another one."""
    module = '{"training":false,"threads":2,"attention":"sdpa"}'
    session = '{"threads":4,"providers":["CPUExecutionProvider"]}'
    result = api.compare(generation(1, settings=module), generation(1, settings=session))
    assert result.environment == ("Lm: threads 2 against 4",)
    plain = '{"training":false,"threads":2}'
    result = api.compare(generation(1, settings=module), generation(1, settings=plain))
    assert result.environment == ("Lm: attention sdpa against None",)


def test_settings_that_are_not_json_are_passed_over():
    assert (
        api.compare(generation(1, settings="{nonsense"), generation(1, settings="[1]")).status
        == "same"
    )


def layered(ids, factor=1.0):
    """Scores of a table and what a product makes of them, two calls of a root that was given ids;
    as float32, without programs.
    """
    draw = np.random.default_rng(7)
    table, weight = (
        draw.standard_normal((VOCABULARY, 8)).astype(np.float32),
        np.diag(np.float32([4, 1, 1, 1, 1, 1, 1, 1])),
    )
    table[9], table[:, 0] = table[3], 0.1
    table[9, 0] = 0.6  # what the product makes largest
    ids = np.array([ids])
    x = table[ids]
    arrays = dict(enumerate((ids, x, x @ weight * np.float32(factor))))
    calls = [
        Call(
            0,
            "embed",
            "Lm",
            0,
            1,
            parent=2,
            refs=(Ref("input.0", 0), Ref("output.0", 1)),
            leaf=True,
        ),
        Call(
            1, "head", "Lm", 0, 2, parent=2, refs=(Ref("input.0", 1), Ref("output.0", 2)), leaf=True
        ),
        Call(2, "", "Lm", 0, 0, refs=(Ref("input.ids", 0), Ref("output.0", 2))),
    ]
    return MemoryRun(
        calls, [record(i, a) for i, a in arrays.items()], arrays, steps=[Step("Lm", 0, 0, True)]
    )


def test_what_figures_say_is_suspected_only_where_the_root_was_given_something_else():
    other = api.compare(layered([1, 2, 3, 4, 5]), layered([1, 2, 9, 4, 5]))
    assert other.inputs_differ
    assert other.status == "undecided"
    assert all(
        f.confidence == "suspect" and f.sentence.endswith("; the root inputs differ")
        for f in other.findings
    )
    assert any(v.confidence == "suspect" for v in other.verdicts)
    wrong = api.compare(layered([1, 2, 3, 4, 5]), layered([1, 2, 3, 4, 5], factor=1.5))
    assert (wrong.status, [f.name for f in wrong.findings]) == ("different", ["head"])


def padded_rows(change=0.0, *, returns_tokens=False):
    """A predictor that is given (2, 6) padded ids at every step and returns scores of every place,
    or the tokens that it chose. change: of the scores of row 1 at step 0.
    """
    calls, records, arrays = [], [], {}
    ids, lengths = np.array([[3, 5, 0, 0, 0, 0], [2, 4, 6, 0, 0, 0]]), [2, 3]
    for step in range(3):
        scores = np.random.default_rng(step).standard_normal((2, 6, VOCABULARY)).astype(np.float32)
        if step == 0:
            scores[1, 2, 9] += np.float32(change)
        chosen = np.array([scores[row, lengths[row] - 1].argmax() for row in range(2)])
        for array in (ids.copy(), chosen[:, None] if returns_tokens else scores):
            arrays[len(records)] = array
            records.append(record(len(records), array))
        refs = Ref("input.input_ids", len(records) - 2), Ref("output.0", len(records) - 1)
        calls.append(
            Call(len(calls), "", "Lm", step, len(calls), op_type="Lm", leaf=True, refs=refs)
        )
        for row in range(2):
            ids[row, lengths[row]] = chosen[row]
            lengths[row] += 1
    return MemoryRun(calls, records, arrays, steps=[Step("Lm", s, 0, True) for s in range(3)])


@pytest.mark.parametrize("returns_tokens", [False, True])
def test_tokens_that_a_run_chose_itself_are_no_different_inputs(returns_tokens):
    """A fault chose them: it is the answer, and what follows from it is none of the user's."""
    reference = padded_rows(returns_tokens=returns_tokens)
    result = api.compare(reference, padded_rows(20.0, returns_tokens=returns_tokens))
    assert result.inputs_differ == ()
    assert result.status != "same"
    assert any("step 0" in note and "inherited" in note for note in result.notes)


def test_tokens_that_no_run_chose_are_different_inputs():
    other = padded_rows()
    given = other.calls[1].refs[0].record
    other._arrays[given] = other.array(given).copy()
    other._arrays[given][1, 1] += 1
    other.records = [
        record(n, other.array(n)) if n == given else each for n, each in enumerate(other.records)
    ]
    assert "step 1: input_ids at [1, 1]" in api.compare(padded_rows(), other).inputs_differ[0]
