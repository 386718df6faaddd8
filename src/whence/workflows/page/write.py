"""The page of a comparison: what users call; measuring is in `paging.py`, which loads much."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from whence.errors import OutputExists, UnreadableRun, UsageError
from whence.records import Run
from whence.results import Comparison, Evidence, TokenMatch
from whence.workflows.notebook_progress import Count
from whence.workflows.saved import AnyComparison, AnyPath, load_comparison, storing, write_file

if TYPE_CHECKING:
    from whence.results.page import Page

_DETAILS = 40


def page_beside(comparison: str | Comparison) -> Path:
    """Where the page of a comparison goes that was not told where: into its folder, or beside its
    file; into the working folder for one that lies in an object store or in memory.
    """
    from whence.store import is_url

    if not isinstance(comparison, str) or is_url(comparison):
        return Path("report.html")
    place = Path(comparison)
    return place / "report.html" if place.is_dir() else place.with_suffix(".html")


def report_html(
    comparison: AnyComparison,
    output: AnyPath,
    *,
    details: int = _DETAILS,
    tokens: AnyPath | None = None,
    force: bool = False,
    runs: tuple[Run, Run] | None = None,
    progress: Count = lambda *_: None,
) -> Path:
    """Write a comparison as one HTML page that needs nothing else, and return its path.

    comparison: a folder that `compare` wrote, what it returned, or a file of `whence tokens
    --format json`. details: for how many calls tensors are shown in detail; these are read from
    the two runs, and without them the page says what is missing. tokens: a file of `whence tokens
    --format json`, shown beside the comparison; or the tokenizer.json of the model, or its folder,
    for the text of the tokens that were generated. runs: both, where they are open already.
    progress: called with (done, of, what). Raises UnreadableRun, UsageError, OutputExists,
    StoreFailed.
    """
    from whence.report.own_files import check_replaceable
    from whence.store import refuse_url

    refuse_url(output, "a page is written to a file of this machine")
    file = Path(output)
    if file.is_dir():
        raise OutputExists(
            f"cannot write a page to {file}: it is a folder; name a file in it, like "
            f"{file / 'report.html'}"
        )
    check_replaceable(file, force)
    text = _html(page(comparison, details=details, tokens=tokens, runs=runs, progress=progress))
    write_file(file, text, "the page to ")
    return file


def plots(
    comparison: AnyComparison,
    folder: AnyPath,
    *,
    force: bool = False,
) -> list[Path]:
    """Write the error along the run into a folder, as PNG and SVG, and return the files.

    Raises UnreadableRun, UsageError, OutputExists, StoreFailed, MissingDependency without
    matplotlib.
    """
    from whence.report.plots import write as write_plots
    from whence.store import refuse_url

    refuse_url(folder, "plots are written to a folder of this machine")
    place = Path(folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())) and not force:
        raise OutputExists(
            f"{place} exists and is not empty; --force writes into it, or choose another folder"
        )
    with storing(f"write plots to {place}"):
        return write_plots(page(comparison, details=0), place)


def page(
    comparison: AnyComparison,
    *,
    details: int = _DETAILS,
    tokens: AnyPath | None = None,
    runs: tuple[Run, Run] | None = None,
    progress: Count = lambda *_: None,
) -> Page:
    """What such a page shows, as a structure (`whence.results.page`); takes what `report_html`
    takes. Raises UnreadableRun, UsageError.
    """
    import msgspec

    from whence.store import is_url
    from whence.workflows.page.measure import page_of
    from whence.workflows.page.vocabulary import is_tokenizer

    if details < 0:
        raise UsageError(f"details {details}: a number of calls, 0 or more")
    given = Path(tokens) if tokens is not None else None
    words = given if given is not None and is_tokenizer(given) else None
    texts = _texts(given) if given is not None and words is None else None
    if isinstance(comparison, Comparison):
        measured = page_of(comparison, details=details, runs=runs, tokenizer=words, tell=progress)
        return msgspec.structs.replace(measured, texts=texts)
    place = Path(comparison)
    is_far = is_url(os.fspath(comparison))
    if (
        not is_far
        and place.is_file()
        and texts is None
        and (standalone_texts := _texts_or_none(place)) is not None
    ):
        return _of_texts(standalone_texts)
    measured = page_of(
        load_comparison(os.fspath(comparison)),
        folder="" if is_far else os.fspath(place),
        details=details,
        runs=runs,
        tokenizer=words,
        tell=progress,
    )
    return msgspec.structs.replace(measured, texts=texts)


def _html(content: Page) -> str:
    from whence.report.html import page_html

    return page_html(content)


def _texts_or_none(file: Path) -> TokenMatch | None:
    import msgspec

    try:
        return msgspec.json.decode(file.read_bytes(), type=TokenMatch)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _texts(file: Path) -> TokenMatch:
    texts = _texts_or_none(file)
    if texts is None:
        raise UnreadableRun(
            f"{file} is no answer of whence tokens; whence tokens REF TGT --format json > "
            f"{file.name} makes one. It is not a tokenizer.json of a model either"
        )
    return texts


def _of_texts(texts: TokenMatch) -> Page:
    """The page of a comparison of two files of outputs: no run was captured."""
    from whence._version import __version__
    from whence.results import Coverage, Plan
    from whence.results.page import Page, PageSide

    status = {"pass": "same", "fail": "different"}.get(texts.status, "undecided")
    rates = [
        f"{name} {share:.3g} of {texts.count} prompts"
        for name, share in (("full match", texts.full_match), ("half match", texts.half_match))
        if share is not None
    ]
    reached = {"pass": "reach their thresholds", "fail": "do not reach their thresholds"}.get(
        texts.status, "could not be taken"
    )
    result = Comparison(
        status=status,
        evidence=Evidence.TEXT,
        reference=texts.reference,
        target=texts.target,
        findings=(),
        first_difference=None,
        counts={},
        coverage=Coverage(0, 0, 0, 0, 0, False),
        unmatched=0,
        incomparable=0,
        inputs_differ=(),
        versions={"whence": __version__},
        plan=Plan(()),
        rows=(),
        verdicts=(),
        headline=f"The outputs' rates {reached}: "
        f"{', '.join(rates) or 'no prompt stands on both sides'}",
        notes=(
            *texts.notes,
            "outputs alone were compared: nothing is known of the operators that made them",
        ),
    )
    return Page(result, PageSide(texts.reference), PageSide(texts.target), texts=texts)
