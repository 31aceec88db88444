"""What the project's Markdown files hold: links, headings, and Python blocks that can be run."""

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

DOCUMENTS = ("*.md", "docs/**/*.md", "packages/*/*.md")


@dataclass(frozen=True)
class Example:
    """A Python block: its text, the line it starts on, and what it must print (None: anything)."""

    code: str
    line: int
    output: str | None


def documents(root: Path) -> list[Path]:
    """Every Markdown file that a reader is given."""
    return sorted(path for pattern in DOCUMENTS for path in root.glob(pattern))


def examples(path: Path) -> list[Example]:
    """The blocks marked `python`. A block marked `output` right below one is what it must print."""
    blocks = [token for token in _tokens(path) if token.nesting >= 0]  # no closing tokens
    found = []
    for token, below in zip_longest(blocks, blocks[1:]):
        if token.type == "fence" and token.info == "python":
            assert token.map is not None  # markdown-it gives every block its lines
            shows = below is not None and below.type == "fence" and below.info == "output"
            output = below.content if shows else None
            found.append(Example(code=token.content, line=token.map[0] + 1, output=output))
    return found


def run_examples(path: Path) -> int:
    """Runs a file's examples from top to bottom in one namespace; returns how many there were.

    Raises:
        AssertionError: where an example printed something other than its `output` block.
        Whatever an example raises, with the line of the Markdown file in its traceback.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    found = examples(path)
    for example in found:
        printed = io.StringIO()
        code = compile("\n" * example.line + example.code, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if example.output is not None and printed.getvalue().strip() != example.output.strip():
            raise AssertionError(
                f"{path}:{example.line}: the document shows\n{example.output}\n"
                f"but the block printed\n{printed.getvalue()}"
            )
    return len(found)


def broken_links(path: Path) -> list[str]:
    """Links to files that are not there, or to headings that their file does not have."""
    return [link for link in _links(path) if not _leads_somewhere(path, link)]


def _leads_somewhere(path: Path, link: str) -> bool:
    if re.match(r"[a-z][a-z+.-]*:", link):  # https:, mailto: other people's
        return True
    file, _, heading = link.partition("#")
    target = path.parent / file if file else path
    if not target.exists():
        return False
    return not heading or target.suffix != ".md" or heading in _anchors(target)


def _links(path: Path) -> Iterator[str]:
    for token in _tokens(path):
        for child in token.children or []:
            link = child.attrs.get("href") or child.attrs.get("src")
            if link is not None:
                yield str(link)


def _anchors(path: Path) -> set[str]:
    """GitHub's anchors: lower case, spaces as hyphens, without other punctuation; -1 for a twin."""
    seen: dict[str, int] = {}
    anchors = set()
    for token, text in pairwise(_tokens(path)):
        if token.type == "heading_open":
            words = [c.content for c in text.children or [] if c.type in ("text", "code_inline")]
            anchor = re.sub(r"[^\w\- ]", "", "".join(words).lower()).replace(" ", "-")
            count = seen[anchor] = seen.get(anchor, -1) + 1
            anchors.add(f"{anchor}-{count}" if count else anchor)
    return anchors


def _tokens(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text())
