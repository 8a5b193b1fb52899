"""The one part of the build that pyproject.toml cannot say: the lab's packet emulator, in C.

Optional: where it cannot be built, Atoll is installed without it, and `atoll lab` says what is missing. It
uses Python's limited API, so one build serves every Python from 3.10 on.
"""

from setuptools import Extension, setup

FOLDER = "src/atoll/lab/csrc"
FILES = ("fates", "packets", "links", "loop")

setup(
    ext_modules=[
        Extension(
            "atoll.lab._emulator",
            sources=[f"{FOLDER}/{name}.c" for name in ("module", *FILES)],
            depends=[f"{FOLDER}/{name}.h" for name in FILES],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
