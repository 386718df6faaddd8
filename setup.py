"""Builds the compiled kernels where there is a C++ compiler. Without one whence installs all the
same, and takes numpy; WHENCE_KERNELS=compiled makes that an error, for who builds wheels.
"""

import os
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")
# No flag may change a result: sums have an order of their own, and nothing is contracted.
FLAGS = {
    "msvc": ["/O2", "/std:c++17", "/fp:precise"],
    "unix": [
        *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
        *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
    ],
}


class BuildWithFlags(build_ext):
    """Compiles with the flags of the compiler that is here."""

    def build_extension(self, ext):
        ext.extra_compile_args = FLAGS["msvc" if self.compiler.compiler_type == "msvc" else "unix"]
        super().build_extension(ext)


PARTS = ["layout.hpp", "kernels.inc", "block.inc", "compare.inc", "describe.inc"]

setup(
    ext_modules=[
        Extension(
            "whence._compiled",
            ["native/module.cpp"],
            depends=[f"native/{part}" for part in PARTS],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else [],
            py_limited_api=STABLE_ABI,
            optional=os.environ.get("WHENCE_KERNELS") != "compiled",
        )
    ],
    cmdclass={"build_ext": BuildWithFlags},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
