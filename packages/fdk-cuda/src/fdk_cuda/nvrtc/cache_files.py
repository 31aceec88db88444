"""Files of the cache on disk, used only if no other user can have written them.

Machine code that another user planted would run on the GPU with this user's data. The checks of
owner and mode are those that OpenSSH makes of a user's keys (``StrictModes``).
"""

import errno
import os
import secrets
import stat
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

from fdk_formats.untrusted import open_regular

CACHE_VARIABLE = "FDK_CUDA_CACHE"
# Modes of what is created: nobody else may write, whatever the umask.
FOLDER_MODE, FILE_MODE = 0o755, 0o644
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# The owner shown for a user who does not exist in a container: the host's root, above a home.
OVERFLOW_UID = 65534


def cache_directory() -> Path:
    """Returns the folder of compiled kernels and measured configurations.

    ``$FDK_CUDA_CACHE``, else ``fdk-cuda`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. A leading ``~``
    is the home.

    Raises:
        OSError: the user has no home and it is needed, as in a container without a passwd entry.
    """
    try:
        if named := os.environ.get(CACHE_VARIABLE):
            return Path(named).expanduser()
        if base := os.environ.get("XDG_CACHE_HOME"):
            return Path(base).expanduser() / "fdk-cuda"
        return Path.home() / ".cache" / "fdk-cuda"
    except RuntimeError as error:
        raise FileNotFoundError(f"no home directory, and {CACHE_VARIABLE} is not set") from error


def private_directory(*, create: bool = False) -> Path:
    """Returns the cache folder, without links in its path.

    The folder must belong to this user or root, and nobody else may write in it or in a folder
    above it. A sticky folder above, such as /tmp, lets nobody rename what is another's.

    Args:
        create: create the folder if it is missing.

    Raises:
        PermissionError: another user can change the folder; warns once.
        OSError: the folder is missing or cannot be created; or as ``cache_directory``.
    """
    folder = cache_directory()
    if create:
        _create(folder)
    # The resolved path is used from here on, so that no link can change after the check.
    folder = Path(os.path.realpath(folder, strict=True))
    if reason := _distrust(folder.stat()):
        _refuse(folder, reason)
    for parent in folder.parents:
        if reason := _distrust(parent.stat(), is_parent=True):
            _refuse(folder, f"is in {parent}, which {reason}")
    return folder


def read_private(path: Path, max_bytes: int) -> bytes:
    """Reads a file of ``private_directory()``; follows no link and waits for no FIFO.

    Raises:
        PermissionError: another user can have written the file, it is no regular file or larger
            than ``max_bytes``; warns once.
        OSError: the file is missing or cannot be read.
    """
    data = b""
    try:
        with open_regular(path, follow_links=False) as file:
            if reason := _distrust(os.fstat(file.fileno())):
                _refuse(path, reason)
            data = file.read(max_bytes + 1)
    except ValueError:
        _refuse(path, "is no regular file")
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        _refuse(path, "is a symbolic link")
    if len(data) > max_bytes:
        _refuse(path, f"is larger than {max_bytes} bytes")
    return data


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under another name, then renames it, so that no reader sees half of it.

    The umask may lower the mode, which is 0644. Whatever has the name is replaced, not written to.

    Raises:
        OSError: the file cannot be written; no partial file remains.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(
            partial, "xb", opener=lambda name, flags: os.open(name, flags, FILE_MODE)
        ) as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _create(folder: Path) -> None:
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(FOLDER_MODE, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")


def _distrust(status: os.stat_result, *, is_parent: bool = False) -> str | None:
    """Returns how another user can change a file or folder, or None."""
    if not hasattr(os, "geteuid"):  # Windows has neither owners by number nor modes
        return None
    trusted = {0, os.geteuid()} | ({OVERFLOW_UID} if is_parent else set())
    if status.st_uid not in trusted:
        return f"belongs to user {status.st_uid}, not to {os.geteuid()} or root"
    if is_parent and status.st_mode & stat.S_ISVTX:
        return None
    writable = status.st_mode & WRITABLE_BY_OTHERS
    if writable == stat.S_IWGRP and _is_own_group(status.st_gid):
        return None
    mode = stat.S_IMODE(status.st_mode)
    return f"can be written by others (mode {mode:04o}; chmod go-w mends it)" if writable else None


@cache
def _is_own_group(gid: int) -> bool:
    """Tells if a group has this user alone: it has the user's name and no further member.

    Distributions that give each user such a group set the umask to 002.
    """
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _refuse(path: Path, reason: str) -> None:
    _warn(
        f"fdk-cuda does not use its cache {path}: it {reason}. Kernels are compiled anew. "
        f"{CACHE_VARIABLE} names another folder, which only you or root can write"
    )
    raise PermissionError(f"{path} {reason}")


@cache  # one warning per file and reason
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)
