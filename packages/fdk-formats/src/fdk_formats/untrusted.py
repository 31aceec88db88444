"""Checks on input that others wrote: JSON, sizes and files, before anything is allocated or run.

Every failure is a ValueError that starts with the place. Python's own ``json.loads`` lets through
what the code behind it cannot hold: nesting that exhausts the stack, a key that occurs twice,
``Infinity``, integers of 400 digits and lone surrogates.
"""

import json
import math
import os
import re
import stat
from typing import Any, BinaryIO

# The largest header that safetensors opens.
MAX_JSON_BYTES = 100_000_000
# Real documents have fewer than 10 levels.
MAX_JSON_DEPTH = 64
INT64_MAX = (1 << 63) - 1
UINT64_MAX = (1 << 64) - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127

# A string (brackets in it are text), or one bracket. The end of a string is optional: a string
# without one would be tried again from each of its quotes.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def parse_json_object(
    data: str | bytes,
    where: str,
    *,
    max_bytes: int = MAX_JSON_BYTES,
    allow_infinity: bool = False,
) -> dict[str, Any]:
    """Parses a JSON object that someone else wrote.

    Args:
        data: the text, or its bytes in UTF-8.
        where: the start of the error message, such as a file and a key.
        max_bytes: size limit. Parsed JSON takes up to 50 times its size in memory.
        allow_infinity: accept ``NaN``, ``Infinity`` and numbers beyond float64. Configurations of
            transformers hold them; whoever reads a number from one checks it.

    Returns:
        The object: dict, list, str, int within 64 bits, finite float, bool and None.

    Raises:
        ValueError: if the text is too large, too deep, not UTF-8, not JSON or not an object; if a
            key occurs twice in an object; for a number that is not finite or an integer beyond 64
            bits; for a string with a lone surrogate.

    Example:
        >>> parse_json_object('{"bits": 4}', "config.json")
        {'bits': 4}
    """
    size = len(data)  # bytes of a text are at least its characters: no copy of a text too large
    if size <= max_bytes and isinstance(data, str):
        try:
            size = len(data.encode())
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: wanted JSON, got text that is not Unicode: {error}"
            ) from error
    if size > max_bytes:
        raise ValueError(f"{where}: wanted JSON of at most {max_bytes} bytes, got {size}")

    def constant(text: str) -> float:
        if not allow_infinity:
            raise ValueError(f"a number must be finite, got {text}")
        return float(text)

    def number(text: str) -> float:
        value = float(text)
        if math.isinf(value) and not allow_infinity:
            raise ValueError(f"a number must fit float64, got {_short(text)}")
        return value

    try:
        text = data if isinstance(data, str) else data.decode()
        _check_depth(text)
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=number,
            parse_constant=constant,
        )
        if "\\u" in text:  # the only way to a lone surrogate
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"{where}: damaged JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be a JSON object, got {_shown(value)}")
    return value


def _check_depth(text: str) -> None:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in "[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise ValueError(
                    f"nested deeper than {MAX_JSON_DEPTH} at character {match.start()}"
                )
        elif match[0] in "]}":
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"the key {_short(twice)!r} occurs twice in an object")
    return found


def _integer(text: str) -> int:
    # 20 digits hold any integer of 64 bits.
    value = int(text) if len(text) <= 21 else None
    if value is None or not -INT64_MAX - 1 <= value <= UINT64_MAX:
        raise ValueError(f"an integer must fit 64 bits, got {_short(text)}")
    return value


def check_int(where: str, value: object, *, low: int = 0, high: int = INT64_MAX) -> int:
    """Returns ``value`` if it is an integer from ``low`` to ``high``; True is not an integer.

    Raises:
        ValueError: if it is not.

    Example:
        >>> check_int("config.json: bits", 4, low=1, high=8)
        4
    """
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{where} must be an integer from {low} to {high}, got {_shown(value)}")
    return value


def check_number(
    where: str, value: object, *, low: float = -FLOAT32_MAX, high: float = FLOAT32_MAX
) -> float:
    """Returns ``value`` as a float if it is from ``low`` to ``high``; the default fits float32.

    Raises:
        ValueError: if it is not such a number, is NaN or a bool.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{where} must be a number from {low} to {high}, got {_shown(value)}")
    return float(value)


def check_shape(
    where: str, value: object, *, ndim: int, low: int = 1, max_numel: int = INT64_MAX
) -> tuple[int, ...]:
    """Returns ``value``, a list or tuple of sizes, if their product is bounded.

    Args:
        where: the start of the error message.
        value: anything.
        ndim: the number of sizes.
        low: the smallest size.
        max_numel: the largest product of the sizes, such as the codes that the file holds.

    Raises:
        ValueError: if it has another length, a size is not an integer of ``low`` or more, or the
            product is larger than ``max_numel``.
    """
    sizes = tuple(value) if isinstance(value, list | tuple) else ()
    if len(sizes) != ndim or any(type(size) is not int or size < low for size in sizes):
        raise ValueError(f"{where} must be {ndim} integers of {low} or more, got {_shown(value)}")
    # A size of 0 makes the product 0; the others are still bounded.
    if math.prod(size or 1 for size in sizes) > max_numel:
        raise ValueError(f"{where} must have at most {max_numel} elements, got {_shown(value)}")
    return sizes


def read_file(
    path: str | os.PathLike[str], *, max_bytes: int = MAX_JSON_BYTES, follow_links: bool = True
) -> bytes:
    """Reads a regular file of bounded size, without waiting for a FIFO or a device.

    Args:
        path: the file.
        max_bytes: size limit.
        follow_links: False refuses a path that is a symbolic link.

    Raises:
        ValueError: if it is a folder, a FIFO, a device or a socket, or too large.
        OSError: if it cannot be opened: it is missing, or a link with ``follow_links=False``.
    """
    with open_regular(path, follow_links=follow_links) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path}: wanted at most {max_bytes} bytes, got more")
    return data


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> BinaryIO:
    """Opens a regular file for reading in binary, see ``read_file``."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)  # else a FIFO waits for its writer
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    if os.path.isdir(path):
        raise ValueError(f"{path}: wanted a file, got a folder")
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path}: wanted a regular file, got {file_kind(mode)}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def file_kind(mode: int) -> str:
    """Returns what a file is, by its ``st_mode``: "a folder", "a FIFO", ..."""
    kinds = {
        stat.S_ISREG: "a regular file",
        stat.S_ISDIR: "a folder",
        stat.S_ISLNK: "a symbolic link",
        stat.S_ISFIFO: "a FIFO",
        stat.S_ISSOCK: "a socket",
    }
    return next((name for test, name in kinds.items() if test(mode)), "a device")


def _shown(value: object) -> str:
    try:
        return _short(repr(value))
    except ValueError:  # Python prints no integer of more than 4300 digits
        return "an integer of thousands of digits"


def _short(text: str) -> str:
    """Returns the start of a text: hostile input does not fill a log."""
    return text if len(text) <= 80 else f"{text[:77]}..."
