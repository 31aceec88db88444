"""The asymmetric dequantise-and-multiply GEMM, 4 bits, 4096 x 4096, G = 128, beside its peers.

    python dequant_gemm.py [--dtype float16] [--quick]

Rows are m; columns, microseconds a call: cuBLAS on the weight in 16 bits; HQQ's unfused reference
(unpack, subtract, multiply, then matmul); tinygemm (bf16 only); these kernels; and backward,
dy @ W_hat, by cuBLAS and by these kernels from the same bytes. A case is checked before it is
timed; each is a CUDA graph over copies of the weight that together exceed the L2.
"""

import argparse
from functools import partial

import torch
from torch import Tensor
from triton_kernels import graph_time

from fdk_cuda.triton import TritonLayout
from fdk_formats.readers import read_dequant_gemm

N = K = 4096
GROUP_SIZE = 128
ROWS = (16, 32, 64, 128, 256, 512, 1024)
COPIES = 32


def weight(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes ``[n, k, uint8]``, scale and zero point ``[n, k/G]``."""
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(N, K // GROUP_SIZE, device="cuda") + 0.5).to(dtype) / 64
    zero = (torch.rand(N, K // GROUP_SIZE, device="cuda") * 4 + 6).to(dtype)
    return codes, scale, zero


def pack_2xint4(codes_t: Tensor) -> Tensor:
    """``[k, n]`` codes, two rows in a byte, the first in its low half."""
    return codes_t[::2] | codes_t[1::2] << 4


def hqq(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The unfused reference: ``packed :: [n * k / G / 2, G]``, halves of the rows in a byte."""
    codes = torch.cat([packed >> 4, packed & 15]).to(x.dtype)
    return x @ ((codes - zero.view(-1, 1)) * scale.view(-1, 1)).view(N, K).T


def hqq_packed(codes: Tensor) -> Tensor:
    """Codes as HQQ's ``4bit_u8``."""
    high, low = codes.view(-1, GROUP_SIZE).chunk(2)
    return high << 4 | low


def tinygemm_weight(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments of ``torch._weight_int4pack_mm``, which adds a zero after it scales."""
    packed = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    both = torch.stack([scale.T, ((8 - zero.float()) * scale.float()).to(scale.dtype).T], dim=-1)
    return packed, both.contiguous()


def tinygemm(x: Tensor, packed: Tensor, both: Tensor) -> Tensor:
    """Torch's own 4-bit product."""
    return torch._weight_int4pack_mm(x, packed, GROUP_SIZE, both)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="two rows of the table")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    codes, scale, zero = weight(dtype)
    q = read_dequant_gemm(pack_2xint4(codes.T), scale.T, zero.T)
    w_hat = q.dequantise(dtype)
    layouts = [TritonLayout(q) for _ in range(COPIES)]
    dense = [w_hat.clone() for _ in range(9)]
    packed = [hqq_packed(codes) for _ in range(COPIES)]
    has_tiny = dtype == torch.bfloat16
    tiny = [tinygemm_weight(codes, scale, zero) for _ in range(COPIES if has_tiny else 0)]
    names = ["cuBLAS", "HQQ unfused", *(["tinygemm"] if has_tiny else []), "ours"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.dtype}")
    print(f"| m | {' | '.join(names)} | dy: cuBLAS | dy: ours | dy / forward |")
    print("|---" * (len(names) + 4) + "|")
    for m in ROWS[:: 3 if args.quick else 1]:
        x = torch.randn(m, K, device="cuda").to(dtype)
        grad_y = torch.randn(m, N, device="cuda").to(dtype)
        calls = [
            [partial(torch.nn.functional.linear, x, w) for w in dense],
            [partial(hqq, x, p, scale, zero) for p in packed],
            *([[partial(tinygemm, x, *t) for t in tiny]] if has_tiny else []),
            [partial(layout, x) for layout in layouts],
            [partial(torch.matmul, grad_y, w) for w in dense],
            [partial(layout.grad_x, grad_y) for layout in layouts],
        ]
        oracles = [x.double() @ w_hat.double().T] * len(names)
        oracles += [grad_y.double() @ w_hat.double()] * 2
        for call, oracle in zip(calls, oracles, strict=True):
            error = float((call[0]().double() - oracle).norm() / oracle.norm())
            assert error < 0.01, f"m = {m}, {call[0]}: error {error:.1e}"
        times = [graph_time(call) for call in calls]
        row = " | ".join(f"{us:.1f}" for us in times)
        print(f"| {m} | {row} | {times[-1] / times[len(names) - 1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
