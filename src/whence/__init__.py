"""whence: from which operator does the error come?

    with whence.capture(model, "runs/ref"):
        model(x)
    print(whence.compare("runs/ref", "runs/tgt").status)

Importing it loads no framework; what a name needs is imported on first use.
"""

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036 - a checkout on PYTHONPATH, which pip has not refused
    from whence._python import refuse

    refuse()

from whence._version import __version__ as __version__

if TYPE_CHECKING:
    from whence.api import accept as accept
    from whence.api import (
        auto_diff,
        begin_dump,
        compare,
        compare_labels,
        convert,
        diff_results,
        doctor,
        end_dump,
        generate_tests,
        label,
        load_comparison,
        new_id,
        open_run,
        record,
        recording,
        task,
    )
    from whence.api import capture as capture
    from whence.api import compile as compile  # noqa: A004
    from whence.api import diverge as diverge
    from whence.api import export_check as export_check
    from whence.api import fuzz as fuzz
    from whence.api import ladder as ladder
    from whence.api import locate as locate
    from whence.api import map_weights as map_weights
    from whence.api import nans as nans
    from whence.api import narrow as narrow
    from whence.api import pack as pack
    from whence.api import probe as probe
    from whence.api import ranges as ranges
    from whence.api import ranks as ranks
    from whence.api import recipe as recipe
    from whence.api import relocate as relocate
    from whence.api import report_html as report_html
    from whence.api import repro as repro
    from whence.api import serve_check as serve_check
    from whence.api import tokens as tokens
    from whence.api import trace as trace
    from whence.api import unpack as unpack
    from whence.api import watch as watch

__all__ = [
    "accept", "auto_diff", "begin_dump", "capture", "compare", "compare_labels", "compile",
    "convert", "diff_results", "diverge", "doctor", "end_dump", "export_check", "fuzz",
    "generate_tests", "label", "ladder", "load_comparison", "locate", "map_weights", "nans",
    "narrow", "new_id", "open_run", "pack", "probe", "ranges", "ranks", "recipe", "record",
    "recording", "relocate", "report_html", "repro", "serve_check", "task", "tokens", "trace",
    "unpack", "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'whence' has no attribute {name!r}")
    from whence import api

    globals()[name] = value = getattr(api, name)  # a label in a loop must not come here again
    return value
