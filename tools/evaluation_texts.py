"""Writes calibration.txt and held_out.txt for `fdk-bench accuracy`: `evaluation_texts.py OUT`.

To measure on: An Anarchist FAQ, essays (GPL-2). To calibrate on, four kinds of text in equal
shares, because what a calibration text lacks is quantised worse: articles of Wikipedia and news of
Australia's ABC, both from the test data of gensim; the Debian Administrator's Handbook (GPL-2);
and the fortunes of BSD, quotations and jokes. Paragraphs on anarchism are left out.

Packages are pinned, so that everyone measures the same words. Those of Debian come by
`apt-get download`; elsewhere, put the .deb files of any mirror into OUT first. gensim comes by uv.
"""

import bz2
import hashlib
import html
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HANDBOOK = "debian-handbook_11.20220922_all.deb"
FORTUNES = "fortunes_1%3a1.99.1-7.3_all.deb"
HELD_OUT = "anarchism_15.3-3_all.deb"
GENSIM = "gensim==4.4.0"

PARAGRAPH = re.compile(r'(?is)<(?:p|div class="para")[^>]*>(.*?)</(?:p|div)>')
NOT_PROSE = re.compile(r"(?is)<(script|style|pre|head|table)\b.*?</\1>")
SHORTEST = 200  # characters: shorter paragraphs are captions, menus and headings
# Characters of each kind of text, some 60,000 tokens.
SHARE = 280_000
# Paragraphs of one article at most: there are to be many subjects.
PER_ARTICLE = 6

# Markup of Wikipedia, from the inside out: templates nest.
TEMPLATE = re.compile(r"(?s)\{\{[^{}]*\}\}")
MARKUP = (
    (re.compile(r"(?s)<!--.*?-->|<ref[^>/]*/>|<ref.*?</ref>|\{\|.*?\|\}"), ""),
    (re.compile(r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\]]*\]\])*\]\]"), ""),
    (re.compile(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]"), r"\1"),  # [[article|words]]
    (re.compile(r"\[https?:\S* ?([^\]]*)\]"), r"\1"),
    (re.compile(r"'{2,}|<[^>]+>"), ""),
)


def main(folder: Path) -> None:
    """Write both texts, and print what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = list(pages_of(unpacked(HELD_OUT, folder), "usr/share/doc/anarchism/html/sec*.html"))
    gensim = installed(GENSIM, folder) / "gensim/test/test_data"
    handbook = unpacked(HANDBOOK, folder)
    kinds = (
        articles(next(gensim.glob("enwiki-*-shortened.bz2"))),
        ([line] for line in lines(gensim / "lee_background.cor")),
        pages_of(handbook, "usr/share/doc/debian-handbook/html/en-US/*.html"),
        ([each] for each in fortunes(unpacked(FORTUNES, folder) / "usr/share/games/fortunes")),
    )
    documents = [document for kind in kinds for document in share_of(kind)]
    random.Random(0).shuffle(documents)  # every part of the text is broad
    for name, text in {"calibration": documents, "held_out": held_out}.items():
        written = "\n\n".join(paragraph for document in text for paragraph in document) + "\n"
        path = folder / f"{name}.txt"
        path.write_text(written, encoding="utf-8")
        digest = hashlib.sha256(written.encode()).hexdigest()[:16]
        print(f"{path}: {len(written.split())} words, sha256 {digest}")


def unpacked(package: str, folder: Path) -> Path:
    """Return the folder of a Debian package's files, downloaded where it is not there."""
    path, name = folder / package, package.split("_")[0]
    if not path.is_file():
        version = package.split("_")[1].replace("%3a", ":")
        subprocess.run(["apt-get", "download", "-q", f"{name}={version}"], cwd=folder, check=True)
    target = folder / name
    subprocess.run(["dpkg-deb", "-x", str(path), str(target)], check=True)
    return target


def installed(package: str, folder: Path) -> Path:
    """Return a folder into which a Python package is installed without what it needs."""
    target = folder / package.replace("==", "-")
    if not target.is_dir():
        command = ["uv", "pip", "install", "-q", "--no-deps", "--target", str(target), package]
        subprocess.run(command, check=True)
    return target


def share_of(documents: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield documents, in a fixed random order, until they have SHARE characters."""
    ordered = list(documents)
    random.Random(0).shuffle(ordered)
    length = 0
    for document in ordered:
        kept = [text for text in document if "anarch" not in text.lower()]
        length += sum(map(len, kept))
        if length > SHARE:
            return
        if kept:
            yield kept


def pages_of(folder: Path, pattern: str) -> Iterator[list[str]]:
    """Yield the paragraphs of each page, whole pages in a fixed random order."""
    pages = sorted(folder.glob(pattern))
    # A book's first chapters have one subject; a few thousand tokens should have many.
    random.Random(0).shuffle(pages)
    for page in pages:
        yield list(paragraphs(page.read_text(encoding="utf-8", errors="replace")))


def paragraphs(page: str) -> Iterator[str]:
    """Yield the paragraphs of an HTML page that are prose, each on one line."""
    for paragraph in PARAGRAPH.findall(NOT_PROSE.sub(" ", page)):
        text = " ".join(html.unescape(re.sub(r"(?s)<[^>]+>", " ", paragraph)).split())
        text = re.sub(r" ([.,;:)])", r"\1", text)
        if len(text) >= SHORTEST:
            yield text


def articles(dump: Path) -> Iterator[list[str]]:
    """Yield the first paragraphs of each article of a dump of Wikipedia, without markup."""
    with bz2.open(dump, "rt", encoding="utf-8") as file:
        pages = re.findall(r"(?s)<text[^>]*>(.*?)</text>", file.read())
    for page in pages:
        text = html.unescape(html.unescape(page))
        while (shorter := TEMPLATE.sub("", text)) != text:
            text = shorter
        for pattern, by in MARKUP:
            text = pattern.sub(by, text)
        found = [line.strip() for line in text.splitlines()]
        prose = [line for line in found if len(line) >= SHORTEST and line[0] not in "*#|:;={!"]
        yield prose[:PER_ARTICLE]


def lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file that are no headings."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if len(line) >= SHORTEST:
            yield line.strip()


def fortunes(folder: Path) -> Iterator[str]:
    """Yield the longer ones of the epigrams in a folder, each on one line."""
    for file in sorted(file for file in folder.iterdir() if not file.suffix):
        for text in file.read_text(encoding="utf-8", errors="replace").split("\n%\n"):
            if len(text) >= SHORTEST:
                yield " ".join(text.split())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
