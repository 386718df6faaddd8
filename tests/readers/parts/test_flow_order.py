"""Operators in the order of their data flow."""

from whence.readers.assembly.call_order import ordered


def test_producers_come_before_readers_and_equals_as_given():
    reads = {"a": ["y"], "b": ["x"], "c": ["x"]}
    assert ordered(["a", "b", "c", "d"], reads, {"b": ["y"], "d": ["x"]}) == ["d", "b", "a", "c"]


def test_what_only_hands_on_comes_behind_who_made_it_and_before_who_reads_it():
    # A sum with a number that rounding swallows (`mean + 1e-6` in bfloat16): "add" makes what
    # "mean" made.
    reads = {"add": ["m"], "mean": ["p"], "pow": ["x"], "rsqrt": ["m"], "aaa": ["m"]}
    makes = {"add": ["m"], "mean": ["m"], "pow": ["p"], "rsqrt": ["r"], "aaa": ["n"]}
    assert ordered(["aaa", "add", "mean", "pow", "rsqrt"], reads, makes) == [
        "pow",
        "mean",
        "add",
        "aaa",
        "rsqrt",
    ]


def test_a_branch_that_adds_nothing_runs_before_the_sum():
    reads = {"add": ["x", "zero"], "branch": ["x"], "next": ["x"]}
    makes = {"add": ["x"], "branch": ["zero"], "top": ["x"], "next": ["y"]}
    assert ordered(["add", "branch", "next", "top"], reads, makes) == [
        "top",
        "branch",
        "add",
        "next",
    ]


def test_a_circle_is_cut_where_the_order_given_says():
    assert ordered(["a", "b"], {"a": ["y"], "b": ["x"]}, {"a": ["x"], "b": ["y"]}) == ["a", "b"]
