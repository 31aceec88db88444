"""tools/check_wheels.py on wheels and pins made for it."""

import zipfile

import pytest
from check_wheels import content_problems, foreign_files, main, write_pins

WHOLE = {
    "fdk_a/__init__.py": "",
    "fdk_a/b/c.py": "",
    "fdk_a/b/data.json": "",
    "fdk_a/py.typed": "",
    "fdk_a-1.dist-info/licenses/LICENSE": "",
}


def write_wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def root(tmp_path):
    source = tmp_path / "packages" / "fdk-a" / "src" / "fdk_a"
    (source / "b").mkdir(parents=True)
    (source / "__init__.py").touch()
    (source / "b" / "c.py").touch()
    (source / "b" / "data.json").touch()
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "c.pyc").touch()
    return tmp_path


@pytest.mark.parametrize("missing", ["fdk_a/b/c.py", "fdk_a/b/data.json", "fdk_a/py.typed"])
def test_content_problems_sees_what_is_missing(tmp_path, root, missing):
    files = {name: content for name, content in WHOLE.items() if name != missing}
    wheel = write_wheel(tmp_path / "a.whl", files)
    assert list(content_problems(wheel, "fdk_a", root)) == [f"lacks {missing}"]


def test_content_problems_sees_a_missing_licence(tmp_path, root):
    files = {name: content for name, content in WHOLE.items() if "LICENSE" not in name}
    wheel = write_wheel(tmp_path / "a.whl", files)
    assert list(content_problems(wheel, "fdk_a", root)) == ["lacks its LICENSE"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tests/test_a.py", "", "holds tests/test_a.py, outside fdk_a"),
        ("fdk_a/path.py", "ROOT", "holds the path of the checkout in fdk_a/path.py"),
        ("fdk_a/b/c.py", "pass", "holds another fdk_a/b/c.py"),
    ],
)
def test_content_problems_sees_what_is_too_much(tmp_path, root, name, content, problem):
    files = {**WHOLE, name: content.replace("ROOT", str(root))}
    wheel = write_wheel(tmp_path / "a.whl", files)
    assert list(content_problems(wheel, "fdk_a", root)) == [problem]


def test_content_problems_of_a_whole_wheel(tmp_path, root):
    assert list(content_problems(write_wheel(tmp_path / "a.whl", WHOLE), "fdk_a", root)) == []


def test_foreign_files(tmp_path):
    dist, site = tmp_path / "dist", tmp_path / "site"
    for path in (dist, site / "fdk_a"):
        path.mkdir(parents=True)
    files = {"fdk_a/same.py": "1", "fdk_a/other.py": "2", "fdk_a/missing.py": "3"}
    write_wheel(dist / "fdk_a-1-py3-none-any.whl", {**files, "fdk_a-1.dist-info/RECORD": "4"})
    write_wheel(dist / "fdk_b-1-py3-none-any.whl", {"fdk_b/not_installed.py": ""})
    (site / "fdk_a" / "same.py").write_text("1")
    (site / "fdk_a" / "other.py").write_text("changed")
    assert foreign_files(dist, site) == ["fdk_a/other.py", "fdk_a/missing.py"]


def test_write_pins(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.uv]\n"
        'constraint-dependencies = ["torch==2.13.0", "numpy==2.4.6"]\n'
        'build-constraint-dependencies = ["setuptools==84.2.1"]\n'
    )
    pins = write_pins(tmp_path / "pyproject.toml", tmp_path)
    assert pins.constraints.read_text() == "torch==2.13.0\nnumpy==2.4.6\n"
    assert pins.build_constraints.read_text() == "setuptools==84.2.1\n"


def test_a_package_that_is_none(monkeypatch, capsys):
    """It is said before anything is built."""
    monkeypatch.setattr("sys.argv", ["check_wheels.py", "fdk-cpu", "fdk-gpu"])
    monkeypatch.setattr("check_wheels.build", lambda pins: pytest.fail("built"))
    assert main() == 2
    printed = capsys.readouterr().out
    assert printed.startswith("check_wheels: no package fdk-gpu; there are fdk-bench, fdk-cpu, ")
