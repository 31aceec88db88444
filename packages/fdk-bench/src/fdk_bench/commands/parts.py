"""What ``fdk-bench record`` runs: commands of fdk-bench, each a file of rows."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A command of fdk-bench that a reader can run alone; its rows are a file of that name.

    Attributes:
        warm: arguments of the same command that compile what it needs, each in a process of its
            own; what they measure is thrown away.
        limit: seconds after which it is given up.
    """

    name: str
    benchmark: str
    arguments: tuple[str, ...]
    warm: tuple[tuple[str, ...], ...] = ()
    limit: float = float("inf")


# Every width at one row of x, a few and many; the larger layer at one row alone, for time.
KERNELS = ("-k", "4096,8192", "-m", "1,2,16,64,512", "--include", "^m1-|-k4096-")
PEERS = ("-k", "4096,8192", "-b", "16,8,4,2,1")
FORMATS = "bf16,kmeans4,int4,nf4,kmeans3,int3,kmeans2,int2,int2-search,kmeans1,int1"

# Under ten minutes on two cores.
ON_CPU = (
    Part("kernels", "kernels", (*KERNELS, "--seconds", "0.3")),
    Part("kernels-1-thread", "kernels", (*KERNELS, "--seconds", "0.3", "--threads", "1")),
    # Sixteen rows at 4 bits, where peers have kernels of their own.
    Part(
        "compare",
        "compare",
        (*PEERS, "-m", "1,16", "--exclude", r"^m16-(n8192|.*-\D+[821]-g)"),
    ),
    Part("compare-1-thread", "compare", (*PEERS, "-m", "1", "--threads", "1")),
    Part(
        "models",
        "models",
        (
            *("--size", "1b", "-b", "16,4,2,1", "--batch-size", "1"),
            *("--context", "32", "--reps", "15", "--no-compile"),
        ),
    ),
    Part("accuracy", "accuracy", ("--format", FORMATS, "--calibrate", "packaged")),
)


def _models(name: str, size: str, bits: str, batches: str, *more: str, limit: float = 90) -> Part:
    """Models of one size; compiled ahead, by a process of one block for each width."""
    arguments = ("--size", size, "--batch-size", batches, *more)
    warm = tuple(
        (*arguments, "-b", width, "--reps", "1", "--layers", "1") for width in bits.split(",")
    )
    return Part(name, "models", (*arguments, "-b", bits, "--reps", "40"), warm=warm, limit=limit)


# Ours in the formats that each backend is for; peers once for each width, at 256 rows and more
# Humming alone (H200, 8192 x 8192, 4 bits, m = 256: 54 us, bitsandbytes 131, tinygemm 1255). The
# compiled reference multiplies by cuBLAS whatever m: one case tells.
OURS = "marlin-lut,marlin,triton"
PEERS_ON_GPU = "torch.compile,tinygemm,bitsandbytes,gemlite,humming"
EACH_IN_ITS_FORMAT = r"-custom\d.*-marlin$|-int\d.*-cuda-(?!marlin$)"
LEFT_OUT = EACH_IN_ITS_FORMAT + (
    r"|^m(256|1024|4096)-.*-(tinygemm|bitsandbytes|gemlite)$|^m(1024|4096)-.*-triton$"
    r"|^m(4|16|64|256|1024|4096)-.*compile$|-custom[1238].*compile$"
)
WIDTHS = ("4", "1", "2", "3", "8")
QUICK = ("--copies", "1", "--inner-reps", "1", "--outer-reps", "1")
MANY_ROWS = "64,256,1024,4096"
# Processes that compile. With two a width (16 cores, an H200's host) those of ours took 46 to 55 s,
# and of Humming none had ended after 55; timing then took 8 s, compiling what was left 42.
# Gemlite has no kernels of 3 bits.
COMPILED = (
    ("humming", "1,4", WIDTHS),
    ("humming", "16,64", WIDTHS),
    ("humming", "256,1024", WIDTHS),
    ("humming", "4096", WIDTHS),
    ("gemlite", "1,4", ("4", "1", "2", "8")),
    ("gemlite", "16,64", ("4", "1", "2", "8")),
    ("(?!humming|gemlite)", "1,4,16", WIDTHS),
    ("(?!humming|gemlite)", MANY_ROWS, WIDTHS),
)
# Shapes for many rows alone, which no case of goals.jsonl has: ours, cuBLAS and Humming.
COMPILED_MANY_ROWS = (
    ("humming", "64,256", WIDTHS),
    ("humming", "1024,4096", WIDTHS),
    ("(?!humming)", MANY_ROWS, WIDTHS),
)


def _compare(
    shape: str,
    ms: str = f"1,4,16,{MANY_ROWS}",
    left_out: str = LEFT_OUT,
    compiled: Sequence[tuple[str, str, Sequence[str]]] = COMPILED,
    ours: str = OURS,
    peers: str = PEERS_ON_GPU,
) -> Part:
    """Ours beside every peer in one run; compiled ahead, by processes for each width."""
    contenders = "--format", "custom,int", "--backend", ours, "--against", peers
    what = (*contenders, "--exclude", left_out, "--shapes", shape)
    rest = ("-b", ",".join(("16", *WIDTHS)), "--peer-seconds", "30", "--outer-reps", "9")
    return Part(
        f"compare-{shape}",
        "compare",
        ("-m", ms, *what, *rest),
        warm=tuple(
            ("-m", few, *what, "-b", width, "--include", f"-cuda-{by}", *QUICK)
            for by, few, widths in compiled
            for width in widths
        ),
        limit=120,
    )


def _compare_many_rows(shape: str) -> Part:
    named = EACH_IN_ITS_FORMAT, COMPILED_MANY_ROWS, "marlin-lut,marlin", "humming"
    return _compare(shape, MANY_ROWS, *named)


# Every width of a codebook at the three shapes of `kernels`; Triton and Humming where they may be
# ahead. Two processes compile a width.
ALL_WIDTHS = ("4", "1", "2", "3", "5", "6", "7", "8")
WIDTHS_OF_CODEBOOKS = (
    *("--format", "custom", "--backend", "marlin-lut,triton", "--against", "humming"),
    *("--exclude", r"^m(256|1024)-.*-triton$|^m1024-.*-humming$"),
    *("--shapes", "4096x4096,8192x8192,28672x8192"),
)


def _widths() -> Part:
    warm = (
        ("-m", ms, *WIDTHS_OF_CODEBOOKS, "-b", width, "--include", f"-cuda-{by}", *QUICK)
        for by, ms in (("humming", "1,4,16,64,256"), ("(?!humming)", "1,4,16,64,256,1024"))
        for width in ALL_WIDTHS
    )
    rest = ("-b", ",".join(("16", *ALL_WIDTHS)), "--peer-seconds", "30", "--outer-reps", "9")
    arguments = ("-m", "1,4,16,64,256,1024", *WIDTHS_OF_CODEBOOKS, *rest)
    return Part("widths", "compare", arguments, warm=tuple(warm), limit=120)


# What matters most first: what there is no time for is left as it was.
ON_GPU = (
    _models("models-12b", "12b", "16,4,1", "1,4,16,64,256"),
    _compare("8192x8192"),
    _compare("28672x8192"),
    _compare("4096x4096"),
    _compare("4096x14336"),
    _compare("14336x4096"),
    _compare_many_rows("6144x4096"),
    _compare_many_rows("21504x6144"),
    _compare_many_rows("128256x4096"),
    # A prompt of 256 sequences takes 2.4 to 2.9 s, and is read four times in each format.
    _models("models-31b", "31b", "16,4,1", "1,4,16,64,256", limit=130),
    _models("models-2048", "12b", "16,4", "1", "--context", "2048"),
    _models("models-2048-31b", "31b", "16,1", "1", "--context", "2048"),
    Part(
        "kernels",
        "kernels",
        ("--shapes", "4096x4096,8192x8192,28672x8192", "-m", "1,4,16,64,256,1024"),
        limit=60,
    ),
    _widths(),
    _models("models-4b", "4b", "16,4,1", "1,4,16,64,256"),
    # What fusing gives: the same steps with seven linear layers a block instead of four.
    _models("models-12b-apart", "12b", "4", "1,64", "--no-fuse"),
)
