"""What all captures share: the session, the listener, and the place of parameters in checkpoint
files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.dtypes import Array
from whence.errors import ElementsMissing, UsageError
from whence.instrument.options import CaptureOptions
from whence.instrument.session import Session
from whence.instrument.wording import stderr_is_terminal
from whence.lazy_names import importing
from whence.records import Call, External, Run, RunInfo

if TYPE_CHECKING:
    from whence.instrument.framework import Listening

_SILENT_S = 1.0


def finishing(folder: str) -> Callable[[int, int], None] | None:
    """A callback (done, of) that shows a line on stderr after a second and removes it at the end.

    None when stderr is not a terminal. It starts no thread and loads no package, because the
    captured program is ending.
    """
    if not stderr_is_terminal():
        return None
    return _Line(f"whence: finishing {ascii(folder)[1:-1]}").tell


class _Line:
    def __init__(self, text: str) -> None:
        self._text = text
        self._began = 0.0
        self._text_now = ""

    def tell(self, count: int, of: int) -> None:
        now = time.monotonic()
        self._began = self._began or now
        text = (
            f"{self._text}: {100 * count // of} %"
            if count < of and now - self._began > _SILENT_S
            else ""
        )
        if text != self._text_now:
            self._text_now = text
            # the index matters, the terminal does not
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()


def recorded_sequences(path: str) -> list[tuple[int, ...]]:
    """The token sequences of a run, prompts included, in the order in which they arrived.

    The last token of a sequence was never an input of the model; it is the one with the largest
    logit, provided that every other generated token had the largest logit. Sequences that occur
    several times in one call (beam search, several answers to one prompt) are left out, because
    rows may move between them unnoticed. Raises UsageError when no sequence is left, and
    UnreadableRun.
    """
    from whence.align import prompts as sequences
    from whence.readers.opening import open_run

    run = open_run(path)
    prompts = sequences.prompts(run)
    usable = [p for p in prompts if not p.siblings]
    if not usable:
        why = (
            "every prompt occurs several times in one call, as in beam search: which row continues "
            "which is not recorded"
            if prompts
            else "it holds no calls of a model with token ids and logits; capture it with "
            "--level logits, or whole"
        )
        raise UsageError(f"--force-tokens {path}: {why}")
    out = []
    for prompt in usable:
        tokens = prompt.tokens
        try:
            best = {
                i: int(sequences.logits(run, s).argmax())
                for i, s in prompt.scores.items()
                if i >= prompt.prompt - 1
            }
        except ElementsMissing:
            best = {}
        end = len(tokens) - 1
        if end in best and all(best[i] == tokens[i + 1] for i in best if i < end):
            tokens = (*tokens, best[end])
        out.append(tokens)
    return out


_SHARE_OF_FREE_SPACE = 4


def check_patch(options: CaptureOptions, path: str) -> None:
    """Raise UsageError or UnreadableRun when the run to patch from cannot be read or holds no such
    call, before anything is written.
    """
    if options.patch:
        from whence import store
        from whence.instrument.patch_points import check_points

        if Path(path).resolve() == Path(options.patch_from).resolve():
            raise UsageError(
                f"patch_from {options.patch_from} is the run that is to be written; choose "
                "another output path"
            )
        check_points(options.patch, store.open_run(options.patch_from).calls, options.patch_from)
    if options.force_tokens:
        if Path(path).resolve() == Path(options.force_tokens).resolve():
            raise UsageError(
                f"force_tokens {options.force_tokens} is the run that is to be written; choose "
                "another output path"
            )
        recorded_sequences(options.force_tokens)


def recompute(run: Run, call: Call, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """What the program of a call makes of other inputs with the call's own parameters, in the
    dtypes that it was recorded in. inputs, outputs: by slot. Raises ReplayRefused where the call
    has no program, or its program does not serve these inputs.
    """
    from whence import dtypes
    from whence.errors import ReplayRefused
    from whence.replay.validation import load

    program = run.programs.get(call.program)
    if program is None:
        raise ReplayRefused(f"{call.module_name} has no program in {run.path}")
    records = {ref.slot: ref.record for ref in call.refs}
    loaded = load(program, [run.array(record) for record in program.constants])

    def as_recorded(slot: str) -> Array:
        if slot not in inputs or slot not in records:
            raise ReplayRefused(f"{call.module_name} is not given {slot} here")
        dtype = run.records[records[slot]].dtype
        is_cast = dtypes.is_floating(dtype)
        return inputs[slot].astype(dtypes.named(dtype).numpy) if is_cast else inputs[slot]

    if lost := [slot for slot in program.params if slot not in records]:
        raise ReplayRefused(f"{lost[0]} of {call.module_name} was not captured in {run.path}")
    params = {slot: run.array(records[slot]) for slot in program.params}
    return loaded.run({slot: as_recorded(slot) for slot in program.inputs}, params)


@importing()
def listener_of(
    framework_name: str, session: Session, model: Any, folder: str, *, lasting: bool = False
) -> Listening:
    """The listener of a framework. model: None listens to every one. Raises Unsupported where the
    framework is too old.
    """
    from whence import extras, store
    from whence.instrument.framework import Surroundings, framework

    extras.check_imported(framework_name)
    reading = _READING.get(framework_name, lambda: None)()

    def open_run(path: str) -> Run:
        return store.open_run(path)

    around = Surroundings(
        folder, open_run, ExternalParameters, recorded_sequences, recompute, reading, lasting
    )
    return framework(framework_name).listener(session, model, around)


def _reading_of_paddle() -> Any:
    from whence.workflows.capture import paddle

    return paddle.reading()


def _reading_of_onnxruntime() -> Any:
    from whence.workflows.capture import onnxruntime

    return onnxruntime.reading()


def _reading_of_openvino() -> Any:
    from whence.workflows.capture import onnxruntime

    return onnxruntime.reading().model


_READING: dict[str, Callable[[], Any]] = {
    "paddle": _reading_of_paddle,
    "onnxruntime": _reading_of_onnxruntime,
    "openvino": _reading_of_openvino,
}
"""The readers' functions for a framework, which its listener uses."""


def open_session(
    folder: str, options: CaptureOptions, on_record: Callable[[str, str, Any], Any] | None
) -> Session:
    """A session that writes to the run at `folder`, in the folder of its rank."""
    from whence import store

    limit = options.max_bytes if options.max_bytes is not None else default_max_bytes(folder)

    def writer(rank: int) -> Any:
        made = store.Writer(folder, rank, finishing=finishing(folder))
        if options.ring is None:
            return made
        from whence.instrument.step_choice.ring import DEFAULT_BYTES, StepRing

        size = options.ring_size or DEFAULT_BYTES
        return StepRing(made, options.ring, max_bytes=size, budget=limit)

    return Session(writer, options, max_bytes=limit, rank=_rank, on_record=on_record)


def uncaught() -> str:
    """Describe the exception that ends this process; "" when it ends normally."""
    from whence.instrument.wording import raised

    # In the main process the interpreter has told it before it runs what ends the process; a child
    # of multiprocessing runs that while the exception is still on its way.
    error = sys.exception() or getattr(sys, "last_value", None)
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    return raised(error)


def default_max_bytes(folder: str) -> int:
    """The smaller of 20 GB and a quarter of the free space where the run is written."""
    from whence.instrument.options import DEFAULT_MAX_BYTES

    return min(DEFAULT_MAX_BYTES, _free_bytes(folder) // _SHARE_OF_FREE_SPACE)


def beyond_disk(max_bytes: int | None, folder: str) -> str:
    """A warning where the disk of `folder` fills before a run has `max_bytes`, else ""."""
    from whence.instrument.wording import size

    free = _free_bytes(folder)
    if max_bytes is None or max_bytes <= free:
        return ""
    return (
        f"whence: {folder} is on a disk with {size(free)} left, which fills before --max-bytes "
        f"{size(max_bytes)} is reached; lower it, or choose another -o"
    )


def _free_bytes(folder: str) -> int:
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def is_one_of_several() -> bool:
    """Whether this process is one of several ranks, by its process group or its launcher."""
    from whence.instrument.process_group import process_group

    launched = os.environ.get("WORLD_SIZE", "")
    size = process_group().get("world_size", int(launched) if launched.isdigit() else 1)
    return int(size) > 1


def _rank() -> int:
    """The rank of this process: of its process group once it has joined one, otherwise as set by
    its launcher.
    """
    from whence.instrument.process_group import process_group

    joined = process_group().get("rank")
    if joined is not None:
        return int(joined)
    for name in (
        "RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "PMI_RANK",
        "SLURM_PROCID",
        "PADDLE_TRAINER_ID",
        "LOCAL_RANK",
    ):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0


def process_info(options: CaptureOptions) -> RunInfo:
    """Information about this process, for a run that was started in code."""
    from whence.instrument.launch import interpreter, launcher

    return launcher.describe(tuple(sys.argv), options, interpreter.versions_here())


class ExternalParameters:
    """Looks up a parameter's bytes in checkpoint files: those given by the user, otherwise those
    that this process has mapped.
    """

    def __init__(self, model: Any, session: Session) -> None:
        self._model, self._session = model, session
        self._named = tuple(session.options.weights)
        self._files: tuple[str, ...] | None = None
        self._looked = 0.0
        self._candidates: Any = None

    def __call__(
        self, digest: bytes, dtype: str, shape: tuple[int, ...], data: Any
    ) -> External | None:
        """The place of these bytes in a file, None when they are not found. Called once per
        parameter: files are listed at most once a second.
        """
        now = time.monotonic()
        if self._files is None or (not self._named and now - self._looked > 1.0):
            self._looked = now
            self._know(self._named or _checkpoints(self._model))
        external: External | None = (
            self._candidates.find(digest, dtype, data.nbytes, data) if self._files else None
        )
        return external

    def _know(self, files: tuple[str, ...]) -> None:
        from whence import store

        if files == self._files:
            return
        self._files, self._candidates = files, store.Candidates(files)
        if self._named:
            for path, reason in self._candidates.skipped.items():
                self._session.note(
                    "weights", f"--weights {path} cannot be used, parameters are copied: {reason}"
                )


def _checkpoints(model: Any) -> tuple[str, ...]:
    """Checkpoint files that this process has mapped, and those in the folder that the model's name
    refers to.

    The shards of a run are excluded: a run may be scrubbed or deleted, and would take the
    parameters of this run with it.
    """
    files: dict[str, None] = {}
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or getattr(
        model, "name_or_path", ""
    )
    if isinstance(name, str) and name and Path(name).is_dir():
        files.update(dict.fromkeys(str(p) for p in sorted(Path(name).glob("*.safetensors"))))
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        place = line.partition("/")
        if place[1] and place[2].endswith((".safetensors", ".gguf")):
            files["/" + place[2]] = None
    return tuple(path for path in files if not (Path(path).parent / "journal.jsonl").exists())
