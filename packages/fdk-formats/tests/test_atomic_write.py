"""Replaced files: modes, owners, what is no file, long names, killed writers, durability."""

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest
import torch

from fdk_formats import load, save
from fdk_formats.atomic_write import atomic_write

ONES, ZEROS = {"x": torch.ones(2)}, {"x": torch.zeros(2)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def temporaries(folder):
    return sorted(folder.glob(".fdk-*.tmp"))


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077], ids=oct)
def test_a_private_file_is_private_from_the_first_byte(path, umask):
    save(path, ONES)
    path.chmod(0o640)
    before = os.umask(umask)
    try:
        with atomic_write(path) as file:
            (temporary,) = temporaries(path.parent)
            assert mode_of(temporary) == 0o600
            file.write(b"new")
        assert mode_of(path) == 0o640
        with atomic_write(path.parent / "new"):
            (temporary,) = temporaries(path.parent)
            assert mode_of(temporary) == 0o666 & ~umask
        assert mode_of(path.parent / "new") == 0o666 & ~umask
    finally:
        os.umask(before)
    assert path.read_bytes() == b"new"


def test_bits_beyond_permissions_are_dropped(path):
    save(path, ONES)
    path.chmod(0o4755)
    save(path, ZEROS)
    assert mode_of(path) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_owner_and_group_are_kept(path):
    save(path, ONES)
    path.chmod(0o640)
    os.chown(path, 1234, 2345)
    save(path, ZEROS)
    status = path.stat()
    assert (status.st_uid, status.st_gid, mode_of(path)) == (1234, 2345, 0o640)


@pytest.mark.parametrize(("mode", "kept"), [(0o640, 0o600), (0o664, 0o644), (0o660, 0o600)])
def test_a_group_that_cannot_be_kept_gains_nothing(path, monkeypatch, mode, kept):
    save(path, ONES)
    path.chmod(mode)
    real = os.fstat

    def of_another_group(descriptor):
        status = real(descriptor)
        return os.stat_result([*status[:5], status.st_gid + 1, *status[6:]])

    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", of_another_group)
        patch.setattr(os, "fchown", refused)
        save(path, ZEROS)
    assert mode_of(path) == kept
    assert load(path)["x"].tolist() == [0, 0]


def test_what_is_no_file_is_refused_and_kept(tmp_path):
    fifo, folder, loop = tmp_path / "fifo", tmp_path / "folder", tmp_path / "loop"
    os.mkfifo(fifo)
    folder.mkdir()
    loop.symlink_to(loop)
    (tmp_path / "link").symlink_to(fifo)
    for name, kind in [("fifo", "FIFO"), ("link", "FIFO"), ("loop", "symbolic link")]:
        with pytest.raises(ValueError, match=f"wanted a regular file to replace .*, got a {kind}"):
            save(tmp_path / name, ONES)
    with pytest.raises(ValueError, match=r"/dev/null: wanted a regular file .*, got a device"):
        save("/dev/null", ONES)
    with pytest.raises(IsADirectoryError, match="wanted a file to write, got a folder"):
        save(folder, ONES)
    assert stat.S_ISFIFO(fifo.lstat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder", "link", "loop"]


def test_a_link_to_nothing_makes_the_file_it_names(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    save(tmp_path / "link", ONES)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").is_file()


@pytest.mark.parametrize("letter", ["x", "\u00e9"])
def test_names_as_long_as_names_can_be(tmp_path, letter):
    path = tmp_path / (letter * (255 // len(letter.encode())))
    for tensors in (ONES, ZEROS):
        save(path, tensors)
    assert load(path)["x"].tolist() == [0, 0]
    assert os.listdir(tmp_path) == [path.name]


WRITE_HALF = """
import sys
from pathlib import Path
from fdk_formats.atomic_write import atomic_write

with atomic_write(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def half_written(path):
    """Starts a process that is in the middle of a save."""
    command = [sys.executable, "-c", WRITE_HALF, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    return process


def test_only_temporaries_of_the_dead_are_removed(path):
    save(path, ONES)
    killed, alive = half_written(path), half_written(path)
    elsewhere = half_written(path.parent / "other")
    try:
        for process in (killed, elsewhere):
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert len(temporaries(path.parent)) == 3
        save(path, ZEROS)
        assert len(temporaries(path.parent)) == 2  # of the living, and of another target
        alive.communicate()
        assert alive.returncode == 0
    finally:
        for process in (killed, alive, elsewhere):
            process.kill()
            process.communicate()
    assert path.read_bytes() == b"half"
    save(path.parent / "other", ONES)
    assert temporaries(path.parent) == []


def test_a_planted_link_is_not_followed(path):
    save(path, ONES)
    with atomic_write(path):
        (temporary,) = temporaries(path.parent)
    kept = path.parent / "kept"
    kept.write_bytes(b"kept")
    temporary.symlink_to(kept)
    save(path, ZEROS)
    assert kept.read_bytes() == b"kept"


def test_many_writers_of_one_target(path):
    def write(value):
        for _ in range(20):
            save(path, {"x": torch.full((1000,), value)})

    threads = [threading.Thread(target=write, args=(float(i),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(load(path)["x"].unique()) == 1
    assert os.listdir(path.parent) == [path.name]


def test_file_then_folder_are_flushed(path, monkeypatch):
    flushed, real = [], os.fsync

    def fsync(descriptor):
        mode = os.fstat(descriptor).st_mode
        flushed.append("folder" if stat.S_ISDIR(mode) else "file")
        assert path.exists() == (flushed[-1] == "folder")  # renamed in between
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(path, ONES)
    assert flushed == ["file", "folder"]


def test_file_systems_without_locks_and_folder_flushes(path, monkeypatch):
    import errno
    import fcntl

    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    def flock(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(fcntl, "flock", flock)
    for tensors in (ONES, ZEROS):
        save(path, tensors)
    assert load(path)["x"].tolist() == [0, 0]
