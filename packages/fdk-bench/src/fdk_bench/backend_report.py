"""Report on this machine: the backend of each format, and why the others do not support it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fdk_bench.cases import DTYPES, canonical
from fdk_bench.machine import caches, device_name, module_or_none
from fdk_bench.peers import PEERS
from fdk_formats import Format, NoBackendError, Problem, select, unsupported_reasons

SAMPLED_CODEBOOKS = ("custom", "int", "affine")
SAMPLED_BITS = (8, 7, 6, 5, 4, 3, 2, 1)


@dataclass(frozen=True)
class Machine:
    """Hardware of this machine.

    Attributes:
        cpu: the processor's name.
        cores: number of cores that this process may use.
        memory: bytes; None where the system does not report it.
        caches: bytes by level.
        instruction_sets: sets that fdk-cpu runs here, simplest first; empty without fdk-cpu.
        instruction_set: the one in use, or None.
        gpus: each with its properties by name.
    """

    cpu: str
    cores: int
    memory: int | None
    caches: dict[str, int]
    instruction_sets: list[str]
    instruction_set: str | None
    gpus: list[dict[str, Any]]


@dataclass(frozen=True)
class Support:
    """Answers of the backends for one problem.

    Attributes:
        format, device: format and device of the problem.
        chosen: the backend that ``auto`` picks, or None.
        reasons: why the other backends do not support it, by name.
        kernels: report of which kernel serves which m, for backends of fdk-cuda.
    """

    format: str
    device: str
    chosen: str | None
    reasons: dict[str, str]
    kernels: str = ""


def machine() -> Machine:
    """Return the hardware, as the system, torch and fdk-cpu report it."""
    fdk_cpu = module_or_none("fdk_cpu")
    return Machine(
        cpu=device_name("cpu"),
        cores=_cores(),
        memory=_memory(),
        caches=caches(),
        instruction_sets=fdk_cpu.instruction_sets() if fdk_cpu else [],
        instruction_set=fdk_cpu.instruction_set() if fdk_cpu else None,
        gpus=[_gpu(i) for i in range(torch.cuda.device_count())],
    )


def supports(
    formats: Sequence[str], n: int, k: int, dtype: str, devices: Sequence[str]
) -> Iterator[Support]:
    """Yield the backends' answers for each format and device."""
    for device in devices:
        for text in formats:
            format = Format.parse(text)
            try:
                format.group_size_for(k)
            except ValueError as error:
                yield Support(text, device, None, {"every backend": str(error)})
                continue
            # A layer rotates x itself.
            problem = Problem(format.unrotated, n, k, DTYPES[dtype], torch.device(device))
            reasons = {
                name: reason for name, reason in unsupported_reasons(problem).items() if reason
            }
            try:
                chosen = select(problem).name
            except NoBackendError:
                chosen = None
            yield Support(text, device, chosen, reasons, _kernels(problem, chosen))


def _kernels(problem: Problem, chosen: str | None) -> str:
    fdk_cuda = module_or_none("fdk_cuda")
    return "" if fdk_cuda is None else str(fdk_cuda.dispatch_report.explain(problem, chosen))


def sampled_formats(group_size: str = "64") -> list[str]:
    """Return every width of an arbitrary codebook, of the integer grid and of an affine one."""
    return [
        canonical(f"{codebook}{bits}", group_size)
        for codebook in SAMPLED_CODEBOOKS
        for bits in SAMPLED_BITS
    ]


def missing_peers() -> dict[str, str | None]:
    """Return what each peer needs to run here, or None, by name."""
    return {peer.name: peer.missing() for peer in PEERS}


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = (line.split()[1] for line in lines if line.startswith("MemTotal"))
    return next((int(size) << 10 for size in kibibytes), None)


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "L2": properties.L2_cache_size,
        "CUDA of torch": torch.version.cuda,
    }
