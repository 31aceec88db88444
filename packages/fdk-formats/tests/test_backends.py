import sys

import pytest
import torch

from fdk_formats import Format, NoBackendError, Problem, all_backends, register, select
from fdk_formats import backends as backends_module
from fdk_formats.backends import (
    Backend,
    all_reasons,
    no_activations,
    unsupported_reasons,
    wrong_dtype,
)
from fdk_formats.reference import ReferenceBackend, ReferenceLayout


class Wide:
    """Supports multiples of 128 as k; its priority grows with k."""

    def __init__(self, name, priority):
        self.name, self.level = name, priority

    def unsupported(self, problem):
        return f"needs k % 128 == 0, got k={problem.k}" if problem.k % 128 else None

    def priority(self, problem):
        return self.level

    def pack(self, q, *, dtype):
        return ReferenceLayout(q)


def problem(k):
    return Problem(Format.parse("nf4-g64"), 8, k, torch.bfloat16, torch.device("cpu"))


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Leaves only the reference registered, and undoes registrations afterwards."""
    monkeypatch.setattr(backends_module, "_registry", {"reference": ReferenceBackend()})
    monkeypatch.setattr(backends_module, "_by_name_only", {"reference"})
    monkeypatch.setattr(backends_module, "KNOWN_PACKAGES", ())
    monkeypatch.setattr(backends_module, "ENTRY_POINT_GROUP", "fdk_formats.no_such_group")
    backends_module._discover.cache_clear()
    yield
    backends_module._discover.cache_clear()


def test_auto_picks_the_highest_priority():
    register(Wide("slow", 1))
    register(Wide("fast", 2))
    assert select(problem(128)).name == "fast"
    assert select(problem(128), "slow").name == "slow"
    assert isinstance(select(problem(128)), Backend)


def test_reference_is_chosen_by_name_only():
    assert select(problem(192), "reference").name == "reference"
    with pytest.raises(NoBackendError, match='reference: chosen by name only: backend="reference"'):
        select(problem(192))


def test_errors_have_every_reason():
    register(Wide("a", 1))
    register(Wide("b", 2))
    with pytest.raises(NoBackendError) as caught:
        select(problem(192))
    message = str(caught.value)
    assert "no backend supports nf4-g64 [n=8, k=192] with bfloat16 activations on cpu" in message
    assert "\n  a: needs k % 128 == 0, got k=192" in message
    assert "\n  b: needs k % 128 == 0, got k=192" in message
    assert unsupported_reasons(problem(128)) == {
        "reference": 'chosen by name only: backend="reference"',
        "a": None,
        "b": None,
    }


def test_errors_name_the_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(backends_module, "KNOWN_PACKAGES", ("fdk_cpu",))
    monkeypatch.setitem(sys.modules, "fdk_cpu", None)
    with pytest.raises(NoBackendError, match=r"fdk-cpu, which .* is not installed: pip install f"):
        select(problem(128))


def test_a_named_backend_says_why_not():
    register(Wide("a", 1))
    with pytest.raises(NoBackendError, match=r"backend a does not support .*: needs k % 128 == 0"):
        select(problem(192), "a")
    with pytest.raises(ValueError, match="wanted auto or one of reference, a, got 'c'"):
        select(problem(128), "c")
    whole = Problem(Format.parse("nf4-g64"), 8, 64, torch.int8, torch.device("cpu"))
    with pytest.raises(NoBackendError, match=r"got torch\.int8"):
        select(whole, "reference")


class Narrow(Wide):
    """Has a reason about k, one about the activations and one about their dtype."""

    def unsupported(self, problem):
        wide = super().unsupported(problem)
        float16 = wrong_dtype(problem.dtype, [torch.float16])
        return all_reasons(wide, no_activations(problem), float16)


def test_a_backend_gives_all_its_reasons_at_once():
    register(Narrow("a", 1))
    format = Format.parse("nf4-g64")
    bad = Problem(format, 8, 192, torch.int8, torch.device("cpu"), "int8")
    reasons = (
        "needs k % 128 == 0, got k=192; has no int8 activations; "
        "needs activations of torch.float16, got torch.int8"
    )
    for backend in ("auto", "a"):
        with pytest.raises(NoBackendError) as caught:
            select(bad, backend)
        assert reasons in str(caught.value)
    assert unsupported_reasons(bad)["a"] == reasons
    good = Problem(format, 8, 128, torch.float16, torch.device("cpu"))
    assert select(good).name == "a"


def test_all_reasons():
    assert all_reasons() is None
    assert all_reasons(None, None) is None
    assert all_reasons(None, "a", None, "b") == "a; b"


@pytest.mark.parametrize("asked", [select, unsupported_reasons])
def test_problem_is_checked(asked):
    with pytest.raises(TypeError, match=f"{asked.__name__}: problem must be a Problem, got None"):
        asked(None)


def test_register_replaces_and_moves_between_auto_and_by_name():
    register(Wide("a", 1), by_name_only=True)
    with pytest.raises(NoBackendError):
        select(problem(128))
    again = Wide("a", 1)
    register(again)
    assert select(problem(128)) is again
    assert list(all_backends()) == ["reference", "a"]


def test_register_checks_its_argument():
    message = "register: a backend has name, unsupported, priority and pack, got object"
    with pytest.raises(TypeError, match=message):
        register(object())
    with pytest.raises(ValueError, match="needs a name of its own, got 'auto'"):
        register(Wide("auto", 1))
    assert list(all_backends()) == ["reference"]


def test_packages_are_discovered_and_broken_ones_reported(tmp_path, monkeypatch):
    (tmp_path / "fdk_test_broken.py").write_text("raise OSError('no driver')\n")
    (tmp_path / "fdk_test_works.py").write_text(
        "import fdk_formats.backends as b\n"
        "from fdk_formats.reference import ReferenceBackend\n"
        "class Works(ReferenceBackend):\n    name = 'works'\n"
        "b.register(Works())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    known = ("fdk_test_broken", "fdk_test_works", "fdk_test_absent")
    monkeypatch.setattr(backends_module, "KNOWN_PACKAGES", known)
    assert select(problem(64)).name == "works"
    with pytest.raises(ValueError, match="fdk_test_broken: failed to import: OSError: no driver"):
        select(problem(64), "absent")
    for name in known:
        sys.modules.pop(name, None)
