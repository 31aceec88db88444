"""Kernels of decode/ in Triton's interpreter against torch; run by test_decode.py."""

import sys

import pytest
import torch

from fdk_bench.decode import attention, gemv_bf16
from fdk_bench.decode.argmax_kernel import argmax_step
from fdk_bench.decode.llama import TorchOps, TritonOps, rotary_table

OURS, THEIRS = TritonOps(), TorchOps()


def attend(heads, kv_heads, head_dim, batch, length, position, parts, *config):
    """Run a step with the cache cut into parts."""
    OURS.crowded = True
    attention.parts_of = lambda *sizes: parts
    attention.config_for = lambda *sizes: attention.AttendConfig(*config)
    step(heads, kv_heads, head_dim, batch, length, position)
    assert not OURS.counters.any()


def short(heads, kv_heads, head_dim, batch, length, position):
    """Run a step with all of the cache at once; it is float32 only here."""
    attention.is_short = lambda cache: True
    calls = []
    whole = attention.attend_short
    attention.attend_short = lambda *of: calls.append(of) or whole(*of)
    step(heads, kv_heads, head_dim, batch, length, position)
    assert len(calls) == 2


def step(heads, kv_heads, head_dim, batch, length, position):
    """Run a step twice; entries of the cache that do not exist yet are NaN."""
    OURS.prepare(batch, kv_heads, "cpu")
    qkv = torch.randn(batch, 1, (heads + 2 * kv_heads) * head_dim)
    cache = torch.randn(2, batch, kv_heads, length, head_dim)
    cache[:, :, :, position:] = torch.nan
    mine = cache.clone()
    cache[:, :, :, position + 1 :] = 0  # torch multiplies masked entries
    cos_sin, positions = rotary_table(length, head_dim, "cpu"), torch.tensor([position])
    expected = THEIRS.attend(qkv, cos_sin, positions, cache, heads)
    for _ in range(2):  # the counters must be as before
        y = OURS.attend(qkv, cos_sin, positions, mine, heads)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine[:, :, :, : position + 1], cache[:, :, :, : position + 1])
    assert mine[:, :, :, position + 1 :].isnan().all()


def refused(heads, kv_heads, head_dim):
    """Check that errors name the shapes that the kernel does not support."""
    qkv = torch.randn(1, 1, (heads + 2 * kv_heads) * head_dim)
    cache, position = torch.zeros(2, 1, kv_heads, 64, head_dim), torch.tensor([3])
    cos_sin = rotary_table(64, head_dim, "cpu")
    group = heads // kv_heads
    said = f"got {group} and {head_dim}"
    for attend in (attention.attend, attention.attend_short):
        with pytest.raises(ValueError, match=said):
            attend(qkv, cos_sin, position, cache)


def prompt(heads, kv_heads, head_dim, batch, length, tokens):
    """Run a prompt of several tokens; the rest of the cache stays as it was."""
    qkv = torch.randn(batch, tokens, (heads + 2 * kv_heads) * head_dim)
    mine = torch.full((2, batch, kv_heads, length, head_dim), torch.nan)
    cache = mine.clone()
    cos_sin, positions = rotary_table(length, head_dim, "cpu"), torch.arange(tokens)
    expected = THEIRS.attend(qkv, cos_sin, positions, cache, heads)
    y = OURS.attend(qkv, cos_sin, positions, mine, heads)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, cache, equal_nan=True)


def rest(rows, dim):
    """Run sums with norms, and SwiGLU."""
    x, added, weight = torch.randn(rows, 1, dim), torch.randn(rows, 1, dim), torch.randn(dim)
    for y, expected in zip(
        OURS.add_norm(x, added, weight), THEIRS.add_norm(x, added, weight), strict=True
    ):
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    gate_up = torch.randn(rows, 1, 2 * dim)
    torch.testing.assert_close(OURS.swiglu(gate_up), THEIRS.swiglu(gate_up), rtol=1e-5, atol=1e-6)


def gemv(n, k):
    """Run one row; the program of the last rows has fewer."""
    x, W = torch.randn(1, 1, k), torch.randn(n, k)
    y = gemv_bf16.gemv(x, W)
    assert y.shape == (1, 1, n)
    torch.testing.assert_close(y, x @ W.T, rtol=1e-5, atol=1e-6 * k)


def choice(batch, vocabulary):
    """Check that the first of equals is chosen, and the position."""
    wide = torch.randn(batch, 3, vocabulary + 5)
    wide[..., vocabulary:] = 99.0
    strided = wide[:, -1, :vocabulary]  # a slice, as of some models
    strided[0, [7, vocabulary - 1]] = 9.0
    for logits in (strided.clone(), strided, strided.T.contiguous().T):
        tokens, position = torch.zeros(batch, 1, dtype=torch.int64), torch.tensor([41])
        argmax_step(logits, tokens, position)
        assert tokens[0] == 7
        assert torch.equal(tokens, logits.argmax(-1, keepdim=True))
        assert position.tolist() == [42]


WHAT = {f.__name__: f for f in (attend, short, refused, prompt, rest, gemv, choice)}
for case in sys.argv[2:]:
    print(*sys.argv[1:2], case, file=sys.stderr)  # the last one is what fails
    torch.manual_seed(0)
    WHAT[sys.argv[1]](*map(int, case.split("-")))
