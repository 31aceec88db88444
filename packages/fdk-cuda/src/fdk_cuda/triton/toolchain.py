"""The toolchain of Triton's launcher: it is C code, which Triton compiles at first use."""

import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path

from triton.runtime import driver  # type: ignore[import-untyped]


def why_no_launcher() -> str | None:
    """Returns why Triton cannot launch kernels here ("needs a C compiler: ..."), or None.

    If a compiler or header is missing, Triton's driver decides: a launcher that was built before
    needs neither. Triton 3.6 builds further launchers per kind of kernel, which this cannot see.
    """
    missing = _missing()
    return missing if missing and _fails(missing) else None


def c_compiler() -> str | None:
    """Returns the compiler that Triton uses: CC if set, else gcc, else clang."""
    named = os.environ.get("CC")
    return shutil.which("gcc") or shutil.which("clang") if named is None else named


def _missing() -> str | None:
    compiler = c_compiler()
    if compiler is None:
        return "needs a C compiler: Triton builds its launcher with one, found no CC, gcc or clang"
    if shutil.which(compiler) is None:
        return f"needs a C compiler: Triton builds its launcher with CC, found no {compiler!r}"
    scheme = sysconfig.get_default_scheme()
    # As Triton does: Debian's "posix_local" scheme has no headers.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    headers = sysconfig.get_path("include", scheme)
    if not (Path(headers) / "Python.h").is_file():
        return f"needs Python.h: Triton builds its launcher with it, found none in {headers}"
    return None


@cache  # otherwise a failing compiler prints its error for every layer
def _fails(missing: str) -> bool:
    try:
        driver.active  # noqa: B018 (reading it builds the launcher)
    except Exception:  # any error here would also be raised by the first call
        return True
    return False
