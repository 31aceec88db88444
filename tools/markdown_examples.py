"""Python blocks of Markdown files as tests, collected by Sybil.

The blocks of a file share one namespace and run in an empty folder. A block marked `output` holds
what the Python block above it prints.
"""

import contextlib
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sybil import Document, Example, Sybil
from sybil.parsers.markdown import CodeBlockParser
from sybil.parsers.markdown.skip import SkipParser

_PRINTED = "__printed__"


def run_python(example: Example) -> None:
    """Run a block and keep what it prints."""
    source = "\n" * (example.line + example.parsed.line_offset) + example.parsed
    code = compile(source, example.path, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, example.namespace)
    example.namespace[_PRINTED] = printed.getvalue()


def compare_output(example: Example) -> None:
    """Compare an `output` block with what the Python block above it printed."""
    expected, printed = str(example.parsed).strip(), example.namespace.pop(_PRINTED, "").strip()
    if printed != expected:
        raise AssertionError(f"the document shows\n{expected}\nbut the block printed\n{printed}")


def enter_empty_folder(namespace: dict[str, Any]) -> None:
    """Give the examples of a file a folder that they may write to.

    A folder ``$FDK_EXAMPLE_MODEL`` holds models by the names that the hub has for them.
    """
    stack = namespace["__folder__"] = contextlib.ExitStack()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    stack.enter_context(contextlib.chdir(folder))
    models = os.environ.get("FDK_EXAMPLE_MODEL")
    namespace["no_model"] = not models
    for path in Path(models).iterdir() if models else ():
        (folder / path.name).symlink_to(path)


def leave_folder(namespace: dict[str, Any]) -> None:
    """Return to the folder that pytest was started in."""
    namespace["__folder__"].close()


collect: Callable[..., Document | None] = Sybil(
    parsers=[
        CodeBlockParser("python", run_python),
        CodeBlockParser("output", compare_output),
        SkipParser(),
    ],
    path=str(Path(__file__).parent.parent),
    patterns=["*.md", "**/*.md"],
    setup=enter_empty_folder,
    teardown=leave_folder,
).pytest()
