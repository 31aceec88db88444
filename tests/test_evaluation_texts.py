"""Prose from packaged books, articles and epigrams."""

import bz2
import html
import subprocess

from evaluation_texts import (
    SHARE,
    SHORTEST,
    articles,
    pages_of,
    paragraphs,
    share_of,
    unpacked,
)

LONG = "A sentence of some length, which says little. " * 6


def test_paragraphs():
    page = f"""<head><p>{LONG}</p></head><p class="x">A <b>bold</b> &amp; {LONG}\n here .</p>
    <p>short</p><pre><p>{LONG} code</p></pre><div class="para">{LONG}end</div>"""
    first, second = paragraphs(page)
    assert first.startswith("A bold & A sentence")
    assert first.endswith("little. here.")
    assert second.endswith("little. end")
    assert len(LONG) >= SHORTEST


def test_pages_of_a_package(tmp_path):
    pages = tmp_path / "book" / "usr" / "share"
    pages.mkdir(parents=True)
    for number in range(9):
        (pages / f"{number}.html").write_text(f"<p>{number} {LONG}</p>")
    (tmp_path / "book" / "DEBIAN").mkdir()
    fields = "Package: book\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: d\n"
    (tmp_path / "book" / "DEBIAN" / "control").write_text(fields)
    package = tmp_path / "book_1_all.deb"
    subprocess.run(["dpkg-deb", "-b", tmp_path / "book", package], check=True, capture_output=True)
    folder = unpacked(package.name, tmp_path)
    found = [page[0][0] for page in pages_of(folder, "usr/share/*.html")]
    assert sorted(found) == list("012345678")
    assert found != sorted(found)  # whole pages, in another order
    assert found == [page[0][0] for page in pages_of(folder, "usr/share/*.html")]


def test_articles_lose_their_markup(tmp_path):
    text = (
        f"{{{{box|{{{{inner}}}}}}}}\n'''Bold''' [[page|link]] {LONG}\n* {LONG}\n{LONG}<ref>x</ref>"
    )
    escaped = html.escape(text)
    dump = tmp_path / "dump.bz2"
    dump.write_bytes(bz2.compress(f"<page><text bytes='1'>{escaped}</text></page>".encode()))
    (prose,) = articles(dump)
    assert prose == [f"Bold link {LONG}".strip(), LONG.strip()]


def test_shares_leave_out_the_subject_of_the_held_out_text():
    documents = [[f"{number} {LONG}", "Anarchy in the UK"] for number in range(3000)]
    found = list(share_of(iter(documents)))
    assert all(len(document) == 1 for document in found)
    length = sum(len(document[0]) for document in found)
    assert SHARE - 300 <= length <= SHARE
    assert found == list(share_of(iter(documents)))
