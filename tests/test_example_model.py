"""The GGUF file of an example model, found whole or put together."""

import pytest
from example_model import gguf_file


def test_whole_file(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "m.Q4_1.gguf").write_bytes(b"a")
    assert gguf_file(tmp_path, tmp_path) == tmp_path / "package" / "m.Q4_1.gguf"


def test_parts_of_several_packages_are_joined_in_order(tmp_path):
    for package, number in (("b", 0), ("a", 1), ("c", 2)):  # packages sort otherwise
        (tmp_path / package).mkdir()
        (tmp_path / package / f"m.gguf.part0{number}").write_bytes(bytes([number]))
    (tmp_path / "joined").mkdir()
    found = gguf_file(tmp_path, tmp_path / "joined")
    assert found.name == "m.gguf"
    assert found.read_bytes() == b"\0\1\2"


def test_none_or_several_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="found 0"):
        gguf_file(tmp_path, tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match="found 2"):
        gguf_file(tmp_path, tmp_path)
