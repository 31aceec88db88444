"""Other projects' kernels for y = x @ W.T, each optional and named when absent."""

from collections.abc import Sequence

from fdk_bench.peers.base import Peer, Prepared, WrongAnswerError, check
from fdk_bench.peers.dense import CompiledReference, Dense, DenseTriton
from fdk_bench.peers.llama_cpp import LLAMA_CPP
from fdk_bench.peers.packages import (
    BitsAndBytes,
    GemLite,
    Humming,
    Int4PackCpu,
    TinyGemm,
    TorchAO,
)

__all__ = ["PEERS", "Dense", "Peer", "Prepared", "WrongAnswerError", "check", "peers_named"]

# In the order of the tables. torch's 16-bit layer is measured in every run and is not listed.
PEERS: tuple[Peer, ...] = (
    DenseTriton(),
    CompiledReference(),
    TinyGemm(),
    Int4PackCpu(),
    BitsAndBytes(),
    GemLite(),
    TorchAO(),
    Humming(),
    *LLAMA_CPP,
)


def peers_named(names: Sequence[str]) -> list[Peer]:
    """Return the peers of some names; ``all`` selects every peer, ``none`` selects no peer.

    Raises:
        ValueError: for an unknown name, and for ``none`` with others.
    """
    if "none" in names and set(names) != {"none"}:
        raise ValueError(f"--against: wanted none alone, or peers; got {', '.join(names)}")
    if "all" in names:
        return list(PEERS)
    known = {peer.name: peer for peer in PEERS}
    if unknown := [name for name in names if name not in known and name != "none"]:
        raise ValueError(
            f"--against: wanted all, none or {', '.join(known)}; got {', '.join(unknown)}"
        )
    return [known[name] for name in dict.fromkeys(names) if name in known]
