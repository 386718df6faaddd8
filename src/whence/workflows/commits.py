"""Runs one command on two commits of a repository, captures and compares both, and finds the commit
in between that changed the results.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

import msgspec

from whence.errors import CaptureError, UsageError
from whence.results import Comparison, Status, TokenComparison
from whence.workflows.notebook_progress import Tell

_ANY_EXIT_CODE = range(256)


class Side(NamedTuple):
    """A commit: the user's name for it, git's description ("" for a folder), the run, and the exit
    code of the command there.
    """

    given: str
    commit: str
    run: str
    exit_code: int


class Commits(NamedTuple):
    """The results of two commits.

    texts: comparison of the files that the command wrote on both. broken_by: git's description of
    the first commit that is different, "" without a search. skipped: descriptions of commits that
    could not be judged; one of them may be the first.
    """

    first: Side
    second: Side
    comparison: Comparison
    texts: TokenComparison | None = None
    broken_by: str = ""
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def behind(self) -> dict[str, list[int]]:
        """By finding, the numbers of the prompts of `texts` that it makes fail; empty where the
        model was not asked these prompts one by one.
        """
        generation, texts = self.comparison.generation, self.texts
        if generation is None or texts is None or len(generation.prompts) != len(texts.prompts):
            return {}
        failing = {prompt.number for prompt in texts.prompts if prompt.verdict != "PASS"}
        behind: dict[str, list[int]] = {}
        for prompt in generation.prompts:
            if prompt.led_to and prompt.number in failing:
                behind.setdefault(prompt.led_to, []).append(prompt.number)
        return behind


class Files(TypedDict, total=False):
    """texts: file of answers that the command writes. expected: file that the answers of both
    commits are compared with. links: paths that git does not track; every checkout gets a link to
    them.
    """

    texts: str
    expected: str
    links: Sequence[str]


def commits(
    first: str,
    second: str,
    command: Sequence[str],
    *,
    output: str,
    bisect: bool = False,
    tell: Tell = lambda _: None,
    **files: Unpack[Files],
) -> Commits:
    """Run `command` on two commits of the repository around this folder, in two folders, or in this
    folder with two virtual environments, and compare what it computes.

    output: a new folder for the runs. A commit is checked out beside the repository, which is not
    touched, and removed again. bisect: name the first commit behind `first` that is different.
    files: fields of `Files`. Raises UsageError for what is not a commit or folder, CaptureError
    where the command computes nothing, OutputExists.
    """
    from whence.workflows.compare import compare
    from whence.workflows.rerun import workplace
    from whence.workflows.tokens.tokens import tokens

    texts, expected = files.get("texts", ""), files.get("expected", "")
    work = _Work(command, files.get("links", ()), texts, tell)
    shas = work.commit(first), work.commit(second)
    between = work.between(*shas) if bisect else []
    with workplace(output, "commits") as place:
        sides = tuple(
            work.captured(given, sha, place / name)
            for given, sha, name in zip((first, second), shas, ("first", "second"), strict=True)
        )
        result = compare(*(side.run for side in sides))
        answers = None
        if texts:
            copies = [f"{side.run}-{Path(texts).name}" for side in sides]
            pairs = [(expected, file) for file in copies]
            answers = tokens(before=pairs[0], after=pairs[1]) if expected else tokens(*copies)
        broken_by, skipped = "", list[str]()
        if between and result.status == Status.DIFFERENT:

            def status(sha: str) -> str:
                try:
                    run = work.captured(sha, sha, place / sha[:12]).run
                except CaptureError:
                    return Status.UNDECIDED
                return compare(sides[0].run, run).status

            broken_by, skipped = first_different(between, status)
    return Commits(
        sides[0],
        sides[1],
        work.from_checkouts(result),
        answers,
        work.named(broken_by) if broken_by else "",
        tuple(map(work.named, skipped)),
        work.notes(shas),
    )


def first_different(between: Sequence[str], status: Callable[[str], str]) -> tuple[str, list[str]]:
    """(the first commit that is different, those before it that could not be judged).

    The last of `between` is known to be different.
    """
    same, different = -1, len(between) - 1
    skipped: set[int] = set()
    while open_ := [n for n in range(same + 1, different) if n not in skipped]:
        middle = open_[len(open_) // 2]
        match status(between[middle]):
            case Status.SAME:
                same = middle
            case Status.DIFFERENT:
                different = middle
            case _:
                skipped.add(middle)
    return between[different], [between[n] for n in sorted(skipped) if same < n < different]


class _Work:
    """Checkouts of the repository around this folder, and a command that runs in them."""

    def __init__(
        self,
        command: Sequence[str],
        links: Sequence[str],
        texts: str,
        tell: Tell,
    ) -> None:
        self._command, self._links = tuple(command), links
        self._texts, self._tell = texts, tell
        top = self._git("rev-parse", "--show-toplevel", check=False)
        self._top = Path(top) if top else Path.cwd()
        self._has_git = bool(top)
        self._checkouts: list[Path] = []

    def _git(self, *words: str, check: bool = True) -> str:
        """The output of git; "" when git fails and `check` is false. Raises UsageError."""
        try:
            done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise UsageError("git is not installed, or not in PATH") from error
        if done.returncode and check:
            raise UsageError(f"git {words[0]} failed: {done.stderr.strip() or done.returncode}")
        return "" if done.returncode else done.stdout.strip()

    def commit(self, given: str) -> str:
        """The hash of a commit, "" for a folder. Raises UsageError for anything else."""
        sha = self._git("rev-parse", "--verify", "--quiet", f"{given}^{{commit}}", check=False)
        if sha or Path(given).is_dir():
            return sha
        where = f"of {self._top}" if self._has_git else "here: this folder is in no repository"
        raise UsageError(
            f"{given!r} is not a commit {where}, and no folder; give what "
            "`git log --all --oneline` shows, or the path of another checkout"
        )

    def between(self, first: str, second: str) -> list[str]:
        """The commits after `first` up to and including `second`, along first parents. Raises
        UsageError.
        """
        if not first or not second:
            raise UsageError("--bisect takes two commits, no folders")
        numbers = self._git("rev-list", "--first-parent", "--reverse", f"{first}..{second}")
        if not numbers or self._git("merge-base", first, second) != first:
            raise UsageError(
                f"--bisect: {first[:12]} is not an ancestor of {second[:12]}; give the older "
                "commit first, or leave --bisect out"
            )
        return numbers.split()

    def named(self, sha: str) -> str:
        """The one-line description that git gives of a commit."""
        return self._git("show", "--no-patch", "--format=%h %s (%an, %as)", sha)

    def notes(self, shas: Sequence[str]) -> tuple[str, ...]:
        """Remarks on changes that neither run contains."""
        if not any(shas) or not self._git("status", "--porcelain", "--untracked-files=no"):
            return ()
        return ("the working tree has changes that are in no commit; a folder in place of a "
                "commit (.) takes them too",)  # fmt: skip

    def captured(self, given: str, sha: str, run: Path) -> Side:
        """Run the command there and keep its run and its file of texts.

        Raises CaptureError when the command computes nothing, UsageError when the file is missing.
        """
        from whence.readers.opening import open_run
        from whence.workflows.rerun import Command

        self._tell(f"running {self._command[0]} ... on {given}")
        is_environment = not sha and Path(given, "pyvenv.cfg").is_file()
        here = Path.cwd() if is_environment else Path(given)
        with self._checkout(sha) if sha else contextlib.nullcontext(here) as folder:
            top = Path(folder).absolute()
            place = top / Path.cwd().relative_to(self._top) if sha else top
            paths = [str(top), str(top / "src"), os.environ.get("PYTHONPATH", "")]
            variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            if is_environment:
                programs = str(Path(given, "bin").absolute()), os.environ.get("PATH", os.defpath)
                variables["PATH"] = os.pathsep.join(programs)
            program = Command(
                self._command, str(place), exit_codes=_ANY_EXIT_CODE, variables=variables
            )
            program.capture(run)
            if self._texts:
                file = place / self._texts
                if not file.is_file():
                    raise UsageError(
                        f"the command wrote no {self._texts} on {given}; --texts is a path from "
                        "the folder that the command runs in"
                    )
                shutil.copyfile(file, f"{run}-{file.name}")
        code = open_run(str(run)).info.settings.get("exit_code", 0)
        return Side(given, self.named(sha) if sha else "", str(run), code)

    @contextlib.contextmanager
    def _checkout(self, sha: str) -> Iterator[Path]:
        """A working tree of a commit; it is removed afterwards, also after Ctrl-C."""
        with tempfile.TemporaryDirectory(prefix="whence-commits-") as outer:
            folder = Path(outer).resolve() / sha[:12]
            self._checkouts.append(folder)
            try:
                self._git("worktree", "add", "--detach", str(folder), sha)
                for link in self._links:
                    source = Path(link).absolute()
                    if not source.exists() or not source.is_relative_to(self._top):
                        raise UsageError(
                            f"--link {link}: nothing of that name lies in {self._top}; give a path "
                            "of the working tree"
                        )
                    place = folder / source.relative_to(self._top)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.symlink_to(source)
                yield folder
            finally:
                self._git("worktree", "remove", "--force", str(folder), check=False)
                self._git("worktree", "prune", check=False)

    def from_checkouts(self, result: Comparison) -> Comparison:
        """The comparison with source lines relative to the checkouts, which no longer exist.

        Suggestions that would run the programs there again are removed.
        """

        def line(source: str) -> str:
            for folder in self._checkouts:
                source = source.replace(f"{folder}/", "")
            return source

        findings = [msgspec.structs.replace(f, source=line(f.source)) for f in result.findings]
        steps = [step for step in result.next if "whence locate" not in step.command]
        return msgspec.structs.replace(result, findings=tuple(findings), next=tuple(steps))
