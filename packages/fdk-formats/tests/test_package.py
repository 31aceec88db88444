"""The public API of the package."""

from pathlib import Path

import fdk_formats


def test_every_public_name_is_there():
    assert fdk_formats.__all__ == sorted(set(fdk_formats.__all__))
    missing = [name for name in fdk_formats.__all__ if not hasattr(fdk_formats, name)]
    assert missing == []


def test_public_names_are_documented():
    public = [getattr(fdk_formats, name) for name in fdk_formats.__all__]
    assert [item for item in public if not item.__doc__] == []


def test_types_are_shipped():
    assert (Path(fdk_formats.__file__).parent / "py.typed").is_file()
