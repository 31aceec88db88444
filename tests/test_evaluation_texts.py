"""Prose from the pages of a packaged book."""

import subprocess

from evaluation_texts import SHORTEST, paragraphs, prose_of

LONG = "A sentence of some length, which says little. " * 6


def test_paragraphs():
    page = f"""<head><p>{LONG}</p></head><p class="x">A <b>bold</b> &amp; {LONG}\n here .</p>
    <p>short</p><pre><p>{LONG} code</p></pre><div class="para">{LONG}end</div>"""
    first, second = paragraphs(page)
    assert first.startswith("A bold & A sentence")
    assert first.endswith("little. here.")
    assert second.endswith("little. end")
    assert len(LONG) >= SHORTEST


def test_prose_of_a_package(tmp_path):
    pages = tmp_path / "book" / "usr" / "share"
    pages.mkdir(parents=True)
    for number in range(9):
        (pages / f"{number}.html").write_text(f"<p>{number} {LONG}</p>")
    (tmp_path / "book" / "DEBIAN").mkdir()
    fields = "Package: book\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: d\n"
    (tmp_path / "book" / "DEBIAN" / "control").write_text(fields)
    package = tmp_path / "book_1_all.deb"
    subprocess.run(["dpkg-deb", "-b", tmp_path / "book", package], check=True, capture_output=True)
    found = [text[0] for text in prose_of(package, "usr/share/*.html")]
    assert sorted(found) == list("012345678")
    assert found != sorted(found)  # whole pages, in another order
    assert found == [text[0] for text in prose_of(package, "usr/share/*.html")]
