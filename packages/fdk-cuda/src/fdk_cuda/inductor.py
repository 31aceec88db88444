"""Programmatic dependent launch (PDL) for Inductor's kernels between fdk's.

With ``triton.enable_pdl``, a kernel of Inductor lets the next one start once it has read its
inputs, and waits for the kernel before it only if it reads what that one wrote. Neither suits
kernels of fdk, which let the next one start first and wait then:

- A kernel two places ahead may still run. Of three products in a row that one kernel reads, it
  would wait for the last.
- Reading the inputs takes most of a norm's time, so the product after it hardly starts early.

Here every kernel lets the next one start at once, and then waits, before it reads or writes
anything. As each waits for the one before it, all before that are complete, too; and a product
copies its first weights while the kernels ahead of it run.
"""

from typing import Any

import torch

from fdk_formats.torch_internals import inductor_kernel_class

# Methods of Inductor's kernels in torch 2.11 to 2.13, called before a load or a store, after a
# load, and with the finished code.
REPLACED = ("_handle_pdl_before_access", "_handle_pdl_after_load", "_filter_pdl")
READ = ("_enable_pdl_codegen", "GDC_LAUNCH", "GDC_WAIT")
# Tells code in torch's caches of compiled graphs from what torch itself generates.
CACHE_TAG = "fdk-early-kernels"


def start_kernels_early() -> bool:
    """Lets kernels that Inductor generates from now on start the next one first, then wait.

    It changes nothing unless ``triton.enable_pdl`` is on, and repeated calls change nothing.

    Returns:
        Whether this torch has what is changed. Otherwise ``triton.enable_pdl`` must be off.
    """
    kernel_class = inductor_kernel_class()
    if not all(hasattr(kernel_class, name) for name in REPLACED + READ):
        return False
    for name, method in zip(REPLACED, (_write_nothing, _write_nothing, _begin), strict=True):
        setattr(kernel_class, name, method)
    settings: Any = torch.compiler.config
    if CACHE_TAG not in settings.cache_key_tag:
        settings.cache_key_tag += CACHE_TAG
    return True


def _write_nothing(self: Any, buffer: Any, *values: object, consider_reads: bool = False) -> None:
    """Takes the place of what writes a wait or a start beside an access."""


def _begin(self: Any, code: Any) -> None:
    """Puts the start of the next kernel and the wait ahead of all else."""
    if self._enable_pdl_codegen():
        code._lines = [self.GDC_LAUNCH, self.GDC_WAIT, *code._lines]
