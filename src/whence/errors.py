"""The error tree. A message says what was tried, on what, what was found, and what to do next."""


class WhenceError(Exception):
    """Base of every error whence raises on purpose. `exit_code` is what the command line returns
    for it.
    """

    exit_code = 3


class UsageError(WhenceError):
    """Options that contradict each other, or a name that matches nothing."""


class UnreadableRun(WhenceError):
    """A path that no reader can open, or a run that is there but cannot be understood."""


class UnknownVersion(UnreadableRun):
    """A run written by a newer whence than this one."""


class ElementsMissing(WhenceError):
    """The record is known (shape, dtype, statistics) but its elements were not kept, or cannot be
    read back.
    """


class OutputExists(WhenceError):
    """An output path that already exists and would be overwritten; `--force` replaces it."""


class StoreFailed(WhenceError):
    """Writing a run failed (disk full, read-only, vanished). What was acknowledged before stays
    readable.
    """


class EngineFailed(WhenceError):
    """Workers went away together with what starts them; what they had finished is kept if the
    comparison has a folder.
    """


class CaptureError(WhenceError):
    """A capture could not start. A capture that has started never raises into the captured
    program.
    """


class ReplayRefused(WhenceError):
    """A recorded program cannot be used; the message is the reason."""


class MissingDependency(WhenceError):
    """An optional package is needed; the message holds the pip command."""


class Unsupported(WhenceError):
    """This Python, or a package, is older than whence needs; the message says what is here, what is
    needed, and what to do.
    """
