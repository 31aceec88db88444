"""tools/check_tree.py finds what it is for, and nothing in a clean tree."""

import subprocess

import pytest
from check_tree import problems

# In pieces, so that this file does not break the rules that it is about.
HOME = "/" + "home/ada/fdk"
INDEX = "https:" + "//pypi.example/" + "simple/"
INDEX_SETTING = "index" + '-url = "https:' + '//pypi.example/packages"'
LARGE = bytes((1 << 20) + 1)
LONG = "\n" * 501


@pytest.fixture
def tree(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)

    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.md", f"Clone to {HOME}.", "a.md:1: holds an absolute path of one machine"),
        ("a.toml", f"\nurl = '{INDEX}'", "a.toml:2: names a package index"),
        ("a.toml", INDEX_SETTING, "a.toml:1: names a package index"),
        ("a.txt", "<" * 7 + " HEAD", "a.txt:1: holds a merge conflict"),
        ("uv.lock", "", "uv.lock:1: is generated"),
        ("a/b.so", b"\0", "a/b.so:1: is generated"),
        pytest.param("a.bin", LARGE, "a.bin:1: holds 1048577 bytes", id="large"),
        pytest.param("a.py", LONG, "a.py:1: has 501 lines", id="long-python"),
        pytest.param("a.cu", LONG, "a.cu:1: has 501 lines", id="long-cuda"),
        ("a.py", "def quantize(): ...", "a.py:1: quantize is our own name: spell it quantise"),
        ("a.py", "class A:\n    Quantizer = 1", "a.py:2: Quantizer is our own name"),
        ("a.py", "def f(do_quantize): ...", "a.py:1: do_quantize is our own name"),
        ("a.py", "import b as quantizer", "a.py:1: quantizer is our own name"),
        ("a.py", "a.DEQUANTIZED = 1", "a.py:1: DEQUANTIZED is our own name: spell it DEQUANTISED"),
        ("test_a.py", "@pytest.mark." + "xfail\ndef f(): ...", "test_a.py:1: xfail"),
        ("test_a.py", "assert " + "True", "test_a.py:1: asserts a constant"),
        ("test_a.py", "pytest." + "skip()", "test_a.py:1: skips without saying"),
        ("test_a.py", "@pytest.mark.skip\ndef f(): ...", "test_a.py:1: skips without saying"),
    ],
)
def test_problems(tree, name, content, found):
    (problem,) = problems(tree(name, content))
    assert problem.startswith(found)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.py", "from bitsandbytes.functional import quantize_4bit\nx = quantize_4bit(bits=4)"),
        pytest.param("a.py", LONG[1:], id="long-enough"),
        pytest.param("a.md", LONG, id="long-prose"),
        ("a.md", "See https://example.org/home/simple.html and docs/work/."),
        ("test_a.py", "pytest.skip('needs a GPU')\nassert f()"),
        ("a.bin", b"\0\xff"),
    ],
)
def test_problems_leaves_alone(tree, name, content):
    assert problems(tree(name, content)) == []


def test_problems_sees_the_path_of_the_checkout(tree):
    root = tree("a.md", "")
    tree("a.md", f"in {root}/a.md")
    assert problems(root) == ["a.md:1: holds the path of this checkout"]


def test_problems_skips_what_git_ignores_unless_it_is_tracked(tree):
    tree(".gitignore", "uv.lock\n")
    root = tree("uv.lock", "")
    assert problems(root) == []
    subprocess.run(["git", "add", "--force", "uv.lock"], cwd=root, check=True)
    assert problems(root) == ["uv.lock:1: is generated and must not be tracked"]
