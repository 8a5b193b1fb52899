"""The one part of the build that pyproject.toml cannot say: what is written in C.

Both extensions are optional. Where they cannot be built, Atoll is installed without them: `atoll lab` says
what its packet emulator needs, and forward error correction runs on NumPy. They use Python's limited API, so
one build serves every Python from 3.10 on.
"""

from setuptools import Extension, setup


def extension(name: str, folder: str, sources: tuple[str, ...], headers: tuple[str, ...]) -> Extension:
    return Extension(
        name,
        sources=[f"{folder}/{source}.c" for source in sources],
        depends=[f"{folder}/{header}.h" for header in headers],
        define_macros=[("Py_LIMITED_API", "0x030A0000")],
        extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"],
        py_limited_api=True,
        optional=True,
    )


EMULATOR = ("fates", "packets", "links", "loop")

setup(
    ext_modules=[
        extension("atoll.lab._emulator", "src/atoll/lab/csrc", ("module", *EMULATOR), EMULATOR),
        extension("atoll.ltp._gf", "src/atoll/ltp/csrc", ("module", "gf"), ("gf", "gf_vectors")),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
