"""What Triton wants of a machine besides a GPU: it builds its launcher, of C, at first use."""

import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path

from triton.runtime import driver  # type: ignore[import-untyped]


def why_no_launcher() -> str | None:
    """Why Triton launches no kernel here ("needs a C compiler: ..."), or None.

    Where something seems to be missing Triton is asked for its launcher, for one that was built
    before needs nothing. Triton 3.6 builds another for each kind of kernel, and is not asked for
    those.
    """
    missing = _missing()
    return missing if missing and _fails(missing) else None


def c_compiler() -> str | None:
    """What Triton would build with: CC, however it is set, or else gcc, or else clang."""
    named = os.environ.get("CC")
    return shutil.which("gcc") or shutil.which("clang") if named is None else named


def _missing() -> str | None:
    compiler = c_compiler()
    if compiler is None:
        return "needs a C compiler: Triton builds its launcher with one, found no CC, gcc or clang"
    if shutil.which(compiler) is None:
        return f"needs a C compiler: Triton builds its launcher with CC, found no {compiler!r}"
    scheme = sysconfig.get_default_scheme()
    # As Triton does: Debian's own scheme has no headers.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    headers = sysconfig.get_path("include", scheme)
    if not (Path(headers) / "Python.h").is_file():
        return f"needs Python.h: Triton builds its launcher with it, found none in {headers}"
    return None


@cache  # a compiler that finds no Python.h would say so for every layer
def _fails(missing: str) -> bool:
    try:
        driver.active  # noqa: B018 (made where it was not)
    except Exception:  # of any kind: the first call would raise it
        return True
    return False
