"""Options: defaults keep everything, a misspelt one fails at once, JSON and back changes
nothing.
"""

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whence.errors import UsageError
from whence.instrument import arguments
from whence.instrument.option_values import parse_size
from whence.instrument.options import CaptureOptions, decode, make
from whence.instrument.step_choice.windows import StepRange

NUMBERS = st.from_regex(r"(0|[1-9][0-9]?(_[1-9][0-9]?){0,3})", fullmatch=True)
PATTERNS = st.text(st.characters(codec="utf-8"), min_size=1).filter(
    lambda p: not p.startswith("re:")
)


@given(
    st.builds(
        CaptureOptions,
        include=st.lists(PATTERNS).map(tuple),
        exclude=st.lists(PATTERNS).map(tuple),
        max_depth=st.none() | st.integers(0, 100),
        ids=st.lists(NUMBERS).map(tuple),
        slots=st.sampled_from(typing.get_args(arguments.Slots)),
        steps=st.lists(
            st.builds(
                StepRange, st.integers(0, 9), st.none() | st.integers(10, 99), st.integers(1, 9)
            )
        ).map(tuple),
        every=st.none() | st.integers(1, 9),
        when=st.lists(st.sampled_from(["nan", "loss > 1"])).map(tuple),
        ring=st.none() | st.integers(1, 9),
        ranks=st.none() | st.lists(st.integers(0, 8), min_size=1).map(tuple),
        keep=st.sampled_from(typing.get_args(arguments.Keep)),
        max_bytes=st.none() | st.integers(0, 2**60),
        seed=st.none() | st.integers(0, 2**32 - 1),
        deterministic=st.booleans(),
        programs=st.booleans(),
    )
)
def test_json_and_back(chosen):
    assert decode(chosen.encode()) == chosen
    assert make(**chosen.asdict()) == chosen


def test_defaults_travel_as_nothing():
    assert CaptureOptions().encode() == "{}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inclde": "x"}, "unknown capture option 'inclde' (did you mean include?)"),
        ({"slots": "inputs"}, "'inputs' is not one of both, input, output (did you mean input?)"),
        ({"keep": "all"}, "'all' is not one of full, stats, none"),
        ({"steps": "3:1"}, "holds no step"),
        ({"steps": "a:b"}, "is not understood"),
        ({"steps": (2, 2)}, "holds no step"),
        ({"steps": "0:9:0"}, "holds no step"),
        ({"steps": range(0, -9, -2)}, "holds no step"),
        ({"ids": "1_0"}, "'1_0' is not a tree number"),
        ({"ids": ["1.2"]}, "'1.2' is not a tree number"),
        ({"ids": ","}, "no tree number given"),
        ({"no_children": True}, "needs ids"),
        ({"include": ""}, "empty pattern"),
        ({"include": "re:("}, "not a regular expression"),
        ({"include": [3]}, "str"),
        ({"ranks": "a"}, "list of ranks"),
        ({"ranks": [-1]}, "negative"),
        ({"ranks": []}, "no rank"),
        ({"max_bytes": "20 potatoes"}, "number of bytes"),
        ({"max_bytes": -1}, "negative"),
        ({"max_depth": -1}, "negative"),
        ({"max_depth": "two"}, "max_depth"),
        ({"on_record": "module.function"}, "not module:function"),
        ({"seed": -1}, "outside"),
        ({"print_pattern": ""}, "empty pattern"),
        ({"level": "op", "inject": "scale@fc1"}, "patch and inject change what modules return"),
        (
            {"level": "op", "patch": ["fc1"], "patch_from": "run"},
            "patch and inject change what modules return",
        ),
        ({"level": "op", "samples": -1}, "-1 is negative"),
        ({"level": "op", "samples": 2, "keep": "stats"}, "leave one of them out"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, said):
    with pytest.raises(UsageError) as caught:
        make(**given)
    assert said in str(caught.value)


def test_a_string_where_a_tuple_belongs_is_not_split_into_letters():
    with pytest.raises(UsageError, match="tuple of strings"):
        CaptureOptions(include="layers")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "[]", '{"slots": 3}', '{"later": 1}', "not json"])
def test_what_is_no_options_is_refused(text):
    with pytest.raises(UsageError):
        decode(text)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("0:1000", [(0, 1000, 1)]),
        ("5:", [(5, None, 1)]),
        (":3", [(0, 3, 1)]),
        ("7", [(7, 8, 1)]),
        (":", [(0, None, 1)]),
        ("::100", [(0, None, 100)]),
        ("5:50:10", [(5, 50, 10)]),
        ("0-3, 1000-1003", [(0, 4, 1), (1000, 1004, 1)]),
    ],
)
def test_steps(text, steps):
    assert list(make(steps=text).steps) == steps
    assert list(make(steps=text.split(",")).steps) == steps


def test_other_words():
    assert make(ids="3, 7_1").ids == ("3", "7_1")
    assert make(ranks="0,3").ranks == (0, 3)
    assert make(ranks="0-2,2").ranks == (0, 1, 2)
    assert make(steps=range(2, 9, 3)).steps == ((2, 9, 3),)
    assert make(steps=(2, 5)).steps == make(steps="2:5").steps
    assert make(include="a.*", exclude=["b", "c"]) == CaptureOptions(
        include=("a.*",), exclude=("b", "c")
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("20GB", 20 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 k", 1500),
        ("0", 0),
        ("2tb", 2 * 10**12),
        ("1KiB", 1024),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_a_call_is_recomputed_in_torch_and_onnx_runtime_alone(tmp_path):
    from whence.instrument import onnxruntime, openvino, paddle

    options = make(patch="layers.0", patch_from=tmp_path, recompute=True)
    onnxruntime.check(options)
    for framework in (openvino, paddle):
        with pytest.raises(UsageError, match=r"recompute|patch"):
            framework.check(options)
    with pytest.raises(UsageError, match="it needs patch, which names them"):
        make(recompute=True)
