"""The fuzzer of the readers: each target runs, and finds a reader that is wrong."""

import fuzz_readers
import pytest
import torch
from fuzz_readers import COUNTS, TARGETS, Choices, checked

import fdk_formats.readers.awq
import fdk_formats.readers.conversion
import fdk_formats.readers.gguf_blocks
import fdk_formats.readers.gptq


def inputs(seeds, count=40):
    """Returns the seeds, or inputs of random bytes, of which the first only choose a seed."""
    torch.manual_seed(0)
    data = [bytes(torch.randint(256, (size % 24 + 1,)).tolist()) for size in range(count)]
    return seeds or [bytes([i]) for i in range(12)] + data


@pytest.mark.parametrize("name", list(TARGETS))
def test_targets_read_and_refuse(name):
    if name == "gguf":
        pytest.importorskip("gguf", reason="gguf, which writes the seeds and is the oracle")
    target, seeds = TARGETS[name]()
    COUNTS.clear()
    for data in inputs(seeds):
        checked(target)(data)
    assert COUNTS["read"] > 0
    assert COUNTS["refused"] > 0


@pytest.mark.parametrize(
    ("name", "module", "function", "wrong"),
    [
        ("gptq", "gptq", "group_permutation", lambda g_idx, k, groups: None),
        ("gptq", "gptq", "unpack_words", lambda words, bits: UNPACK(words, bits).flip(0)),
        ("awq", "awq", "_unpack", lambda words: UNPACK_AWQ(words).flip(1)),
        ("hqq", "conversion", "pack", lambda codes, bits: PACK(codes, bits) ^ 1),
        ("gguf", "gguf_blocks", "pack", lambda codes, bits: PACK(codes, bits) ^ 1),
    ],
)
def test_a_wrong_value_is_found(monkeypatch, name, module, function, wrong):
    if name == "gguf":
        pytest.importorskip("gguf", reason="gguf, which writes the seeds and is the oracle")
    target, seeds = TARGETS[name]()
    monkeypatch.setattr(f"fdk_formats.readers.{module}.{function}", wrong)
    with pytest.raises(AssertionError):  # noqa: PT012
        for data in inputs(seeds):
            target(data)


UNPACK = fdk_formats.readers.conversion.unpack_words
UNPACK_AWQ = fdk_formats.readers.awq._unpack
PACK = fdk_formats.readers.conversion.pack


def test_an_undocumented_exception_is_found(monkeypatch):
    target, _ = TARGETS["hqq"]()
    monkeypatch.setattr("fdk_formats.readers.hqq._bits", lambda meta: meta["none"].shape)
    with pytest.raises(RuntimeError):  # noqa: PT012
        monkeypatch.setattr("fdk_formats.readers.hqq._packing", lambda meta: torch.ones(2).view(3))
        target(b"\0")


def test_memory_is_watched():
    held = []

    def hungry(data):
        held.append(torch.ones(fuzz_readers.LIMIT_BYTES // 2))

    run = checked(hungry)
    COUNTS["inputs"] = 100  # after the first, which load libraries
    with pytest.raises(AssertionError, match=r"took [0-9]+ bytes"):
        run(b"")


def test_choices():
    choices = Choices(b"\x05\x01\x02\x03\x04")
    assert choices.below(4) == 1
    assert choices.below(1000) == 0x04030201 % 1000
    assert not choices.left
    assert choices.of("ab") == "a"
