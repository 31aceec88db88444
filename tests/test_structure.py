"""The packages as a whole: who imports whom, what importing costs, and what each must carry."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from imports import imports_of
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir())
MODULES = [package.replace("-", "_") for package in PACKAGES]
# What a module may import of ours: at the top, and inside functions only.
MAY_IMPORT = {
    "fdk_formats": (set(), set()),
    "fdk_cuda": ({"fdk_formats"}, set()),
    "fdk_cpu": ({"fdk_formats"}, set()),
    "fdk_bench": ({"fdk_formats"}, {"fdk_cuda", "fdk_cpu"}),
}


def forbidden_imports(module, source):
    """Lines of a source of ``module`` that import one of our packages and may not."""
    always, in_functions = MAY_IMPORT[module]
    found = []
    for name, line, is_lazy in imports_of(ast.parse(source)):
        other = name.split(".")[0]
        allowed = always | {module} | (in_functions if is_lazy else set())
        if other.startswith("fdk_") and other not in allowed:
            found.append((line, name))
    return found


def test_every_package_is_known():
    assert set(MODULES) == set(MAY_IMPORT)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    sources = sorted((ROOT / "packages" / module.replace("_", "-") / "src").rglob("*.py"))
    found = {str(path): forbidden_imports(module, path.read_text()) for path in sources}
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert sources


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("fdk_cuda", "from fdk_formats.packing import pack", []),
        ("fdk_cuda", "import os, fdk_cpu.kernels", [(1, "fdk_cpu.kernels")]),
        ("fdk_cuda", "def f():\n    from fdk_cpu import g", [(2, "fdk_cpu")]),
        ("fdk_formats", "import importlib\nimportlib.import_module('fdk_cpu')", [(2, "fdk_cpu")]),
        ("fdk_formats", "from fdk_formats import Format\nimport fdk_bench", [(2, "fdk_bench")]),
        ("fdk_bench", "def f():\n    import fdk_cuda", []),
        ("fdk_bench", "class A:\n    import fdk_cuda", [(2, "fdk_cuda")]),
        ("fdk_bench", "try:\n    import fdk_cpu\nexcept ImportError:\n    pass", [(2, "fdk_cpu")]),
    ],
)
def test_forbidden_imports_sees(module, source, found):
    assert forbidden_imports(module, source) == found


# Runs in a process of its own: what importing must not do raises there, or is seen in its output.
IMPORT_ALL = """
import importlib, sys
import torch

def refuse(*args, **kwargs):
    raise AssertionError("importing asked for a GPU")

for name in ("is_available", "device_count", "get_device_properties", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)

def audit(event, args):
    if event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "socket.connect"):
        raise AssertionError(f"importing caused {event} {args}")

before = set(sys.modules)
sys.addaudithook(audit)
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
slow = {"torch._dynamo", "torch._inductor", "transformers", "matplotlib"}
assert not slow & (set(sys.modules) - before), slow & (set(sys.modules) - before)
"""


def test_importing_is_free():
    done = python("-W", "error", "-c", IMPORT_ALL, *MODULES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Seconds of CPU time, which hardly depend on what else runs.
IMPORT_SECONDS = """
import importlib, importlib.util, sys, time
import torch
if importlib.util.find_spec("triton"):
    import triton
for name in sys.argv[1:]:
    start = time.process_time()
    importlib.import_module(name)
    print(time.process_time() - start)
"""


def test_importing_takes_well_under_a_second_beyond_torch_and_triton():
    # 0.2 s for all of them on an idle machine.
    done = python("-c", IMPORT_SECONDS, *MODULES)
    assert done.returncode == 0, done.stderr
    seconds = dict(zip(MODULES, map(float, done.stdout.split()), strict=True))
    assert max(seconds.values()) < 0.7, seconds


def python(*args):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)


def project(package):
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("package", PACKAGES)
def test_version_of_the_module_is_that_of_the_wheel(package):
    module = package.replace("-", "_")
    source = (ROOT / "packages" / package / "src" / module / "__init__.py").read_text()
    assert f'__version__ = "{project(package)["version"]}"' in source


@pytest.mark.parametrize("package", PACKAGES)
def test_changelog_has_the_version(package):
    changelog = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    assert f"\n## {project(package)['version']} " in changelog


@pytest.mark.parametrize("package", PACKAGES)
def test_licence_is_the_projects(package):
    licence = (ROOT / "packages" / package / "LICENSE").read_text()
    assert licence == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_ranges_between_our_packages_hold(package):
    extras = project(package).get("optional-dependencies", {}).values()
    lines = [*project(package)["dependencies"], *(line for extra in extras for line in extra)]
    ours = [r for r in map(Requirement, lines) if r.name in PACKAGES]
    broken = [r for r in ours if not r.specifier.contains(project(r.name)["version"])]
    assert broken == []
    assert ours or package == "fdk-formats"
