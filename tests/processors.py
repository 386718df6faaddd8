"""What the processor that runs the tests can do."""

import functools

import pytest


@functools.cache
def _runs_an_lstm_in_bfloat16():
    import torch

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        try:
            torch.nn.LSTM(4, 4)(torch.zeros(1, 1, 4))
        except RuntimeError:
            return False
    return True


def skip_without_bfloat16_lstm():
    """Skip a test of a program that no processor without such instructions runs."""
    if not _runs_an_lstm_in_bfloat16():
        pytest.skip("oneDNN has no LSTM in bfloat16 for this processor")
