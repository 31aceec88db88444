"""Backends: each has one packed layout and its kernels, and is chosen when a weight is packed."""

import importlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fdk_formats.format import Format
from fdk_formats.tensor import QuantisedStack, QuantisedTensor

ENTRY_POINT_GROUP = "fdk_formats.backends"
# Imported without package metadata too. Importing a package registers its backends.
KNOWN_PACKAGES = ("fdk_cuda", "fdk_cpu")
# x as it is, or rounded to 8 bits as ``fdk_formats.int8`` defines.
ACTIVATIONS = ("float", "int8")


@dataclass(frozen=True)
class Problem:
    """A product that a backend may support: a weight ``[n, k]``, or a stack, and its activations.

    Attributes:
        format: format of the weight. No backend supports a rotated one: a layer rotates x, and its
            product is that of the unrotated format, see ``RotatedLayout``.
        n: outputs.
        k: inputs.
        dtype: dtype of x and y.
        device: device of x, y and the weight.
        activations: ``float``, or ``int8`` for x rounded to 8 bits, see ``fdk_formats.int8``.
        experts: number of weights in a stack ``[experts, n, k]``; None for a single weight.

    Raises:
        ValueError: if ``activations`` is something else.
    """

    format: Format
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    activations: str = "float"
    experts: int | None = None

    def __post_init__(self) -> None:
        check_activations(self.activations)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        rounded = "" if self.activations == "float" else f" rounded to {self.activations}"
        experts = "" if self.experts is None else f"experts={self.experts}, "
        return (
            f"{self.format} [{experts}n={self.n}, k={self.k}] with {dtype} activations{rounded} "
            f"on {self.device}"
        )


def all_reasons(*reasons: str | None) -> str | None:
    """Returns the reasons that are not None in one text, or None.

    For ``Backend.unsupported``, so that a caller sees everything to change at once.
    """
    return "; ".join(reason for reason in reasons if reason is not None) or None


def no_activations(problem: Problem) -> str | None:
    """Returns the reason of a backend that has no int8 activations, or None."""
    return None if problem.activations == "float" else f"has no {problem.activations} activations"


def wrong_dtype(dtype: torch.dtype, wanted: Collection[torch.dtype]) -> str | None:
    """Returns the reason of a backend without kernels for a dtype of x, or None."""
    names = " or ".join(map(str, wanted))
    return None if dtype in wanted else f"needs activations of {names}, got {dtype}"


def check_activations(activations: str) -> None:
    """Raises ValueError if ``activations`` is not in ``ACTIVATIONS``."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: wanted {' or '.join(ACTIVATIONS)}, got {activations!r}")


class Layout(nn.Module, ABC):
    """A weight in a backend's packed layout, with kernels for every m.

    Its tensors are non-persistent buffers: files hold only what ``unpack`` returns.

    Attributes:
        casts: True if ``forward`` accepts x of another dtype, as under autocast, and casts it.
        dtypes: dtypes of x that it has kernels for. A layout that leaves it empty gets the dtype
            that it was packed for.
    """

    casts = False
    dtypes: tuple[torch.dtype, ...] = ()

    @abstractmethod
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Computes ``y = x @ W_hat.T + bias``.

        Args:
            x: ``[..., k]``.
            bias: ``[n]`` or None.

        Returns:
            ``[..., n]`` in the dtype of x.
        """

    @abstractmethod
    def unpack(self) -> QuantisedTensor:
        """Returns the weight it was packed from, byte for byte."""


class ExpertLayout(nn.Module, ABC):
    """A stack of experts in a backend's packed layout, with kernels for every number of tokens.

    Its tensors are non-persistent buffers, as those of ``Layout``.

    Attributes:
        casts: True if ``forward`` accepts x of another dtype, as under autocast, and casts it.
        dtypes: dtypes of x that it has kernels for; see ``Layout``.
    """

    casts = False
    dtypes: tuple[torch.dtype, ...] = ()

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        expert_ids: Tensor,
        bias: Tensor | None = None,
        routing_weights: Tensor | None = None,
    ) -> Tensor:
        """Computes ``y[t, j] = x @ W_hat[e].T + bias[e]`` with ``e = expert_ids[t, j]``.

        Sums are float32. An id of -1 stands for an expert of another process: its y is zero. On a
        CPU other ids outside the stack are refused; on a device they count as -1, because finding
        them would synchronise.

        Args:
            x: ``[t, k]``, where each token goes to all its experts, or ``[t, top_k, k]``.
            expert_ids: ``[t, top_k]``, int32 or int64; an expert may occur twice.
            bias: ``[experts, n]`` in the dtype of x, or None.
            routing_weights: ``[t, top_k]``, floating, or None.

        Returns:
            ``[t, top_k, n]`` in the dtype of x; with routing weights their sum over the experts of
            a token, ``sum_j routing_weights[t, j] * y[t, j]``, ``[t, n]``.
        """

    def mlp(
        self,
        down: "ExpertLayout",
        x: Tensor,
        expert_ids: Tensor,
        routing_weights: Tensor,
        bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """Computes ``down(silu(gate) * up)``, weighted and summed over the experts of a token.

        The outputs of this stack are the gates, then as many values ``up``. A backend may override
        this with kernels that fuse some of it, and round less often.

        Args:
            down: the second stack, ``[experts, n, inner]``, where this one has ``2 * inner``
                outputs.
            x: ``[t, k]``.
            expert_ids: ``[t, top_k]``, see ``forward``.
            routing_weights: ``[t, top_k]``, floating.
            bias: ``[experts, 2 * inner]`` or None.
            down_bias: ``[experts, n]`` or None.

        Returns:
            ``[t, n]`` in the dtype of x.
        """
        gate, up = self(x, expert_ids, bias).chunk(2, dim=-1)
        inner = nn.functional.silu(gate) * up
        y: Tensor = down(inner, expert_ids, down_bias, routing_weights)
        return y

    @abstractmethod
    def unpack(self) -> QuantisedStack:
        """Returns the stack it was packed from, byte for byte."""


@runtime_checkable
class Backend(Protocol):
    """Kernels for some formats on some devices. docs/guide/backends.md shows how to write one.

    Attributes:
        name: what callers pass as ``backend``.
    """

    name: str

    def unsupported(self, problem: Problem) -> str | None:
        """Returns None if the backend supports a problem, else every reason, see ``all_reasons``.

        For example "needs k % 128 == 0, got k=192; has no int8 activations".
        """

    def priority(self, problem: Problem) -> int:
        """Returns a rank: ``auto`` picks the highest among backends that support the problem."""

    def pack(self, q: QuantisedTensor, *, dtype: torch.dtype, activations: str = "float") -> Layout:
        """Packs a weight on its device, for activations of ``dtype``.

        ``activations`` is passed only if it is not ``float``.
        """


@runtime_checkable
class ExpertBackend(Backend, Protocol):
    """A backend that has kernels for stacks of experts too.

    Its ``unsupported`` and ``priority`` answer for a stack where ``problem.experts`` is not None.
    """

    def pack_stack(
        self, stack: QuantisedStack, *, dtype: torch.dtype, activations: str = "float"
    ) -> ExpertLayout:
        """Packs a stack on its device, for activations of ``dtype``; see ``Backend.pack``."""


class NoBackendError(RuntimeError):
    """No backend supports a problem. The message has every backend's reason."""


_registry: dict[str, Backend] = {}
_by_name_only: set[str] = set()


def register(backend: Backend, *, by_name_only: bool = False) -> None:
    """Registers a backend under its name, replacing an earlier one of that name.

    Args:
        backend: the backend.
        by_name_only: True to keep ``auto`` from picking it.

    Raises:
        TypeError: if ``backend`` is not a ``Backend``.
        ValueError: if its name is ``auto``.
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
    """Returns every backend by name, including those of installed packages."""
    _discover()
    return dict(_registry)


def select(problem: Problem, backend: str = "auto") -> Backend:
    """Selects the backend for a problem.

    Args:
        problem: the product.
        backend: a backend's name, or ``auto`` for the highest priority among those that support it.

    Raises:
        NoBackendError: if none supports it, with every backend's reason.
        ValueError: if no backend has this name.
        TypeError: if ``problem`` is not a ``Problem``.

    Example:
        >>> problem = Problem(Format.parse("int4-g64"), 64, 128, torch.float32, torch.device("cpu"))
        >>> select(problem, "reference").name
        'reference'
    """
    _check_problem("select", problem)
    known = all_backends()
    if backend != "auto":
        if backend not in known:
            raise ValueError(
                f"backend: wanted auto or one of {', '.join(known)}, got {backend!r}{_failures()}"
            )
        if reason := _unsupported(known[backend], problem):
            raise NoBackendError(f"backend {backend} does not support {problem}: {reason}")
        return known[backend]
    reasons = unsupported_reasons(problem)
    supporting = [known[name] for name, reason in reasons.items() if reason is None]
    if not supporting:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        raise NoBackendError(
            f"no backend supports {problem}:{lines}{_failures()}{_install_hint(problem)}"
        )
    return max(supporting, key=lambda candidate: candidate.priority(problem))


def unsupported_reasons(problem: Problem) -> dict[str, str | None]:
    """Returns, per backend, why ``auto`` would not pick it for a problem; None if it could.

    Args:
        problem: the product.

    Raises:
        TypeError: if ``problem`` is not a ``Problem``.
    """
    _check_problem("unsupported_reasons", problem)
    return {
        name: f'chosen by name only: backend="{name}"'
        if name in _by_name_only
        else _unsupported(backend, problem)
        for name, backend in all_backends().items()
    }


def check_unrotated(format: Format) -> None:
    """Checks that a backend may pack a weight of a format.

    Raises:
        ValueError: if the format is rotated.
    """
    if format.rotation is not None:
        raise ValueError(f"{format}: a backend {_ROTATED.format(format.unrotated)}")


_ROTATED = "multiplies x as it is: rotate x, and use the weight as {}"


def _unsupported(backend: Backend, problem: Problem) -> str | None:
    """Returns why a backend does not support a problem, or None; most have no stacks."""
    if problem.format.rotation is not None:
        return _ROTATED.format(problem.format.unrotated)
    if problem.experts is not None and not isinstance(backend, ExpertBackend):
        return "has no kernels for stacks of experts"
    return backend.unsupported(problem)


def _check_problem(caller: str, problem: Problem) -> None:
    if not isinstance(problem, Problem):
        raise TypeError(f"{caller}: problem must be a Problem, got {type(problem).__name__}")


@cache
def _discover() -> dict[str, str]:
    """Imports packages with backends; returns the errors of those that failed, by module."""
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    modules = {entry.value for entry in entry_points}
    modules |= {name for name in KNOWN_PACKAGES if importlib.util.find_spec(name)}
    failures = {}
    for module in sorted(modules):
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken package must not disable the others
            failures[module] = f"{type(error).__name__}: {error}"
    return failures


def _install_hint(problem: Problem) -> str:
    """Names the package with kernels for a device, if it is not installed."""
    module = f"fdk_{problem.device.type}"
    if module not in KNOWN_PACKAGES or importlib.util.find_spec(module) is not None:
        return ""
    name = module.replace("_", "-")
    return f"\n  {name}, which has kernels for this device, is not installed: pip install {name}"


def _failures() -> str:
    return "".join(f"\n  {module}: failed to import: {e}" for module, e in _discover().items())
