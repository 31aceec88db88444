"""Greedy choice of the next tokens on the device: argmax, end of sequence, padding, counters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fdk_transformers.decode.llama_ops import has_kernels

MOST_ENDS = 8  # tokens that end a sequence


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences that are being decoded, on the device; ``choose`` writes to most of it.

    Attributes:
        tokens: ``[b, 1, int64]``, the last token of each.
        positions: ``[b, int64]``, of the last tokens: their number of earlier tokens.
        ids: ``[b, length, int64]``, the new tokens of each.
        columns: ``[b, int64]``, the number of new tokens.
        unfinished: ``[b, int64]``, 1 until a sequence has ended, then 0.
        ends: ``[MOST_ENDS, int64]``, tokens that end a sequence; -1 for none.
        pad: ``[1, int64]``, the token of sequences that have ended.
    """

    tokens: Tensor
    positions: Tensor
    ids: Tensor
    columns: Tensor
    unfinished: Tensor
    ends: Tensor
    pad: Tensor

    @staticmethod
    def of(tokens: Tensor, positions: Tensor, length: int) -> "Sequences":
        """Return sequences of at most ``length`` new tokens, see ``restart``."""
        batch, device = tokens.shape[0], tokens.device
        return Sequences(
            tokens=tokens,
            positions=positions,
            ids=torch.zeros(batch, length, dtype=torch.int64, device=device),
            columns=torch.zeros(batch, dtype=torch.int64, device=device),
            unfinished=torch.ones(batch, dtype=torch.int64, device=device),
            ends=torch.full((MOST_ENDS,), -1, device=device),
            pad=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def restart(self, ends: Tensor | None, pad: Tensor | None) -> None:
        """Begin new sequences.

        Args:
            ends: at most ``MOST_ENDS`` tokens that end a sequence, or None.
            pad: ``[]`` or ``[1]``, the token of sequences that have ended; needed with ``ends``.
        """
        self.columns.zero_()
        self.unfinished.fill_(1)
        self.ends.fill_(-1)
        if ends is not None and pad is not None:
            self.ends[: ends.numel()].copy_(ends.flatten())
            self.pad.copy_(pad.flatten())


def choose(logits: Tensor, to: Sequences) -> None:
    """Append the first argmax of each row to its sequence, or the pad token if it has ended.

    Args:
        logits: ``[b, vocabulary]``.
        to: the sequences, written in place.
    """
    if has_kernels(logits.device):
        from fdk_transformers.decode.argmax_kernel import choose_by_kernel

        choose_by_kernel(logits, to)
        return
    chosen = torch.where(to.unfinished == 1, logits.argmax(-1), to.pad)
    to.ids.scatter_(1, to.columns[:, None], chosen[:, None])
    to.unfinished.mul_(~torch.isin(chosen, to.ends))
    to.tokens.copy_(chosen[:, None])
    to.columns.add_(1)
    to.positions.add_(1)
