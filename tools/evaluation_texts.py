"""Writes calibration.txt and held_out.txt for `fdk-bench accuracy`: `evaluation_texts.py OUT`.

Two books that Debian packages, both free (GPL-2): the Debian Administrator's Handbook, technical
prose, to calibrate on, and An Anarchist FAQ, essays, to measure on. The packages are pinned, so
that everyone measures the same words. They come by `apt-get download`; elsewhere, put the two
.deb files of any mirror into OUT first.
"""

import hashlib
import html
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CALIBRATION = (
    "debian-handbook_11.20220922_all.deb",
    "usr/share/doc/debian-handbook/html/en-US/*.html",
)
HELD_OUT = ("anarchism_15.3-3_all.deb", "usr/share/doc/anarchism/html/sec*.html")
PARAGRAPH = re.compile(r'(?is)<(?:p|div class="para")[^>]*>(.*?)</(?:p|div)>')
NOT_PROSE = re.compile(r"(?is)<(script|style|pre|head|table)\b.*?</\1>")
SHORTEST = 200  # characters: shorter paragraphs are captions, menus and headings


def main(folder: Path) -> None:
    """Write both texts, and print what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (package, pattern) in {"calibration": CALIBRATION, "held_out": HELD_OUT}.items():
        text = "\n\n".join(prose_of(fetched(package, folder), pattern)) + "\n"
        path = folder / f"{name}.txt"
        path.write_text(text, encoding="utf-8")
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        print(f"{path}: {len(text.split())} words of {package}, sha256 {digest}")


def fetched(package: str, folder: Path) -> Path:
    """Return the package's file in ``folder``, downloaded where it is not there."""
    path = folder / package
    if not path.is_file():
        name, version, _ = package.split("_")
        subprocess.run(["apt-get", "download", "-q", f"{name}={version}"], cwd=folder, check=True)
    return path


def prose_of(package: Path, pattern: str) -> Iterator[str]:
    """Yield the paragraphs of a package's pages, whole pages in a fixed random order."""
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run(["dpkg-deb", "-x", str(package), unpacked], check=True)
        pages = sorted(Path(unpacked).glob(pattern))
        # A book's first chapters have one subject; a few thousand tokens should have many.
        random.Random(0).shuffle(pages)
        for page in pages:
            yield from paragraphs(page.read_text(encoding="utf-8", errors="replace"))


def paragraphs(page: str) -> Iterator[str]:
    """Yield the paragraphs of an HTML page that are prose, each on one line."""
    for paragraph in PARAGRAPH.findall(NOT_PROSE.sub(" ", page)):
        text = " ".join(html.unescape(re.sub(r"(?s)<[^>]+>", " ", paragraph)).split())
        text = re.sub(r" ([.,;:)])", r"\1", text)
        if len(text) >= SHORTEST:
            yield text


if __name__ == "__main__":
    main(Path(sys.argv[1]))
