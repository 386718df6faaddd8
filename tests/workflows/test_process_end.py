"""A process that ends by `os._exit` at rest is finished first; one that leaves in the middle of a
call, or from a watchdog, is not.
"""

import os
import threading

import pytest
import torch
from torch import nn

import whence
from whence.workflows.capture import process_end

pytestmark = pytest.mark.torch


@pytest.fixture
def ends(monkeypatch):
    """What happens at the end, in order."""
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    process_end.before_leaving_at_once(lambda: ends.append("finished"))
    return ends


def test_it_is_finished_at_rest(ends):
    os._exit(3)
    os._exit(status=4)
    assert ends == ["finished", 3, "finished", 4]


def test_two_that_listen_are_both_finished(ends):
    process_end.before_leaving_at_once(lambda: ends.append("second"))
    os._exit(0)
    assert ends == ["second", "finished", 0]


def test_a_failure_keeps_nobody_from_ending(ends):
    def fails():
        raise KeyboardInterrupt

    process_end.before_leaving_at_once(fails)
    os._exit(0)
    assert ends == ["finished", 0]


def test_not_in_a_watchdog(ends):
    watchdog = threading.Thread(target=os._exit, args=(1,))
    watchdog.start()
    watchdog.join()
    assert ends == [1]


def test_not_in_the_middle_of_a_call(ends, tmp_path):
    class Ends(nn.Module):
        def forward(self, x):
            os._exit(9)
            return x

    model = nn.Sequential(nn.Linear(2, 2), Ends())
    with whence.capture(model, tmp_path / "run"):
        model(torch.ones(2))
    assert ends == [9]


def test_what_is_no_status_is_the_programs_own_error(ends):
    os._exit("words")
    assert ends == ["words"]
