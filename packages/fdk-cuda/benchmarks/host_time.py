"""Time the host in eager calls at m = 1: nn.Linear against layers of each backend.

    python packages/fdk-cuda/benchmarks/host_time.py [--rounds 300]

Microseconds per call of small layers, whose kernels end before the next call, so that the host is
what takes the time. Layers run in turns, 20 timed calls each, after 5 that fill its caches.
"""

import statistics
import time

import torch
from _timing import Row, argument_parser, has_gpu, write_rows

from fdk_formats.linear import QuantisedLinear

SIZE, WARM_CALLS, CALLS = 1024, 5, 20
LAYERS = (
    ("triton", "nf4-g64"),
    ("triton", "affine4-g64"),
    ("marlin-lut", "nf4-g64"),
    ("marlin", "affine4-g64"),
)
LINE = "{layer:34} {us:5.2f} us per call, at least {least:5.2f}"


def layers() -> dict[str, torch.nn.Module]:
    """Make the layers to call, with a bias and without."""
    found: dict[str, torch.nn.Module] = {}
    for bias in (True, False):
        linear = torch.nn.Linear(SIZE, SIZE, bias, device="cuda", dtype=torch.bfloat16)
        suffix = "" if bias else ", no bias"
        found[f"nn.Linear{suffix}"] = linear
        for backend, format in LAYERS:
            layer = QuantisedLinear.from_linear(linear, format, backend=backend)
            found[f"{backend} {format}{suffix}"] = layer
    return found


@torch.no_grad()
def host_times(rounds: int) -> list[Row]:
    """Return a row for each layer."""
    x = torch.randn(1, SIZE, device="cuda").bfloat16()
    called = layers()
    times: dict[str, list[float]] = {name: [] for name in called}
    for _ in range(rounds + 1):  # the first round compiles
        for name, layer in called.items():
            for _ in range(WARM_CALLS):
                layer(x)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                layer(x)
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return [
        {"layer": name, "us": statistics.median(own[1:]), "least": min(own[1:])}
        for name, own in times.items()
    ]


def main() -> None:
    """Read the command line and time every layer."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    if has_gpu():
        write_rows(args.out, host_times(args.rounds), LINE.format_map)


if __name__ == "__main__":
    main()
