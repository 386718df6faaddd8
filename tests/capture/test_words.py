import pytest

from whence.capture import words


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (412_300_000, "412 MB"), (312_000_000, "312 MB"), (1.44e9, "1.44 GB"), (3e15, "3000 TB")],
)
def test_sizes(nbytes, text):
    assert words.size(nbytes) == text


def test_counts():
    assert words.counted(1, "step") == "1 step"
    assert words.counted(1204, "call") == "1 204 calls"
    assert words.counted(2, "process", "processes") == "2 processes"
