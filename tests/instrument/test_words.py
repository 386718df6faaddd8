import pytest

from whence.instrument import wording


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (412_300_000, "412 MB"),
        (312_000_000, "312 MB"),
        (1.44e9, "1.44 GB"),
        (3e15, "3000 TB"),
    ],
)
def test_sizes(nbytes, text):
    assert wording.size(nbytes) == text


def test_counts():
    assert wording.counted(1, "step") == "1 step"
    assert wording.counted(1204, "call") == "1 204 calls"
    assert wording.counted(2, "process", "processes") == "2 processes"
