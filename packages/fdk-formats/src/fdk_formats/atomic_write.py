"""Files replaced whole and durably: written under another name, flushed, then renamed."""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import IO

from fdk_formats.untrusted import file_kind

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PERMISSIONS = 0o777
# Errors of file systems that have no locks, or cannot flush a folder.
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)


@contextlib.contextmanager
def atomic_write(target: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces ``target`` if the block succeeds.

    The temporary file is in the same folder. It is readable by its owner alone until it has the
    mode, owner and group of the file that it replaces; a new file has the mode that the umask
    gives. An owner or group that this process may not give is not kept, and then the group may do
    no more than everyone. File and folder are flushed to disk. Temporary files of the same target
    whose process was killed are removed first.

    Args:
        target: the file, with links resolved.

    Raises:
        ValueError: if ``target`` is a link that leads nowhere, a FIFO, a device or a socket.
        IsADirectoryError: if ``target`` is a folder.
        OSError: if the file cannot be written. ``target`` is unchanged then.
    """
    replaced = _status_of(target)
    # Not after the target: its name may be as long as names can be.
    prefix = f".fdk-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}-"
    _remove_stale(target.parent, prefix)
    file, temporary = _create(target.parent, prefix, 0o666 if replaced is None else 0o600)
    try:
        with file:
            yield file
            file.flush()
            if replaced is not None:
                _copy_owner_and_mode(file, temporary, replaced)
            os.fsync(file.fileno())
            if os.name == "nt":  # an open file cannot be renamed there
                file.close()
            # The lock is held until the name is gone, else it could be removed as stale.
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def _status_of(target: Path) -> os.stat_result | None:
    """Returns the status of a regular file, or None where there is nothing."""
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"{target}: wanted a file to write, got a folder")
    if not stat.S_ISREG(status.st_mode):
        got = file_kind(status.st_mode)
        raise ValueError(f"{target}: wanted a regular file to replace or a new name, got {got}")
    return status


def _create(folder: Path, prefix: str, mode: int) -> tuple[IO[bytes], Path]:
    """Creates a temporary file and locks it, for as long as it is open."""
    while True:
        path = folder / f"{prefix}{secrets.token_hex(8)}.tmp"
        file = open(  # noqa: SIM115 (the caller closes it)
            path, "x+b", opener=lambda name, flags: os.open(name, flags, mode)
        )
        if not _locked(file, wait=True) or os.fstat(file.fileno()).st_nlink:
            return file, path
        file.close()  # another process removed it as stale, before it was locked


def _locked(file: IO[bytes] | RawIOBase, *, wait: bool) -> bool:
    """Locks an open file; returns False where it is locked, or where nothing has locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def _remove_stale(folder: Path, prefix: str) -> None:
    """Removes temporary files that nobody has locked: the kernel unlocks when a process dies.

    Unlike a process number in the name, a lock also holds on other machines of a shared folder,
    and no new process can have it by chance.
    """
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    for path in folder.glob(f"{prefix}*.tmp"):
        with (
            contextlib.suppress(OSError),  # another user's, or just removed
            open(path, "r+b", buffering=0, opener=lambda name, _: os.open(name, flags)) as file,
        ):
            if _locked(file, wait=False):
                path.unlink()


def _copy_owner_and_mode(file: IO[bytes], path: Path, replaced: os.stat_result) -> None:
    mode = stat.S_IMODE(replaced.st_mode) & PERMISSIONS
    if not hasattr(os, "fchown"):  # Windows
        os.chmod(path, mode)
        return
    created = os.fstat(file.fileno())
    if created.st_uid != replaced.st_uid:
        with contextlib.suppress(PermissionError):
            os.fchown(file.fileno(), replaced.st_uid, -1)
    if created.st_gid != replaced.st_gid:
        try:
            os.fchown(file.fileno(), -1, replaced.st_gid)
        except PermissionError:
            # Else another group could do what only the old one could.
            mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    os.fchmod(file.fileno(), mode)


def _flush_folder(folder: Path) -> None:
    """Flushes a rename to disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows, or a folder that can be written and not read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
