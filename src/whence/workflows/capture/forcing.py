"""Which tokens of a run another one is made to go on with."""

from __future__ import annotations

from whence.errors import ElementsMissing, UsageError


def to_force(path: str) -> list[tuple[int, ...]]:
    """The sequences of a run, prompts included, in the order in which they came.

    Its last token was never fed to a model, so it is taken from the logits, if every other one had the largest. Sequences that lie
    several times in one call (beam search, several answers to one prompt) are left out: rows move between them unseen.
    Raises UsageError where nothing is left, UnreadableRun.
    """
    from whence.align import prompts as sequences
    from whence.workflows.capture.command import open_run

    run = open_run(path)
    found = sequences.prompts(run)
    alone = [p for p in found if not p.beside]
    if not alone:
        why = (
            "every prompt lies several times in one call, as beam search has it: which row goes on with which is not recorded"
            if found
            else "it holds no calls of a model with token ids and logits; capture it with --level logits, or whole"
        )
        raise UsageError(f"--force-tokens {path}: {why}")
    out = []
    for prompt in alone:
        tokens = prompt.tokens
        try:
            best = {i: int(sequences.logits(run, s).argmax()) for i, s in prompt.scores.items() if i >= prompt.prompt - 1}
        except ElementsMissing:
            best = {}
        end = len(tokens) - 1
        if end in best and all(best[i] == tokens[i + 1] for i in best if i < end):
            tokens = (*tokens, best[end])
        out.append(tokens)
    return out
