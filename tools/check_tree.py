"""Rules of the tree that ruff does not know; prints what breaks one, and fails.

    python tools/check_tree.py [root]

Looks at every file that git tracks or would track.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 500
MAX_BYTES = 1 << 20
SOURCE_SUFFIXES = {".py", ".cpp", ".h", ".hpp", ".cu", ".cuh", ".sh"}
GENERATED = re.compile(r"(^|/)(uv\.lock|__pycache__/.*|.*\.(pyc|so|whl|egg-info))$")
LINE_RULES = {
    "names a package index; installers are told where it is by their own settings": re.compile(
        r"https?://[^\s\"']*/(simple|whl)(?:[/\"'\s]|$)|index[-_]url\W{1,4}https?:"
    ),
    "holds an absolute path of one machine": re.compile(
        r"(?<![\w./-])/(?:home|Users|root|work|workspace|farm)/|\b[A-Z]:\\+Users\\"
    ),
    "holds a merge conflict": re.compile(r"^(?:<{7}|>{7})(?: |$)"),
}


def problems(root: Path) -> list[str]:
    """What breaks a rule in the git checkout at ``root``, as lines of ``path:line: what``."""
    return [problem for name in tracked(root) for problem in file_problems(root, name)]


def tracked(root: Path) -> list[str]:
    """Files of ``root`` that git tracks, or would with the next ``git add``; sorted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in set(output.split("\0")) if name and (root / name).is_file())


def file_problems(root: Path, name: str) -> Iterator[str]:
    """The problems of one file."""
    content = (root / name).read_bytes()
    if GENERATED.search(name):
        yield f"{name}:1: is generated and must not be tracked"
        return
    if len(content) > MAX_BYTES:
        yield f"{name}:1: holds {len(content)} bytes, at most {MAX_BYTES} may be tracked"
    if b"\0" in content:
        return
    lines = content.decode().splitlines()
    for number, line in enumerate(lines, start=1):
        yield from (f"{name}:{number}: {what}" for what in line_problems(line, root))
    if Path(name).suffix in SOURCE_SUFFIXES and len(lines) > MAX_LINES:
        yield f"{name}:1: has {len(lines)} lines, at most {MAX_LINES}; is it one idea?"
    if name.endswith(".py"):
        tree = ast.parse(content, filename=name)
        yield from (f"{name}:{number}: {what}" for number, what in spelling_problems(tree))
        if Path(name).name.startswith("test_"):
            yield from (f"{name}:{number}: {what}" for number, what in excuses(tree))


def line_problems(line: str, root: Path) -> Iterator[str]:
    """The rules of ``LINE_RULES`` that a line breaks, or a mention of this very checkout."""
    yield from (what for what, pattern in LINE_RULES.items() if pattern.search(line))
    if str(root.resolve()) in line:
        yield "holds the path of this checkout"


def spelling_problems(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that the source itself gives with `quantiz`; using a foreign name is fine."""
    for node in ast.walk(tree):
        name = given_name(node)
        if name and "quantiz" in name.lower():
            line = getattr(node, "lineno", 1)
            yield line, f"{name} is our own name: spell it {respell(name)}"


def given_name(node: ast.AST) -> str | None:
    """The name that a node gives to something, or None."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name
        case ast.arg():
            return node.arg
        case ast.alias():
            return node.asname
        case ast.Name(ctx=ast.Store()):
            return node.id
        case ast.Attribute(ctx=ast.Store()):
            return node.attr
    return None


def respell(name: str) -> str:
    """The British spelling of a name."""
    return re.sub("(?i)(quanti)z", lambda m: m[1] + ("S" if m[0][-1].isupper() else "s"), name)


def excuses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Ways in which a test cannot fail: xfail, a skip without a reason, `assert True`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    reasoned = {id(call.func) for call in calls if call.args or call.keywords}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "xfail":
            yield node.lineno, "xfail: a test either holds or goes"
        elif isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant):
            yield node.lineno, "asserts a constant"
        elif (
            isinstance(node, ast.Attribute)
            and ast.unparse(node) in ("pytest.skip", "pytest.mark.skip")
            and id(node) not in reasoned
        ):
            yield node.lineno, "skips without saying what is missing"


def main() -> int:
    """Prints the problems of the tree; 1 where there are any."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
    found = problems(root)
    print("\n".join(found) or "check_tree: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
