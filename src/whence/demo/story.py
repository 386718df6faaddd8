"""The text that the tiny model learns: short enough to be memorised in a few seconds."""

from __future__ import annotations

import re

TEXT = """
Two clocks hung in the hall of a small station. The old clock was made of brass, and the new clock was made of glass.
Every evening the keeper wound the old clock, and every morning he read the time on both.
Most days the two clocks agreed to the second. On cold days the old clock was late, because brass is slow in the frost.
The keeper knew this, so he wrote down how late it was, and he did not worry.
One winter the new clock was late as well. It was late by one minute, then by two, and nobody could say why.
The keeper did not turn the hands back, for that would hide the fault and leave it in the wheels.
He took the clock from the wall and opened it. He held each wheel beside the wheel of the old clock, and he counted the teeth.
The first wheel was right, and so was the second. The third wheel had lost one tooth.
All the wheels behind it turned too slowly, but there was nothing wrong with them. They only passed on what they were given.
So the keeper changed the third wheel, and he left the others alone. After that the two clocks agreed again.
When a child asked him how he had found it, he said: look for the first wheel that is wrong while the wheel before it is right.
A late train can be the fault of the wind, or of the rails, or of the clock. Ask where it was late first.
A small delay on a cold day is only weather. The same delay on a warm day is a broken wheel.
"""
PROMPT = "The keeper did not turn the hands"

_TOKEN = re.compile(r"[A-Za-z]+|[.,:]")


def words(text: str) -> list[str]:
    """Words and punctuation marks of a text, in order."""
    return _TOKEN.findall(text)


def vocabulary() -> tuple[str, ...]:
    """Every word of the text once, sorted: a word's place is its token."""
    return tuple(sorted(set(words(TEXT))))


def encode(text: str) -> list[int]:
    """Tokens of a text whose words are all known; KeyError for another word."""
    token = {word: i for i, word in enumerate(vocabulary())}
    return [token[word] for word in words(text)]


def decode(tokens: list[int]) -> str:
    """Tokens back to text, punctuation without the blank before it."""
    words = vocabulary()
    return re.sub(r" ([.,:])", r"\1", " ".join(words[t] for t in tokens))
