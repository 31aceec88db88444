"""Backends: each owns one packed layout and its kernels; chosen once, when a weight is packed."""

import importlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fdk_formats.format import Format
from fdk_formats.tensor import QuantisedTensor

ENTRY_POINT_GROUP = "fdk_formats.backends"
# Found without package metadata too: importing one of these registers its backends.
KNOWN_PACKAGES = ("fdk_cuda", "fdk_cpu")
# How x meets a weight: as it is, or rounded to 8 bits as ``fdk_formats.int8`` defines.
ACTIVATIONS = ("float", "int8")


@dataclass(frozen=True)
class Problem:
    """What a backend is asked to take: a weight ``[n, k]`` and the activations it will meet.

    Attributes:
        format: the format of the weight.
        n: outputs.
        k: inputs.
        dtype: of the activations x and of y.
        device: where x, y and the weight live.
        activations: ``float``, or ``int8`` for x rounded to 8 bits, see ``fdk_formats.int8``.

    Raises:
        ValueError: for other activations.
    """

    format: Format
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    activations: str = "float"

    def __post_init__(self) -> None:
        check_activations(self.activations)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        rounded = "" if self.activations == "float" else f" rounded to {self.activations}"
        return (
            f"{self.format} [n={self.n}, k={self.k}] with {dtype} activations{rounded} "
            f"on {self.device}"
        )


def check_activations(activations: str) -> None:
    """Raises ValueError for what is not in ``ACTIVATIONS``."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: wanted {' or '.join(ACTIVATIONS)}, got {activations!r}")


class Layout(nn.Module, ABC):
    """A weight in a backend's own arrangement, with the kernels for every m.

    Its tensors are buffers with ``persistent=False``: a file holds only what ``unpack`` returns.

    Attributes:
        casts: whether it takes x of another dtype than its own, as autocast brings it.
    """

    casts = False

    @abstractmethod
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``y = x @ W_hat.T + bias``, for ``x :: [..., k]`` and ``bias :: [n]``."""

    @abstractmethod
    def unpack(self) -> QuantisedTensor:
        """The weight it was packed from, byte for byte."""


@runtime_checkable
class Backend(Protocol):
    """Kernels for some formats on some devices. See docs/backends.md."""

    name: str

    def unsupported(self, problem: Problem) -> str | None:
        """Why this backend cannot take the problem ("needs k % 128 == 0, got k=192"), or None.

        One without kernels for ``problem.activations`` says so: "has no int8 activations".
        """

    def priority(self, problem: Problem) -> int:
        """Among the backends that can take a problem, ``auto`` picks the highest."""

    def pack(self, q: QuantisedTensor, *, dtype: torch.dtype, activations: str = "float") -> Layout:
        """Lays a weight out on its own device, for activations of ``dtype``.

        ``activations`` is passed only where it is not ``float``.
        """


class NoBackendError(RuntimeError):
    """No backend takes a problem; the message holds every backend's reason."""


_registry: dict[str, Backend] = {}
_by_name_only: set[str] = set()


def register(backend: Backend, *, by_name_only: bool = False) -> None:
    """Makes a backend known under its name; a later one of the same name replaces it.

    Args:
        by_name_only: ``auto`` never picks it.

    Raises:
        TypeError: for what is no ``Backend``.
        ValueError: for the name ``auto``, which asks ``select`` to choose.
    """
    if not isinstance(backend, Backend):
        raise TypeError(
            "register: a backend has name, unsupported, priority and pack, "
            f"got {type(backend).__name__}"
        )
    if backend.name == "auto":
        raise ValueError("register: a backend needs a name of its own, got 'auto'")
    _registry[backend.name] = backend
    (_by_name_only.add if by_name_only else _by_name_only.discard)(backend.name)


def all_backends() -> dict[str, Backend]:
    """Every backend by name, those of installed packages included."""
    _discover()
    return dict(_registry)


def select(problem: Problem, backend: str = "auto") -> Backend:
    """The backend for a problem: the one named, or with ``auto`` the best that takes it.

    Raises:
        NoBackendError: where none takes it, with the reason of each.
        ValueError: for a name that no backend has.
        TypeError: for what is no ``Problem``.
    """
    _check_problem("select", problem)
    known = all_backends()
    if backend != "auto":
        if backend not in known:
            raise ValueError(
                f"backend: wanted auto or one of {', '.join(known)}, got {backend!r}{_failures()}"
            )
        if reason := known[backend].unsupported(problem):
            raise NoBackendError(f"backend {backend} does not take {problem}: {reason}")
        return known[backend]
    reasons = unsupported_reasons(problem)
    taking = [known[name] for name, reason in reasons.items() if reason is None]
    if not taking:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        raise NoBackendError(f"no backend takes {problem}:{lines}{_failures()}")
    return max(taking, key=lambda candidate: candidate.priority(problem))


def unsupported_reasons(problem: Problem) -> dict[str, str | None]:
    """Per backend, why ``auto`` would not pick it for a problem, or None where it might.

    Raises:
        TypeError: for what is no ``Problem``.
    """
    _check_problem("unsupported_reasons", problem)
    return {
        name: f'chosen by name only: backend="{name}"'
        if name in _by_name_only
        else backend.unsupported(problem)
        for name, backend in all_backends().items()
    }


def _check_problem(caller: str, problem: Problem) -> None:
    if not isinstance(problem, Problem):
        raise TypeError(f"{caller}: problem must be a Problem, got {type(problem).__name__}")


@cache
def _discover() -> dict[str, str]:
    """Imports the packages that bring backends; returns what failed, by module."""
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    modules = {entry.value for entry in entry_points}
    modules |= {name for name in KNOWN_PACKAGES if importlib.util.find_spec(name)}
    failures = {}
    for module in sorted(modules):
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken package must not take the others with it
            failures[module] = f"{type(error).__name__}: {error}"
    return failures


def _failures() -> str:
    return "".join(f"\n  {module}: failed to import: {e}" for module, e in _discover().items())
