"""The cache on disk: whose files are used, and that nothing planted is followed or waited for."""

import os
import stat
import warnings
from pathlib import Path

import pytest

from fdk_cuda.nvrtc import cache, cache_directory, cache_files, private_directory, read_private
from fdk_cuda.nvrtc.compiler import Compiled, Program

PROGRAM = Program("test.cu", "source")
ME = os.geteuid()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, str(tmp_path / "cache"))
    cache_files._warn.cache_clear()
    cache_files._is_own_group.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """Replaces NVRTC by a counter, so that the cache is tested without it."""
    made = []

    def compile_program(program, arch):
        made.append(arch)
        return Compiled(f"cubin of {arch}".encode(), "")

    monkeypatch.setattr(cache, "compile_program", compile_program)
    monkeypatch.setattr(cache, "known_version", lambda: (13, 0))
    return made


def cubin():
    return cache.cached_cubin(PROGRAM, "sm_90a")


def uses_the_cache(compilations):
    """Tells if a second call compiles nothing; any warning fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubin() == b"cubin of sm_90a"
    before = len(compilations)
    cubin()
    return len(compilations) == before


def refuses_the_cache(compilations, match):
    """Checks that a call compiles, warns once and gives the right code."""
    before = len(compilations)
    with pytest.warns(RuntimeWarning, match=match):
        assert cubin() == b"cubin of sm_90a"
    assert len(compilations) == before + 1


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077], ids=oct)
def test_what_is_created_is_used(compilations, folder, monkeypatch, umask):
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, str(folder / "a" / "b"))
    before = os.umask(umask)
    try:
        assert uses_the_cache(compilations)
    finally:
        os.umask(before)
    (file,) = (folder / "a" / "b").iterdir()
    for path in (folder, folder / "a", folder / "a" / "b", file):
        assert not path.stat().st_mode & 0o022


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775, 0o1777], ids=oct)
def test_a_folder_that_others_can_write(compilations, folder, mode, monkeypatch):
    monkeypatch.setattr(cache_files, "_is_own_group", lambda gid: False)
    assert uses_the_cache(compilations)
    (file,) = folder.iterdir()
    file.write_bytes(b"planted")
    folder.chmod(mode)
    refuses_the_cache(compilations, rf"cache: it can be written by others \(mode {mode:04o}; chmod")
    assert file.read_bytes() == b"planted"  # nor is it written
    folder.chmod(0o755)
    assert uses_the_cache(compilations)


def test_a_parent_that_others_can_write(compilations, folder):
    assert uses_the_cache(compilations)
    folder.parent.chmod(0o777)
    refuses_the_cache(compilations, r"it is in .*, which can be written by others")
    folder.parent.chmod(0o1777)  # as /tmp: others cannot rename the folder
    assert uses_the_cache(compilations)


@pytest.mark.parametrize("mode", [0o666, 0o646, 0o664], ids=oct)
def test_a_file_that_others_can_write(compilations, folder, mode, monkeypatch):
    monkeypatch.setattr(cache_files, "_is_own_group", lambda gid: False)
    assert uses_the_cache(compilations)
    (file,) = folder.iterdir()
    file.chmod(mode)
    refuses_the_cache(compilations, rf"cubin: it can be written by others \(mode {mode:04o}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o644  # replaced
    assert uses_the_cache(compilations)


def test_a_group_of_one_may_write(compilations, folder, monkeypatch):
    import grp
    import pwd

    assert uses_the_cache(compilations)
    folder.chmod(0o775)
    user = pwd.getpwuid(ME).pw_name
    for name, members, used in [
        (user, [], True),
        (user, [user], True),
        (user, ["eve"], False),
        ("staff", [], False),
    ]:
        group = grp.struct_group((name, "x", 1, members))
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=group: group)
        cache_files._is_own_group.cache_clear()
        cache_files._warn.cache_clear()
        if used:
            assert uses_the_cache(compilations)
        else:
            refuses_the_cache(compilations, "can be written by others")


@pytest.mark.skipif(ME != 0, reason="only root may give a file away")
@pytest.mark.parametrize("which", ["folder", "file", "parent"])
def test_another_owner(compilations, folder, which):
    assert uses_the_cache(compilations)
    (file,) = folder.iterdir()
    os.chown({"folder": folder, "file": file, "parent": folder.parent}[which], 1234, -1)
    refuses_the_cache(compilations, "belongs to user 1234, not to 0 or root")


@pytest.mark.skipif(ME == 0, reason="root is trusted by everyone")
def test_another_user_cannot_use_it(compilations, folder, monkeypatch):
    assert uses_the_cache(compilations)
    monkeypatch.setattr(os, "geteuid", lambda: ME + 1)
    refuses_the_cache(compilations, f"belongs to user {ME}, not to {ME + 1} or root")


def test_root_is_trusted(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert cache_files._distrust(os.stat("/usr/bin")) is None or os.stat("/usr/bin").st_uid != 0


def plant_link(path):
    target = path.parent.parent / "target"
    path.rename(target)
    path.symlink_to(target)


def plant_fifo(path):
    path.unlink()
    os.mkfifo(path)


def plant_folder(path):
    path.unlink()
    path.mkdir()


def plant_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (plant_link, "is a symbolic link"),
        (plant_device, "is a symbolic link"),
        (plant_fifo, "is no regular file"),
        (plant_folder, "is no regular file"),
    ],
)
def test_what_is_no_file_is_neither_followed_nor_waited_for(compilations, folder, plant, reason):
    assert uses_the_cache(compilations)
    (file,) = folder.iterdir()
    plant(file)
    refuses_the_cache(compilations, reason)
    if plant is not plant_folder:
        assert file.is_file()
        assert not file.is_symlink()
        assert uses_the_cache(compilations)


def test_a_file_that_is_too_large(compilations, folder, monkeypatch):
    monkeypatch.setattr(cache, "MAX_CUBIN_BYTES", 10)
    cubin()
    refuses_the_cache(compilations, "is larger than 10 bytes")


def test_the_folder_may_be_a_link_to_a_private_one(compilations, folder):
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")
    assert uses_the_cache(compilations)
    assert private_directory() == folder.parent / "elsewhere"


def test_one_warning_per_reason(compilations, folder):
    assert uses_the_cache(compilations)
    folder.chmod(0o777)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            cubin()
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "Kernels are compiled anew. FDK_CUDA_CACHE names another folder" in message


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("FDK_CUDA_CACHE", "~/fdk", "fdk"),
        ("XDG_CACHE_HOME", "~/xdg", "xdg/fdk-cuda"),
        (None, None, ".cache/fdk-cuda"),
    ],
)
def test_home_is_expanded(monkeypatch, tmp_path, variable, value, expected):
    for name in ("FDK_CUDA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable:
        monkeypatch.setenv(variable, value)
    assert cache_directory() == tmp_path / expected
    with pytest.raises(FileNotFoundError):
        private_directory()
    assert private_directory(create=True) == tmp_path / expected
    assert not Path("~").exists()


def test_a_user_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("FDK_CUDA_CACHE", "~nobody-of-this-name/fdk")
    with pytest.raises(FileNotFoundError, match="no home directory"):
        cache_directory()


def test_a_planted_partial_file_is_not_followed(folder, monkeypatch):
    path = private_directory(create=True) / "file"
    kept = folder.parent / "kept"
    kept.write_bytes(b"kept")
    monkeypatch.setattr(cache_files.secrets, "token_hex", lambda _: "known")
    (folder / "file.known.partial").symlink_to(kept)
    with pytest.raises(FileExistsError):
        cache_files.write_whole(path, b"data")
    assert kept.read_bytes() == b"kept"


def test_a_missing_file_is_no_warning(folder):
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FileNotFoundError):
            read_private(folder / "none", 10)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"loaded": ' + "[" * 100_000,
        '{"loaded": FACTS, "found": [], "version": [Infinity, 1]}',
        '{"loaded": FACTS, "found": [], "version": [1e400, 1]}',
        '{"loaded": FACTS, "found": [], "version": ["13", 1]}',
        '{"loaded": FACTS, "found": [], "version": [true, 1]}',
        '{"loaded": FACTS, "found": [], "version": [13, 1, 2]}',
        '{"loaded": FACTS, "found": [], "version": "13"}',
        '{"loaded": FACTS, "found": [], "version": [-1, 0]}',
        '{"loaded": FACTS, "found": []}',
        '{"loaded": [0, 1, 2], "found": [], "version": [13, 1]}',
        '{"loaded": [], "found": [], "version": [13, 1]}',
        '{"loaded": "x", "found": [], "version": [13, 1]}',
        '{"loaded": ["a\\u0000b", 1, 2], "found": [], "version": [13, 1]}',
        "7",
        "",
    ],
    ids=range(16),
)
def test_stored_versions_of_any_value(folder, monkeypatch, tmp_path, text):
    from fdk_cuda.nvrtc.installed import file_facts

    library = tmp_path / "library"
    library.touch()
    facts = str(file_facts(str(library))).replace("'", '"')
    monkeypatch.setattr(cache, "search_facts", list)
    path = private_directory(create=True) / "x.nvrtc"
    path.write_text(f'{{"loaded": {facts}, "found": [], "version": [13, 1]}}')
    assert cache._stored_version(path) == (13, 1)
    path.write_text(text.replace("FACTS", facts))
    with pytest.raises((OSError, ValueError)):
        cache._stored_version(path)
