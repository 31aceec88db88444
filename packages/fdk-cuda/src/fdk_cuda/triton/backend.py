"""The Triton backend: every format on any NVIDIA GPU of compute capability 8.0 or later."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fdk_cuda.gpu import unsupported_gpu
from fdk_cuda.launch_cache import LaunchCache
from fdk_cuda.marlin.heuristics_experts import MAX_EXPERTS
from fdk_cuda.marlin.layout import unsupported_reason
from fdk_cuda.nvrtc import unavailable_reason
from fdk_cuda.stream_sync import SyncedLayout
from fdk_cuda.triton import autotune
from fdk_cuda.triton.compiled_launch import INTERPRETED
from fdk_cuda.triton.configs import GemvConfig
from fdk_cuda.triton.expert_layout import TritonExpertLayout
from fdk_cuda.triton.kernels.decode import DTYPES, lookup_tables
from fdk_cuda.triton.launch import gpu_at, launched_gemv
from fdk_cuda.triton.layout import (
    PackedLayout,
    pack_codes,
    pack_scale,
    unpack_codes,
    unpack_scale,
)
from fdk_cuda.triton.ops import triton_linear_op
from fdk_cuda.triton.packed_weight import PackedWeight
from fdk_cuda.triton.toolchain import why_no_launcher
from fdk_formats.backends import (
    ExpertLayout,
    Layout,
    Problem,
    all_reasons,
    check_unrotated,
    no_activations,
    wrong_dtype,
)
from fdk_formats.packing import pack
from fdk_formats.tensor import QuantisedStack, QuantisedTensor
from fdk_formats.torch_internals import is_plain_call


class TritonLayout(SyncedLayout):
    """A weight with codes in fragment order, scales by tiles of 16 rows, and lookup tables.

    Args:
        q: the quantised weight.
        batch_invariant: make a row of y independent of the other rows and their number. This is
            slower for many rows.
    """

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    values: Tensor
    lanes: Tensor
    codebook: Tensor | None

    def __init__(self, q: QuantisedTensor, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.format, self.shape, self.batch_invariant = q.format, q.shape, batch_invariant
        a = self.packed_layout = PackedLayout(*q.shape, q.format.bits, q.group_size)
        codebook = q.codebook
        if codebook is None:
            codebook = torch.arange(1 << a.bits, dtype=torch.float32, device=q.device)
        values, lanes = lookup_tables(codebook)
        zero_point = None if q.zero_point is None else pack_scale(q.zero_point, a)
        tensors = {
            "words": pack_codes(q.codes(), a),
            "scale": pack_scale(q.scale, a),
            "zero_point": zero_point,
            "values": values,
            "lanes": lanes,
            "codebook": q.codebook,
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self._launches = LaunchCache()
        self.synchronise()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout``."""
        if self.batch_invariant or not is_plain_call(x, bias):
            return self._linear(x, bias)
        tensors: Any = self._buffers  # nn.Module takes 0.5 us to find one as an attribute
        words, scale, zero_point = tensors["words"], tensors["scale"], tensors["zero_point"]
        # Without zero points the kernel gets the scales in their place, and does not read them.
        third = scale if zero_point is None else zero_point
        addresses = (
            words.data_ptr(),
            scale.data_ptr(),
            third.data_ptr(),
            tensors["values"].data_ptr(),
            tensors["lanes"].data_ptr(),
        )
        zero_dtype = None if zero_point is None else zero_point.dtype
        # Tuning may replace the configuration.
        state = words.get_device(), scale.dtype, zero_dtype, autotune.times_measured
        y = self._launches.launch(x, bias, addresses, state)
        if y is None:
            y = self._linear(x, bias)
            self._launches.insert(x, bias, y, state, self._prepare_launch)
        return y

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Calls the op, which checks x and bias."""
        a = self.packed_layout
        tensors = self.words, self.scale, self.zero_point, self.values, self.lanes
        sizes = a.bits, a.group_size, self.batch_invariant
        return triton_linear_op(x, *tensors, *sizes, bias, a.n, a.k)

    def _prepare_launch(self, x: Tensor, bias: Tensor | None) -> Callable[..., None] | None:
        """Returns the launch of gemv_kernel that the op compiled for x, if this kernel ran."""
        w, m, device = self._weight(), x.numel() // x.shape[-1], x.get_device()
        if m > gpu_at(device).limits.gemv_m:
            return None
        config = autotune.choose(w, m, x.dtype, device)
        if not isinstance(config, GemvConfig):
            return None
        compiled = launched_gemv(device, m, x.dtype, bias is None, config, w)
        if compiled is None:
            return None
        # Without a bias the kernel gets x in its place, and does not read it.
        return lambda words, scale, zero, values, lanes, x, bias, y: compiled(
            (x, words, scale, zero, values, lanes, bias or x, y), device
        )

    def _weight(self) -> PackedWeight:
        tensors: Any = self._buffers
        *names, _ = PackedWeight._fields
        return PackedWeight._make([*(tensors[name] for name in names), self.packed_layout])

    def grad_x(self, grad_y: Tensor) -> Tensor:
        """Computes ``grad_y @ W_hat``, the gradient of x, for ``grad_y :: [..., n]``."""
        a = self.packed_layout
        tensors = self.words, self.scale, self.zero_point, self.values, self.lanes
        dx: Tensor = torch.ops.fdk_cuda.triton_linear_grad_x(
            grad_y, *tensors, a.bits, a.group_size, self.batch_invariant, a.n, a.k
        )
        return dx

    def unpack(self) -> QuantisedTensor:
        """See ``Layout``."""
        a = self.packed_layout
        return QuantisedTensor(
            format=self.format,
            shape=self.shape,
            packed=pack(unpack_codes(self.words, a), a.bits),
            scale=unpack_scale(self.scale, a),
            codebook=self.codebook,
            zero_point=None if self.zero_point is None else unpack_scale(self.zero_point, a),
        )


class TritonBackend:
    """Runs every format with bf16 and fp16 activations.

    Args:
        batch_invariant: see ``TritonLayout``.
    """

    name = "triton"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def unsupported(self, problem: Problem) -> str | None:
        """See ``Backend``."""
        gpu = None if INTERPRETED else unsupported_gpu(problem.device) or why_no_launcher()
        return all_reasons(no_activations(problem), wrong_dtype(problem.dtype, DTYPES), gpu)

    def priority(self, problem: Problem) -> int:
        """Returns a priority below Marlin and above the reference."""
        return 10

    def pack(self, q: QuantisedTensor, *, dtype: torch.dtype, activations: str = "float") -> Layout:
        """See ``Backend``."""
        check_unrotated(q.format)
        return TritonLayout(q, batch_invariant=self.batch_invariant)

    def pack_stack(
        self, stack: QuantisedStack, *, dtype: torch.dtype, activations: str = "float"
    ) -> ExpertLayout:
        """See ``ExpertBackend``."""
        check_unrotated(stack.format)
        if not self.batch_invariant and _fits_marlin(stack):
            # Here, because it imports fdk_cuda.triton.
            from fdk_cuda.marlin.expert_layout import MarlinExpertLayout

            return MarlinExpertLayout(stack, dtype)
        return TritonExpertLayout(stack, batch_invariant=self.batch_invariant)


def _fits_marlin(stack: QuantisedStack) -> bool:
    """Returns whether the Marlin kernels serve a stack: on Hopper, by its groups and size."""
    is_hopper = (
        stack.device.type == "cuda" and torch.cuda.get_device_capability(stack.device)[0] == 9
    )
    fits = stack.shape[0] <= MAX_EXPERTS and not unsupported_reason(stack.format, stack.shape[2])
    return is_hopper and fits and unavailable_reason() is None
