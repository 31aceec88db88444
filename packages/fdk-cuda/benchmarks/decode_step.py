"""Time what Marlin layers add to a decoding step of a llama with 4096 channels.

    python packages/fdk-cuda/benchmarks/decode_step.py [--ms 1,16] [--bits 1,4] [--affine]

m sequences of LENGTH tokens go through BLOCKS blocks of Llama 3 8B in one CUDA graph, with and
without the linear layers; without, their outputs are read from memory. What the layers add between
torch's norms, rotations and attention is printed with the time of the same layers back to back.
"""

from collections.abc import Callable

import torch
from _marlin_weight import marlin_layout, random_weight
from _timing import Row, Run, argument_parser, graph_times, has_gpu, integers, write_rows
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from fdk_cuda.marlin.ops import marlin_linear

LINE = (
    "one block, b{bits} m{m} {kind}: {step:6.1f} us, without linear layers {without:6.1f}, "
    "difference {add:6.1f}; layers back to back {back_to_back:6.1f}"
)
HEADS, KV_HEADS, HEAD, FFN = 32, 8, 128, 14336
DIM, KV = HEADS * HEAD, KV_HEADS * HEAD
LAYERS = {
    "qkv": (DIM + 2 * KV, DIM),
    "o": (DIM, DIM),
    "gate_up": (2 * FFN, DIM),
    "down": (DIM, FFN),
}
BLOCKS, LENGTH = 8, 512
Linear = Callable[[int, str, Tensor], Tensor]  # block, name of the layer, x


def decoding_step(x: Tensor, cache: Tensor, linear: Linear) -> Tensor:
    """Run one token of each sequence through all blocks.

    x     :: [m, DIM, bf16]
    cache :: [BLOCKS, 2, m, KV_HEADS, LENGTH, HEAD, bf16]    its last entry is written
    """
    m = len(x)
    last = torch.full((1,), LENGTH - 1, device="cuda")
    angles = last * 10000.0 ** -torch.linspace(0, 1, HEAD // 2, device="cuda")
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def rotate(heads: Tensor) -> Tensor:
        even, odd = heads.chunk(2, dim=-1)
        return torch.cat([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1)

    for block in range(BLOCKS):
        keys, values = cache[block]
        q, k, v = linear(block, "qkv", rms_norm(x, (DIM,))).split([DIM, KV, KV], dim=-1)
        keys.index_copy_(2, last, rotate(k.view(m, KV_HEADS, 1, HEAD)))
        values.index_copy_(2, last, v.view(m, KV_HEADS, 1, HEAD))
        # The query heads of a group take the dimension of tokens, so no key is repeated.
        q = rotate(q.view(m, KV_HEADS, -1, HEAD))
        y = scaled_dot_product_attention(q, keys, values).view(m, DIM)
        x = x + linear(block, "o", y)
        gate, up = linear(block, "gate_up", rms_norm(x, (DIM,))).split([FFN, FFN], dim=-1)
        x = x + linear(block, "down", silu(gate) * up)
    return x


def time_step(bits: int, m: int, kind: str) -> Row:
    """Return microseconds per block: the step, without linear layers, and these back to back."""
    layouts = {
        name: marlin_layout(random_weight(bits, *shape, kind)) for name, shape in LAYERS.items()
    }
    packed = {name: [own.packed.clone() for _ in range(BLOCKS)] for name, own in layouts.items()}
    x = torch.randn(m, DIM, device="cuda").bfloat16()
    cache = torch.randn(BLOCKS, 2, m, KV_HEADS, LENGTH, HEAD, device="cuda").bfloat16()
    inputs: dict[tuple[int, str], Tensor] = {}
    outputs: dict[tuple[int, str], Tensor] = {}

    def linear(block: int, name: str, x: Tensor) -> Tensor:
        layout = layouts[name]
        weight = packed[name][block], layout.codebook, str(layout.format)
        return marlin_linear(x, *weight, False, None, *layout.shape)

    def record(block: int, name: str, x: Tensor) -> Tensor:
        inputs[block, name], outputs[block, name] = x, linear(block, name, x)
        return outputs[block, name]

    def recorded(block: int, name: str, x: Tensor) -> Tensor:
        return outputs[block, name]

    def back_to_back(_: int) -> Tensor:
        for block in range(BLOCKS):
            for name in LAYERS:
                y = linear(block, name, inputs[block, name])
        return y

    expected = decoding_step(x, cache, record)
    if not torch.equal(expected, decoding_step(x, cache, recorded)):
        raise SystemExit(f"two answers, not timed: b{bits} m{m}")
    runs: list[Run] = [
        lambda _: decoding_step(x, cache, linear),
        lambda _: decoding_step(x, cache, recorded),
        back_to_back,
    ]
    step, without, alone = (time / BLOCKS for time in graph_times(runs, 1))
    row = {"bits": bits, "m": m, "kind": kind, "step": step, "without": without}
    return row | {"add": step - without, "back_to_back": alone}


def main() -> None:
    """Read the command line and time every case."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ms", type=integers, default="1,16", help="sequences")
    parser.add_argument("--bits", type=integers, default="1,2,3,4,8")
    parser.add_argument("--affine", action="store_true", help="integer zero points, no codebook")
    args = parser.parse_args()
    if not has_gpu():
        return
    kind = "affine" if args.affine else "codebook"
    rows = (time_step(bits, m, kind) for bits in args.bits for m in args.ms)
    write_rows(args.out, rows, LINE.format_map)


if __name__ == "__main__":
    main()
