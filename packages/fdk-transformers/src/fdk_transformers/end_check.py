"""The end of generation, noticed without waiting for the device."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AHEAD = 2  # tokens that the host is ahead of a GPU: enough for it to be busy, and few to discard


@dataclass(frozen=True, eq=False)
class Slot:
    """Host memory for the state after one token.

    Attributes:
        unfinished: ``[b, int64]``, 0 for sequences that have ended.
        tokens: ``[b, int64]``.
        copied: event of a GPU after both copies; None on a CPU.
    """

    unfinished: Tensor
    tokens: Tensor
    copied: torch.cuda.Event | None

    @staticmethod
    def of(batch: int, device: torch.device) -> "Slot":
        """Return memory for ``batch`` sequences on a device."""
        on_gpu = device.type == "cuda"
        unfinished, tokens = (
            torch.zeros(batch, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)
        )
        return Slot(unfinished, tokens, torch.cuda.Event() if on_gpu else None)


class EndCheck:
    """Notices the end of all sequences, and streams their tokens, some tokens late.

    transformers' own check for MPS is one token late; its loop for a GPU waits at each token.

    Args:
        batch: number of sequences.
        device: their device.
        streamer: receives the tokens as ``generate`` of transformers hands them over, or None.
        ahead: tokens that the host may be ahead; None chooses: none on a CPU.
    """

    def __init__(
        self, batch: int, device: torch.device, streamer: Any, ahead: int | None = None
    ) -> None:
        self.ahead = (AHEAD if device.type == "cuda" else 0) if ahead is None else ahead
        self.streamer = streamer
        self._free = [Slot.of(batch, device) for _ in range(self.ahead + 1)]
        self._pending: deque[Slot] = deque()

    def add(self, unfinished: Tensor, tokens: Tensor) -> bool:
        """Return True if all sequences are known to have ended.

        Args:
            unfinished: ``[b, int64]`` after the last token.
            tokens: ``[b, int64]``, the last token of each.
        """
        slot = self._free.pop()
        slot.unfinished.copy_(unfinished, non_blocking=True)
        slot.tokens.copy_(tokens, non_blocking=True)
        if slot.copied is not None:
            slot.copied.record()
        self._pending.append(slot)
        while len(self._pending) > self.ahead or (self._pending and _is_copied(self._pending[0])):
            if self._read_first():
                return True
        return False

    def finish(self) -> int:
        """Wait for the rest; return the number of last tokens that came after the end."""
        while self._pending:
            if self._read_first():
                break
        return len(self._pending)

    def _read_first(self) -> bool:
        slot = self._pending.popleft()
        if slot.copied is not None:
            slot.copied.synchronize()
        self._free.append(slot)
        if self.streamer is not None:
            self.streamer.put(slot.tokens.clone())
        return not slot.unfinished.any()


def _is_copied(slot: Slot) -> bool:
    return slot.copied is not None and slot.copied.query()
