"""The weight of a quantised layer in memory, and the parameters through which torch sees it.

torch, accelerate and FSDP2 see a layer's canonical tensors (codes, scales, codebook, zero points)
as frozen parameters. Kernels need the same values in a backend's layout, and two copies would
double the memory. So a ``StoredWeight`` holds one of the two, and a ``StoredTensor`` is a parameter
that reads its values from it: reading from a layout unpacks it for the read.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats import reserved_memory
from fdk_formats.backends import ExpertLayout, Layout, Problem, select
from fdk_formats.format import Format
from fdk_formats.packing import packed_width
from fdk_formats.reserved_memory import ReservedMemory
from fdk_formats.rotated_layout import RotatedExpertLayout, RotatedLayout
from fdk_formats.tensor import CanonicalWeight, QuantisedStack, QuantisedTensor
from fdk_formats.torch_internals import (
    map_tensors,
    tensor_without_memory,
    without_torch_function,
)


class StoredWeight:
    """A weight that is held as canonical tensors, or in a backend's layout after ``pack``.

    Layers that share a weight share one of these.

    Args:
        q: the weight, or a stack of experts.

    Attributes:
        format: format of the weight.
        shape: ``(n, k)``, or ``(experts, n, k)``.
        device: device of the weight.
        layout: the packed weight, or None while it is held as canonical tensors.
        backend_name: name of the layout's backend.
        moved_to: the weight on another device that this one was moved to. Layers that share it
            follow when they are moved.
    """

    def __init__(self, q: CanonicalWeight) -> None:
        self.format, self.shape = q.format, q.shape
        self.device = q.device
        self.layout: Layout | ExpertLayout | None = None
        self.backend_name = "none"
        self.moved_to: StoredWeight | None = None
        self._tensors: dict[str, Tensor] | None = q.tensors()
        self._reserved: dict[str, ReservedMemory] = {}
        self._parameters: weakref.WeakValueDictionary[str, StoredTensor] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.RLock()

    def quantised(self) -> Any:
        """Returns the weight in canonical form, a QuantisedTensor or a QuantisedStack."""
        with self._lock:
            if self.layout is not None:
                return _with_own_codebook(self.layout.unpack())
            assert self._tensors is not None
            return weight_of(self.format, self.shape, self._tensors)

    def pack(self, backend: str, dtype: torch.dtype, activations: str) -> Layout | ExpertLayout:
        """Packs the weight for activations of ``dtype``, unless its layout is for them already.

        Raises:
            NoBackendError: if no backend supports the weight.
            ValueError: if the backend refuses its values.
        """
        with self._lock:
            if self.layout is None or dtype not in self.layout.dtypes:
                self.hold_in(*pack_with(backend, self.quantised(), dtype, activations))
            assert self.layout is not None
            return self.layout

    def hold_in(self, layout: Layout | ExpertLayout, backend_name: str) -> None:
        """Keeps the weight in a layout and drops the canonical tensors."""
        with self._lock:
            self.layout, self.backend_name, self._tensors = layout, backend_name, None

    def canonical_tensors(self) -> dict[str, Tensor]:
        """Returns the canonical tensors themselves, and drops the layout.

        For callers that need memory of their own: they write to it or read its address.
        """
        with self._lock:
            if self._tensors is None:
                self._tensors = self.quantised().tensors()
                self.layout, self.backend_name = None, "none"
            return self._tensors

    def address(self, name: str) -> int:
        """Returns the address of a canonical tensor, and drops the layout.

        On a CPU nothing else gets the address while the weight lives, though packing frees its
        memory. A tensor that processes share keeps the address that it has.
        """
        with self._lock:
            tensors = self.canonical_tensors()
            tensor = tensors[name]
            can_reserve = tensor.device.type == "cpu" and reserved_memory.IS_AVAILABLE
            if can_reserve and tensor.nbytes and not tensor.is_shared():
                memory = self._reserved.get(name)
                if memory is None or not memory.holds(tensor):
                    if memory is None or memory.is_in_use:
                        memory = self._reserved[name] = ReservedMemory(tensor.nbytes)
                    tensors[name] = memory.copy_of(tensor)
            return tensors[name].data_ptr()

    def parameters(self) -> dict[str, "StoredTensor"]:
        """Returns a parameter for each tensor, the same ones on each call."""
        with self._lock:
            parameters = dict(self._parameters)
            if len(parameters) < len(self.format.tensor_names):
                for name, tensor in self.quantised().tensors().items():
                    parameters.setdefault(name, StoredTensor.of(self, name, tensor))
                self._parameters.update(parameters)
            return {name: parameters[name] for name in self.format.tensor_names}

    def replace(self, q: CanonicalWeight) -> None:
        """Replaces the values by those of a weight of the same format, shape and device."""
        with self._lock:
            self._tensors, self.layout, self.backend_name = q.tensors(), None, "none"

    def moved(self, device: torch.device) -> "StoredWeight":
        """Returns the weight on another device, zero if it has no values (on meta).

        Layers that share a weight get the same one.
        """
        if self.moved_to is None or self.moved_to.device != device:
            if self.device.type == "meta":
                q = zero_weight(self.format, self.shape, device)
            else:
                q = self.quantised().to(device)
            self.moved_to = StoredWeight(q)
        return self.moved_to

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Applies a function that moves no tensor, such as ``share_memory_``; dtypes stay."""

        def keeping_dtype(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            return changed if changed.dtype == tensor.dtype else tensor

        with self._lock:
            if self.layout is not None:
                self.layout._apply(keeping_dtype)  # type: ignore[no-untyped-call]
            else:
                tensors = self.canonical_tensors().items()
                self._tensors = {name: keeping_dtype(tensor) for name, tensor in tensors}

    def __deepcopy__(self, memo: dict[int, Any]) -> "StoredWeight":
        q = self.quantised()
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in q.tensors().items()}
        return StoredWeight(replace(q, **copies))

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredWeight, (self.quantised(),)


class StoredTensor(Tensor):
    """A frozen parameter whose values a ``StoredWeight`` holds.

    Operations get a plain tensor of its values, unpacked for the operation if a layout holds them.
    Writing to it changes the weight, which is then packed again at its next use.

    ``StoredTensor(data, requires_grad=...)`` makes a plain ``nn.Parameter``: accelerate creates
    parameters of the class of those that it replaces.

    Attributes:
        stored: the weight.
        field: the tensor's name in ``QuantisedTensor``.
    """

    stored: StoredWeight
    field: str
    # nn.Parameter's instance check.
    _is_param = True

    def __new__(cls, data: Tensor, requires_grad: bool = False, **attributes: Any) -> Any:
        """Makes a plain parameter, see the class."""
        return nn.Parameter(data, requires_grad=requires_grad)

    @classmethod
    def of(cls, stored: StoredWeight, field: str, like: Tensor) -> "StoredTensor":
        """Makes the parameter for one tensor of a weight, with the metadata of ``like``."""
        own: Any = tensor_without_memory(cls, like.shape, like.dtype, like.device)
        own.stored, own.field = stored, field
        return own  # type: ignore[no-any-return]

    def plain(self) -> Tensor:
        """Returns the values; they share memory with the weight unless a layout holds it."""
        value: Tensor = getattr(self.stored.quantised(), self.field)
        return value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], StoredTensor):
            own = args[0]
            if func in _GRADIENT_FLAGS:  # The quantised weight is constant.
                return own
            if func == _SET_DATA:
                value, plain = args[1], own.stored.canonical_tensors()
                value = value.plain() if isinstance(value, StoredTensor) else value.detach()
                # Casting a whole model casts scales too; they keep the format's dtype.
                plain[own.field] = value.to(own.dtype)
                return None
            if func is Tensor.data_ptr:
                return own.stored.address(own.field)
            if func in _READ_MEMORY:
                plain = own.stored.canonical_tensors()
                return func(plain[own.field], *args[1:], **(kwargs or {}))
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIASES:
            return cls.of(args[0].stored, args[0].field, args[0])
        if func._schema.is_mutable:
            written = [a for a in args if isinstance(a, StoredTensor)]
            plain_args, plain_kwargs = map_tensors(
                StoredTensor, lambda t: t.stored.canonical_tensors()[t.field], (args, kwargs or {})
            )
            result = func(*plain_args, **plain_kwargs)
            return written[0] if len(written) == 1 and written[0] is args[0] else result
        args, kwargs = map_tensors(StoredTensor, StoredTensor.plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StoredTensor":
        stored = memo.get(id(self.stored))
        if stored is None:
            stored = memo[id(self.stored)] = self.stored.__deepcopy__(memo)
        return stored.parameters()[self.field]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _parameter_of, (self.stored, self.field)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StoredTensor({self.field} of {self.stored.format}, {self.plain()})"


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_GRADIENT_FLAGS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_READ_MEMORY = (
    Tensor.untyped_storage,
    Tensor.numpy,
    Tensor.tolist,
    Tensor.share_memory_,
    Tensor.is_shared,
    Tensor.pin_memory,
    Tensor.__array__,
    Tensor.__dlpack__,
)


def _parameter_of(stored: StoredWeight, name: str) -> StoredTensor:
    return stored.parameters()[name]


def weight_of(
    format: Format, shape: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> QuantisedTensor | QuantisedStack:
    """Makes a weight ``[n, k]`` or a stack ``[experts, n, k]`` of its tensors by name."""
    if len(shape) == 3:
        return QuantisedStack(format, (shape[0], shape[1], shape[2]), **tensors)
    return QuantisedTensor(format, (shape[0], shape[1]), **tensors)


def problem_of(
    format: Format,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    activations: str = "float",
) -> Problem:
    """Returns the problem of a weight ``[n, k]`` or a stack ``[experts, n, k]``.

    That of a rotated format is the product with rotated x.
    """
    *experts, n, k = shape
    return Problem(
        format.unrotated, n, k, dtype, device, activations, experts[0] if experts else None
    )


def pack_with(
    backend: str, q: CanonicalWeight, dtype: torch.dtype, activations: str
) -> tuple[Layout | ExpertLayout, str]:
    """Packs a weight with the backend that ``select`` chooses; returns its layout and name.

    On the meta device, where no backend has kernels, that is ``reference``.
    """
    if q.device.type == "meta":
        backend = "reference"
    chosen: Any = select(problem_of(q.format, q.shape, dtype, q.device, activations), backend)
    rounded = {} if activations == "float" else {"activations": activations}
    # Autograd cannot save tensors made in inference mode, and a gradient needs the layout's.
    with torch.inference_mode(False), torch.no_grad():
        tensors = {name: t.clone() if t.is_inference() else t for name, t in q.tensors().items()}
        format = q.format
        q = _with_own_codebook(weight_of(format.unrotated, q.shape, tensors))
        pack = chosen.pack_stack if isinstance(q, QuantisedStack) else chosen.pack
        layout = pack(q, dtype=dtype, **rounded)
    if not layout.dtypes:
        layout.dtypes = (dtype,)
    if format.rotation is not None:
        rotated: Any = RotatedExpertLayout if len(q.shape) == 3 else RotatedLayout
        layout = rotated(layout, format)
    return layout, chosen.name


def _with_own_codebook(q: CanonicalWeight) -> CanonicalWeight:
    """Copies the codebook, which layouts keep as it is and the caller may go on to change."""
    return q if q.codebook is None else replace(q, codebook=q.codebook.clone())


def zero_weight(
    format: Format, shape: tuple[int, ...], device: torch.device | str | int | None
) -> Any:
    """Makes a weight of zeros ``[n, k]``, or a stack ``[experts, n, k]``.

    The experts of a stack have a codebook each where ``quantise_stack`` would fit or be given them.
    """
    *rows, k = shape
    groups = *rows, k // format.group_size_for(k)
    tensors: dict[str, Tensor] = {
        "packed": torch.zeros(
            (*rows, packed_width(format.bits, k)), dtype=torch.uint8, device=device
        ),
        "scale": torch.zeros(groups, dtype=format.stored_scale_dtype, device=device),
    }
    if format.is_affine:
        dtype = format.stored_zero_point_dtype
        tensors["zero_point"] = torch.zeros(groups, dtype=dtype, device=device)
    else:
        tables = [rows[0] if format.accepts_codebook else 1] if len(rows) == 2 else []
        entries = 1 << format.bits
        tensors["codebook"] = torch.zeros(*tables, entries, device=device, dtype=torch.float32)
    return weight_of(format, shape, tensors)


@contextmanager
def saved_as_canonical(
    q: CanonicalWeight,
    layout: Layout | ExpertLayout,
    backend: str,
    dtype: torch.dtype,
    activations: str,
) -> Iterator[None]:
    """Saves the canonical tensors for backward, in the place of a layout made from them.

    FSDP2 frees the memory of parameters after forward and gathers them again before backward. A
    saved layout would keep the weights of all layers until then.
    """
    # Autograd keeps the hooks, so they may not refer to the layout.
    names = {(b.data_ptr(), b.shape): name for name, b in layout.named_buffers()}
    again: list[nn.Module] = []

    def pack(tensor: Tensor) -> Tensor | str:
        return names.get((tensor.data_ptr(), tensor.shape), tensor)

    def unpack(saved: Tensor | str) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not again:
            again.append(pack_with(backend, q, dtype, activations)[0])
        return again[0].get_buffer(saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
