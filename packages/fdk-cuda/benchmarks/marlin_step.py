"""Times one decoding step with Marlin layers, in a CUDA graph.

    python packages/fdk-cuda/benchmarks/marlin_step.py [--ms 1,16] [--bits 1,4] [--affine] [--out F]

m sequences of STEP_LENGTH tokens go through a llama of 4096 channels, with and without its linear
layers: what they add there, between torch's norms, rotations and attention, beside the same layers
back to back. Without, their right outputs are taken from memory as they lie, so what they add holds
every gap around them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from _rows import write_rows
from marlin import Run, graph_times, random_weight
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, MarlinLayout
from fdk_cuda.marlin.ops import marlin_linear

LINE = (
    "a block of a step, b{bits} m{m} {kind}: {step:6.1f} us, without linear layers "
    "{without:6.1f}, so they add {add:6.1f}; back to back {back_to_back:6.1f}"
)
# The blocks: Llama 3 8B's, q, k and v in one layer and gate and up in another.
HEADS, KV_HEADS, HEAD, FFN = 32, 8, 128, 14336
DIM = HEADS * HEAD
STEP_SHAPES = {
    "qkv": (DIM + 2 * KV_HEADS * HEAD, DIM),
    "o": (DIM, DIM),
    "gate_up": (2 * FFN, DIM),
    "down": (DIM, FFN),
}
STEP_BLOCKS, STEP_LENGTH = 8, 512
StepLinear = Callable[[int, str, torch.Tensor], torch.Tensor]


def decoding_step(x: torch.Tensor, cache: torch.Tensor, linear: StepLinear) -> torch.Tensor:
    """One token of each sequence through all blocks.

    x     :: [m, DIM, bf16]
    cache :: [STEP_BLOCKS, 2, m, KV_HEADS, STEP_LENGTH, HEAD, bf16]    written at its last entry
    """
    m = len(x)
    last = torch.full((1,), STEP_LENGTH - 1, device="cuda")
    angles = last * 10000.0 ** -torch.linspace(0, 1, HEAD // 2, device="cuda")
    turn = torch.cat([angles.cos(), angles.sin()]).to(x.dtype).view(2, -1)
    kv = KV_HEADS * HEAD

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        even, odd = heads.chunk(2, dim=-1)
        cosine, sine = turn
        return torch.cat([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1)

    for block in range(STEP_BLOCKS):
        keys, values = cache[block]
        q, k, v = linear(block, "qkv", rms_norm(x, (DIM,))).split([DIM, kv, kv], dim=-1)
        keys.index_copy_(2, last, rotate(k.view(m, KV_HEADS, 1, HEAD)))
        values.index_copy_(2, last, v.view(m, KV_HEADS, 1, HEAD))
        # The heads of a group stand where tokens would, so that no key is repeated.
        q = rotate(q.view(m, KV_HEADS, -1, HEAD))
        y = scaled_dot_product_attention(q, keys, values).view(m, DIM)
        x = x + linear(block, "o", y)
        gate, up = linear(block, "gate_up", rms_norm(x, (DIM,))).split([FFN, FFN], dim=-1)
        x = x + linear(block, "down", silu(gate) * up)
    return x


def time_step(bits: int, m: int, *, affine: bool) -> dict[str, object]:
    """Microseconds of a block of a step, without its linear layers, and of these back to back."""
    layouts, packed = {}, {}
    for name, shape in STEP_SHAPES.items():
        weight = random_weight(bits, *shape, affine=affine)
        layout = (MARLIN if affine else MARLIN_LUT).pack(weight, dtype=torch.bfloat16)
        assert isinstance(layout, MarlinLayout)
        layouts[name] = layout
        packed[name] = [layout.packed.clone() for _ in range(STEP_BLOCKS)]
    x = torch.randn(m, DIM, device="cuda").to(torch.bfloat16)
    shape = STEP_BLOCKS, 2, m, KV_HEADS, STEP_LENGTH, HEAD
    cache = torch.randn(shape, device="cuda").to(torch.bfloat16)
    inputs: dict[tuple[int, str], torch.Tensor] = {}
    outputs: dict[tuple[int, str], torch.Tensor] = {}

    def linear(block: int, name: str, x: torch.Tensor) -> torch.Tensor:
        layout = layouts[name]
        weight = packed[name][block], layout.codebook, str(layout.format)
        return marlin_linear(x, *weight, False, None, *layout.shape)

    def kept(block: int, name: str, x: torch.Tensor) -> torch.Tensor:
        inputs[block, name], outputs[block, name] = x, linear(block, name, x)
        return outputs[block, name]

    def back_to_back(_: int) -> torch.Tensor:
        for block in range(STEP_BLOCKS):
            for name in STEP_SHAPES:
                y = linear(block, name, inputs[block, name])
        return y

    expected = decoding_step(x, cache, kept)
    if not torch.equal(expected, decoding_step(x, cache, lambda *at: outputs[at[:2]])):
        raise SystemExit(f"two answers, not timed: b{bits} m{m}")
    runs: list[Run] = [
        lambda _: decoding_step(x, cache, linear),
        lambda _: decoding_step(x, cache, lambda *at: outputs[at[:2]]),
        back_to_back,
    ]
    whole, rest, alone = (time / STEP_BLOCKS for time in graph_times(runs, 1))
    row = {"bits": bits, "m": m, "kind": "affine" if affine else "codebook", "step": whole}
    return row | {"without": rest, "add": whole - rest, "back_to_back": alone}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", default="1,16")
    parser.add_argument("--bits", default="1,2,3,4,8")
    parser.add_argument("--affine", action="store_true", help="integer zero points, no codebook")
    parser.add_argument("--out", type=Path, help="a file that rows are written to as JSONL")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    rows = (
        time_step(bits, m, affine=args.affine)
        for bits in map(int, args.bits.split(","))
        for m in map(int, args.ms.split(","))
    )
    write_rows(args.out, rows, LINE.format_map)


if __name__ == "__main__":
    main()
