"""Times the Triton kernels on one GPU beside cuBLAS; each case is checked before it is timed.

    python triton_kernels.py --bits 1 4 --m 1 16 64 --shape 8192x8192
    python triton_kernels.py --sweep --bits 4 --m 64 256      every configuration, best first
    python triton_kernels.py --transposed --bits 4 --m 1 64   dy @ W_hat, beside the forward
    python triton_kernels.py --host                           host time of an eager call

Each case is captured in a CUDA graph over copies of the weight that together are five times the L2;
the median of 15 replays is quoted, in microseconds a call.
"""

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import triton
from _floor import product_floor
from torch import Tensor

from fdk_cuda.triton import launch
from fdk_cuda.triton.autotune import (
    candidates,
    graph_time,
    random_weights,
)
from fdk_cuda.triton.configs import (
    DgradConfig,
    DgradWgmmaConfig,
    GemmConfig,
    GemmWgmmaConfig,
    GemvConfig,
    forward_config,
    grad_config,
)
from fdk_cuda.triton.layout import STRIDES, PackedLayout
from fdk_formats.linear import QuantisedLinear

# None: dequantise and cuBLAS
Config = GemvConfig | GemmConfig | GemmWgmmaConfig | DgradConfig | DgradWgmmaConfig | None


def weights(n: int, k: int, bits: int, group_size: int, affine: bool) -> list[launch.PackedWeight]:
    """Random weights that together exceed the L2."""
    a = PackedLayout(n, k, bits, group_size)
    return random_weights(a, torch.bfloat16, torch.bfloat16 if affine else None, 0)


def run(x: Tensor, w: launch.PackedWeight, config: Config) -> Tensor:
    """One product by the kernel that a configuration belongs to."""
    if isinstance(config, DgradConfig | DgradWgmmaConfig):
        return launch.linear_dgrad(x, w, config)
    return launch.linear(x, w, None, config)


def chosen(n: int, k: int, m: int, bits: int, affine: bool) -> list[Config]:
    """What the dispatcher would choose from."""
    best = forward_config(PackedLayout(n, k, bits, 64), m, launch.gpu_at(0), affine=affine)
    return [best] if m <= 16 else list(dict.fromkeys([best, None]))


def transposed_configs(m: int, bits: int) -> list[Config]:
    """Likewise for ``dy @ W_hat``."""
    m_tiles = 1 if m <= 8 else 2 if m <= 16 else 4
    tables = (False, True) if bits in STRIDES else (False,)
    grid = itertools.product((2, 4), (2, 4, 8, 16), (0, 1), (4, 8), tables)
    return [
        *(
            DgradConfig(1, warps, m_tiles, split, ahead, positions, table)
            for warps, split, ahead, positions, table in grid
        ),
        None,
    ]


def compile_one(job: tuple[int, bool, int, Config]) -> Config:
    """Fills the disk cache with one kernel; returns a configuration that does not fit the GPU."""
    bits, affine, m, config = job
    w = weights(512, 4096, bits, 64, affine)[0]
    columns = 512 if isinstance(config, DgradConfig | DgradWgmmaConfig) else 4096
    try:
        run(torch.randn(m, columns, device="cuda").bfloat16(), w, config)
    except triton.OutOfResources:
        return config
    return None


def key_of(job: tuple[int, bool, int, Config]) -> tuple[object, ...]:
    """Jobs of one key compile the same kernel."""
    bits, affine, m, config = job
    if isinstance(config, GemmConfig):
        return bits, affine, replace(config, split_k=1)
    if isinstance(config, GemmWgmmaConfig):
        return bits, affine, replace(config, split_k=min(config.split_k, 4))  # parts are float32
    if isinstance(config, DgradConfig | DgradWgmmaConfig):
        return bits, affine, replace(config, split_n=min(config.split_n, 2))
    return bits, affine, m <= 8, config


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--shape", nargs="+", default=["4096x4096", "8192x8192", "28672x8192"])
    parser.add_argument("--affine", action="store_true")
    parser.add_argument("--transposed", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--best", type=int, default=4, help="configurations to print")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--rounds", type=int, default=300, help="of 20 calls, with --host")
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    if args.host:
        host_time(args.rounds)
        return
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shape]

    def configs(n: int, k: int, m: int, bits: int) -> list[Config]:
        if args.transposed:
            a = PackedLayout(n, k, bits, 64)
            one = grad_config(a, m, launch.gpu_at(0), affine=args.affine)
            return transposed_configs(m, bits) if args.sweep else [one, None]
        if args.sweep:
            gpu = launch.gpu_at(0)
            layout = PackedLayout(n, k, bits, 64)
            return candidates(layout, m, gpu, affine=args.affine)
        return chosen(n, k, m, bits, args.affine)

    jobs = {}
    for bits, m, (n, k) in itertools.product(args.bits, args.m, shapes):
        for config in configs(n, k, m, bits):
            job = bits, args.affine, m, config
            jobs[key_of(job)] = job
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        too_large = {c for c in pool.map(compile_one, jobs.values(), chunksize=1) if c is not None}
    for bits, (n, k) in itertools.product(args.bits, shapes):
        ws = weights(n, k, bits, 64, args.affine)
        dense = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(4)]
        for m in args.m:
            fitting = [c for c in configs(n, k, m, bits) if c not in too_large]
            print(time_case(ws, dense, m, fitting, args.transposed, args.best), flush=True)


def time_case(
    ws: list[launch.PackedWeight],
    dense: list[Tensor],
    m: int,
    configs: list[Config],
    is_transposed: bool,
    best: int,
) -> str:
    """A line: cuBLAS, the floor of an H200, what the best takes of it, the best configurations."""
    a = ws[0].layout
    columns = a.n if is_transposed else a.k
    x = torch.randn(m, columns, device="cuda").bfloat16()
    w_hat = launch.dequantise(ws[0], torch.bfloat16).float()
    reference = x.float() @ (w_hat if is_transposed else w_hat.T)
    times = []
    for config in configs:
        function = product(is_transposed, config)
        y = function(x, ws[0]).float()
        error = float((y - reference).norm() / reference.norm())
        assert error < 6e-3, f"{a}, m = {m}, {config}: error {error:.1e}"
        times.append((graph_time([partial(function, x, w) for w in ws]), config))
    times.sort(key=lambda entry: entry[0])
    function = torch.matmul if is_transposed else torch.nn.functional.linear
    cublas = graph_time([partial(function, x, d) for d in dense])
    line = "  ".join(f"{us:.1f} {short(config)}" for us, config in times[:best])
    direction = " dy" if is_transposed else ""
    read = [t for t in (ws[0].words, ws[0].scale, ws[0].zero_point, x) if t is not None]
    floor = product_floor(m, a.n, a.k, sum(t.nbytes for t in read))
    share = f"floor {floor:.1f}, x {times[0][0] / floor:.2f}"
    return f"b{a.bits} {a.n}x{a.k} m{m}{direction}: cuBLAS {cublas:.1f} | {share} | {line}"


def product(is_transposed: bool, config: Config) -> Callable[[Tensor, launch.PackedWeight], Tensor]:
    """A configuration's product as a function of x and the weight."""
    if is_transposed and config is None:
        return lambda x, w: x @ launch.dequantise(w, x.dtype)
    return lambda x, w: run(x, w, config)


def host_time(rounds: int) -> None:
    """Microseconds of the host in an eager call at m = 1, GPU idle through the op; in turns."""
    x = torch.randn(1, 1024, device="cuda").bfloat16()
    layers = host_layers()
    times: dict[str, list[float]] = {label: [] for label, _ in layers}
    with torch.no_grad():
        for label, layer in layers:
            for _ in range(20):
                layer(x)
            layout = layer.weight.layout if isinstance(layer, QuantisedLinear) else None
            if layout is not None and layout._ready.again(x, layer.bias, layout._buffers) is None:
                print(f"host, {label}: no call is made ready")
        for _ in range(rounds):
            for label, layer in layers:
                for _ in range(5):  # the layer before has the processor's caches
                    layer(x)
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):  # the GPU is done with each before the next comes
                    layer(x)
                times[label].append((time.perf_counter() - start) / 20 * 1e6)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    for label, taken in times.items():
        median = sorted(taken)[len(taken) // 2]
        print(f"host, {label}: {median:.1f} us a call, {min(taken):.1f} at least")


def host_layers() -> list[tuple[str, torch.nn.Module]]:
    """What ``host_time`` calls: with a bias, and without."""
    layers: list[tuple[str, torch.nn.Module]] = []
    for bias in (True, False):
        linear = torch.nn.Linear(1024, 1024, bias, device="cuda", dtype=torch.bfloat16)
        suffix = "" if bias else ", no bias"
        layers.append((f"nn.Linear{suffix}", linear))
        for backend, format in (
            ("triton", "nf4-g64"),
            ("triton", "affine4-g64"),
            ("marlin-lut", "nf4-g64"),
            ("marlin", "affine4-g64"),
        ):
            layer = QuantisedLinear.from_linear(linear, format, backend=backend)
            layers.append((f"{backend} {format}{suffix}", layer))
    return layers


def short(config: Config) -> str:
    """A configuration in a few letters."""
    if isinstance(config, GemvConfig):
        c = config
        limit = f"r{c.registers}" if c.registers else ""
        minus = "-minus" if c.minus else ""
        return f"small-n{c.n_tiles}w{c.warps}a{c.ahead}f{c.fetch}o{c.overlap:d}{limit}{minus}"
    if isinstance(config, DgradConfig):
        c = config
        sizes = f"t{c.n_tiles}w{c.warps}m{c.m_tiles}n{c.split_n}a{c.ahead}p{c.positions}"
        return f"transposed-{sizes}{'-table' if c.table else ''}"
    if isinstance(config, GemmConfig):
        c = config
        return f"gemm-t{c.n_tiles}w{c.warps}m{c.block_m}k{c.split_k}s{c.stages}"
    if isinstance(config, DgradWgmmaConfig):
        return f"many-transposed-m{config.block_m}n{config.split_n}t{config.n_tiles}"
    if isinstance(config, GemmWgmmaConfig):
        return f"many-m{config.block_m}k{config.split_k}{'c' * (config.cluster > 1)}"
    return "dequantise"


if __name__ == "__main__":
    main()
