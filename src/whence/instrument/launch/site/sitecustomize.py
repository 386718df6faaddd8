"""Found first on PYTHONPATH by every Python a `whence run` command starts: arms the hook, then runs
the user's own sitecustomize.

Old syntax on purpose (no annotations, no f-strings): any Python may find this file, also one that
cannot run whence.
"""

import importlib.util
import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs 5 ms of every start

if sys.version_info >= (3, 8) and os.environ.get("WHENCE_CAPTURE"):
    try:
        import _whence_hook  # type: ignore[import-not-found, unused-ignore]

        _whence_hook.arm(os.environ["WHENCE_CAPTURE"])
    except Exception as _error:  # noqa: BLE001 - the program comes first, whatever happens here
        sys.stderr.write(
            "whence: not capturing this process: %s: %s\n" % (type(_error).__name__, _error)  # noqa: UP031
        )

# The program sees the sys.path it would have had, and its own sitecustomize runs as if it had been
# found first.
sys.path[:] = [_entry for _entry in sys.path if os.path.abspath(_entry or ".") != _folder]  # noqa: PTH100
sys.path_importer_cache.pop(_folder, None)

for _finder in list(sys.meta_path):
    _spec = _finder.find_spec("sitecustomize", None) if hasattr(_finder, "find_spec") else None
    if _spec is not None and _spec.loader is not None:
        _module = importlib.util.module_from_spec(_spec)
        sys.modules["sitecustomize"] = _module
        _spec.loader.exec_module(_module)
        break
