"""Refuses a Python that is too old. Such a Python must be able to parse this file,
`whence/__init__.py` and `whence/errors.py`.
"""

import os
import sys

from whence.errors import Unsupported


def refuse() -> None:
    """Raise Unsupported; where the command `whence` is starting, say the same on stderr and leave
    with the exit code of errors.
    """
    version = ".".join(str(part) for part in sys.version_info[:3])
    text = (
        f"whence needs Python 3.11 or newer, and {sys.executable} is Python {version}: make an "
        "environment with a newer one (python3.11 -m venv ENV), and install whence and your "
        "program there"
    )
    # "-m" is what Python puts here while it imports the package that it will run.
    if os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))[0] in ("-m", "whence"):  # noqa: PTH119, PTH122
        sys.stderr.write(f"whence: {text}\n")
        raise SystemExit(Unsupported.exit_code)
    raise Unsupported(text)
