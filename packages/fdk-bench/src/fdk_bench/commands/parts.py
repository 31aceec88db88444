"""What ``fdk-bench record`` runs: commands of fdk-bench, each a file of rows."""

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
PEERS = ("-b", "16,8,4,2,1")
FORMATS = "bf16,kmeans4,int4,nf4,kmeans3,int3,kmeans2,int2,int2-search,kmeans1,int1"

# Under ten minutes on two cores.
ON_CPU = (
    Part("kernels", "kernels", (*KERNELS, "--seconds", "0.3")),
    Part("kernels-1-thread", "kernels", (*KERNELS, "--seconds", "0.3", "--threads", "1")),
    # Sixteen rows at 4 bits, where peers have kernels of their own.
    Part("compare", "compare", (*PEERS, "-m", "1,16", "--exclude", r"^m16-.*-\D+[821]-g")),
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


def _models(name: str, size: str, bits: str, batches: str, *more: str) -> Part:
    arguments = ("--size", size, "--batch-size", batches, *more, "-b", bits, "--reps", "40")
    return Part(name, "models", arguments, limit=90)


# Ours in the formats that each backend is for; peers once for each width. The compiled reference
# multiplies by cuBLAS whatever m, so a few rows of it tell.
OURS = ("--format", "custom,int", "--backend", "marlin-lut,marlin,triton")
TOLD_TWICE = r"-custom\d.*-marlin$|-int\d.*-cuda-(?!marlin$)|^m(64|256)-.*compile$"


def _peers(name: str, bits: str, shapes: tuple[str, ...]) -> Part:
    """Ours beside every peer in one run; compiled ahead, a process for each shape and width."""
    ms = ("-m", "1,16,64,256")
    what = (*ms, *OURS, "--exclude", TOLD_TWICE, "--peer-seconds", "30")
    quick = ("--copies", "1", "--inner-reps", "1", "--outer-reps", "1")
    return Part(
        name,
        "compare",
        (*what, "--shapes", ",".join(shapes), "-b", f"16,{bits}", "--outer-reps", "9"),
        warm=tuple(
            (*what, "--shapes", shape, "-b", width, *quick)
            for shape in shapes
            for width in bits.split(",")
        ),
        limit=200,
    )


# What matters most first: what there is no time for is left as it was.
ON_GPU = (
    _models("models-12b", "12b", "16,4,1", "1,4,16,64,256"),
    _peers("compare", "4,1,2,3,8", ("8192x8192", "28672x8192", "4096x4096")),
    _models("models-31b", "31b", "16,4,1", "1,16,64"),
    _models("models-2048", "12b", "16,4", "1", "--context", "2048"),
    _models("models-2048-31b", "31b", "16,1", "1", "--context", "2048"),
    Part(
        "kernels",
        "kernels",
        ("--shapes", "4096x4096,8192x8192,28672x8192", "-m", "1,4,16,64,256,1024"),
        limit=60,
    ),
    _models("models-4b", "4b", "16,4,1", "1,4,16,64,256"),
)
