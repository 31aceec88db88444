"""``fdk-bench kernels`` and ``fdk-bench compare``: y = x @ W_hat.T, alone and beside peers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fdk_bench.commands import options
from fdk_bench.commands.common import (
    Screen,
    check_pattern,
    checked,
    checked_activations,
    checked_backends,
    checked_device,
    checked_dtype,
    collect,
    finish,
    numbers,
    output_folder,
    prepare_environment,
    split,
    use_threads,
)

PEER_SECONDS = 120.0  # compilers and tuners of some would go on for minutes

if TYPE_CHECKING:
    from fdk_bench.kernels import KernelRun


@dataclass(frozen=True)
class Command:
    """What tells the two commands apart: their help, and what they measure when not told."""

    help: str
    ms: tuple[int, ...]
    bits: tuple[int, ...]
    against: str


COMMANDS = {
    "kernels": Command(
        help="""
        Time y = x @ W_hat.T; print time, share of the read floor and speed-up over 16 bits.

        Every answer is checked before it is timed. Weights rotate through more copies than the
        caches hold. On a GPU the calls are captured in a CUDA graph and the median replay is
        given; eager is the time of one call that the host starts. Default: a 4096 x 4096 layer at
        16, 8, 4, 3, 2 and 1 bits. Writes kernels.jsonl and kernels.md.

        Exit code: 0 all measured, 1 a case failed, 2 bad usage, 130 interrupted (Ctrl-C keeps
        what was measured).
        """,
        ms=(1, 16, 256),
        bits=(16, 8, 4, 3, 2, 1),
        against="none",
    ),
    "compare": Command(
        help="""
        Time every peer that is installed beside ours, in turns, in one run.

        16-bit layers of torch and of plain Triton, a compiled reference, tinygemm, torch's
        int4pack, bitsandbytes, gemlite, torchao, Humming and llama.cpp; those that are absent are
        named, with the reason. A peer's answer is checked against its own dequantised weight.
        Default: a 4096 x 4096 layer at 16 and 4 bits. Writes compare.jsonl and compare.md.

        Exit code: 0 all measured, 1 a case failed, 2 bad usage, 130 interrupted (Ctrl-C keeps
        what was measured).
        """,
        ms=(1, 16),
        bits=(16, 4),
        against="all",
    ),
}


def kernels(
    context: typer.Context,
    m: options.MsOption = None,
    k: options.KsOption = None,
    n: options.NsOption = None,
    shapes: options.ShapesOption = None,
    bits: options.BitsOption = None,
    formats: options.FormatsOption = None,
    group_size: options.GroupOption = "64",
    dtype: options.DtypeOption = "bf16",
    device: options.DeviceOption = None,
    backend: options.BackendOption = None,
    activations: options.ActivationsOption = None,
    against: options.AgainstOption = None,
    include: options.IncludeOption = "",
    exclude: options.ExcludeOption = None,
    seconds: options.SecondsOption = 0.5,
    copies: options.CopiesOption = None,
    inner_reps: options.InnerOption = None,
    outer_reps: options.OuterOption = None,
    peer_seconds: options.PeerSecondsOption = None,
    threads: options.ThreadsOption = None,
    json_lines: options.JsonOption = False,
    out: options.OutOption = None,
) -> None:
    """Both commands; the name that the user typed tells which."""
    prepare_environment()
    from fdk_bench.cases import formats_of, shapes_of  # loads torch, which --help must not wait for
    from fdk_bench.kernels import KernelRun
    from fdk_bench.peers import peers_named

    name = str(context.info_name)
    defaults = COMMANDS[name]
    use_threads(threads)
    check_pattern("--include", include)
    check_pattern("--exclude", exclude or "")
    checked_dtype(dtype)
    on = checked_device(device)
    ks, ns = numbers("-k", k, ()), numbers("-n", n, ())
    if shapes and (ks or ns):
        raise typer.BadParameter(f"--shapes: wanted no -n and -k beside it, got {','.join(shapes)}")
    for option, time in (("--seconds", seconds), ("--peer-seconds", peer_seconds)):
        if time == float("inf"):
            raise typer.BadParameter(f"{option}: wanted a time that ends, got inf")
    widths = numbers("--bits", bits, defaults.bits)
    run = KernelRun(
        shapes=checked(lambda: shapes_of(split(shapes, "--shapes"), ns, ks, (4096, 4096))),
        ms=numbers("-m", m, defaults.ms),
        formats=checked(lambda: formats_of(widths, split(formats, "--format"), group_size, dtype)),
        dtype=dtype,
        device=on,
        backends=checked_backends(split(backend, "--backend") or ["auto"]),
        activations=checked_activations(split(activations, "--activations") or ["float"], on),
        peers=checked(lambda: peers_named(split(against, "--against") or [defaults.against])),
        include=include,
        exclude=exclude,
        copies=copies,
        inner=inner_reps,
        outer=outer_reps,
        seconds=seconds,
        peer_seconds=peer_seconds or (PEER_SECONDS if on == "cuda" else None),
    )
    if not run.count():
        raise typer.BadParameter("--include and --exclude leave no case")
    _run(name, run, output_folder(out, name), json_lines)


def _run(command: str, run: "KernelRun", folder: Path, json_lines: bool) -> None:
    from fdk_bench.kernel_tables import kernel_markdown, kernel_table, stored_bits
    from fdk_bench.kernels import absent, measure
    from fdk_bench.machine import facts
    from fdk_bench.records import counted

    total = run.count()
    gathered = facts(command, run.device)
    threads = f", {counted(gathered.threads)}" if run.device == "cpu" else ""
    caption = f"{gathered.device}{threads}, {run.dtype}; floor: weight, x and y read once"
    screen = Screen(total, to_stderr=json_lines)
    with screen.live():
        rows, interrupted = collect(
            measure(run, screen.step),
            gathered,
            folder / f"{command}.jsonl",
            json_lines=json_lines,
            show=lambda rows: screen.update(len(rows), kernel_table(rows, caption, screen.width)),
        )
    screen.console.print(kernel_table(rows, caption, screen.width))
    if rows:
        text = f"{kernel_markdown(rows)}\n{caption}\n"
        (folder / f"{command}.md").write_text(text, encoding="utf-8")
    for peer in run.peers:
        if told := stored_bits(rows, peer.name):
            text = f"{peer.name}: {peer.note}; {told}"
            screen.console.print(text, highlight=False, soft_wrap=True)
    for name, reason in absent(run).items():
        screen.console.print(f"not measured: {name}: {reason}", highlight=False, soft_wrap=True)
    finish(rows, total, interrupted, screen, folder)
