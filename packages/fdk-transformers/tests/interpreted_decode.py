"""Kernels of decode/ in Triton's interpreter against torch; run by test_decode.py."""

import sys

import pytest
import torch

from fdk_formats import quantise_model
from fdk_transformers.decode import argmax_kernel, attention, gemv_bf16, next_token
from fdk_transformers.decode.llama_ops import HeadNorm, TorchOps, TritonOps
from fdk_transformers.decode.llama_step import LlamaStep
from fdk_transformers.decode.next_token import Sequences

OURS, THEIRS = TritonOps(), TorchOps()
CPU = torch.device("cpu")


def attend(heads, kv_heads, head_dim, batch, length, position, norm, parts, *config):
    """Run a step with the cache cut into parts."""
    OURS.crowded = True
    attention.parts_of = lambda *sizes: parts
    attention.config_for = lambda *sizes: attention.AttendConfig(*config)
    step(heads, kv_heads, head_dim, batch, length, position, norm)
    assert not OURS.counters.any()


def short(heads, kv_heads, head_dim, batch, length, position, norm):
    """Run a step with all of the cache at once; it is float32 only here."""
    attention.is_short = lambda cache: True
    calls = []
    whole = attention.attend_short
    attention.attend_short = lambda *of: calls.append(of) or whole(*of)
    step(heads, kv_heads, head_dim, batch, length, position, norm)
    assert len(calls) == 2


def step(heads, kv_heads, head_dim, batch, length, position, norm):
    """Run a step twice; entries of the cache that do not exist yet are NaN.

    Sequences after the first have fewer tokens.
    """
    OURS.prepare(batch, kv_heads, CPU)
    qkv = torch.randn(batch, 1, (heads + 2 * kv_heads) * head_dim)
    positions = (position - 7 * torch.arange(batch)).clamp(min=0)
    cache = torch.randn(2, batch, kv_heads, length, head_dim)
    absent = (torch.arange(length) >= positions[:, None])[None, :, None, :, None]
    mine = torch.where(absent, torch.nan, cache)
    cache = torch.where(absent, 0.0, cache)  # torch multiplies masked entries
    cos_sin, norms = torch.randn(2, length, head_dim), norms_of(head_dim, norm)
    cos_sin[..., head_dim // 2 :] = cos_sin[..., : head_dim // 2]
    expected = THEIRS.attend(qkv, norms, cos_sin, positions, cache)
    for _ in range(2):  # the counters must be as before
        y = OURS.attend(qkv, norms, cos_sin, positions, mine)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    later = (torch.arange(length) > positions[:, None])[None, :, None, :, None]
    torch.testing.assert_close(torch.where(later, 0.0, mine), cache)
    assert mine[later.expand_as(mine)].isnan().all()


def norms_of(head_dim, norm):
    """Return norms of heads, or None for 0."""
    return HeadNorm(torch.rand(head_dim), torch.rand(head_dim), 1e-6) if norm else None


def refused(heads, kv_heads, head_dim):
    """Check that errors name the shapes that the kernel does not support."""
    qkv = torch.randn(1, 1, (heads + 2 * kv_heads) * head_dim)
    cache, positions = torch.zeros(2, 1, kv_heads, 64, head_dim), torch.tensor([3])
    cos_sin = torch.zeros(2, 64, head_dim)
    group = heads // kv_heads
    said = f"got {group} and {head_dim}"
    for attend in (attention.attend, attention.attend_short):
        with pytest.raises(ValueError, match=said):
            attend(qkv, None, cos_sin, positions, cache)


def prompt(heads, kv_heads, head_dim, batch, length, tokens, norm, cut):
    """Run a prompt of several tokens, in two parts; the rest of the cache stays as it was."""
    qkv = torch.randn(batch, tokens, (heads + 2 * kv_heads) * head_dim)
    mine = torch.full((2, batch, kv_heads, length, head_dim), torch.nan)
    cache, norms = mine.clone(), norms_of(head_dim, norm)
    cos_sin = torch.randn(2, length, head_dim)
    cos_sin[..., head_dim // 2 :] = cos_sin[..., : head_dim // 2]
    expected = THEIRS.attend_prompt(qkv, norms, cos_sin, 0, cache)
    first = OURS.attend_prompt(qkv[:, :cut].contiguous(), norms, cos_sin, 0, mine)
    second = OURS.attend_prompt(qkv[:, cut:].contiguous(), norms, cos_sin, cut, mine)
    torch.testing.assert_close(torch.cat([first, second], 1), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, cache, equal_nan=True)


def rest(rows, dim):
    """Run sums with norms, and SwiGLU."""
    x, added, weight = torch.randn(rows, 1, dim), torch.randn(rows, 1, dim), torch.randn(dim)
    for y, expected in zip(
        OURS.add_norm(x, added, weight, 1e-5), THEIRS.add_norm(x, added, weight, 1e-5), strict=True
    ):
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    gate_up = torch.randn(rows, 1, 2 * dim)
    torch.testing.assert_close(OURS.swiglu(gate_up), THEIRS.swiglu(gate_up), rtol=1e-5, atol=1e-6)


def gemv(n, k):
    """Run one row, into memory of its own and into a part; the last program has fewer rows."""
    x, W = torch.randn(1, 1, k), torch.randn(n, k)
    out = torch.full((1, 1, n + 5), torch.nan)
    for y in (gemv_bf16.gemv(x, W), gemv_bf16.gemv(x, W, out[..., 3 : n + 3])):
        assert y.shape == (1, 1, n)
        torch.testing.assert_close(y, x @ W.T, rtol=1e-5, atol=1e-6 * k)
    assert out.isnan().sum() == 5


def choice(batch, vocabulary):
    """Check that the first of equals is chosen, the end of sequences, and what is counted."""
    wide = torch.randn(batch, 3, vocabulary + 5)
    wide[..., vocabulary:] = 99.0
    strided = wide[:, -1, :vocabulary]  # a slice, as of some models
    strided[0, [7, vocabulary - 1]] = 9.0
    ours, theirs = (
        Sequences.of(torch.zeros(batch, 1, dtype=torch.int64), torch.arange(batch), 5)
        for _ in range(2)
    )
    for sequences in (ours, theirs):
        sequences.restart(torch.tensor([3, 7]), torch.tensor(1))
    for logits in (strided.clone(), strided, strided.T.contiguous().T):
        argmax_kernel.choose_by_kernel(logits, ours)
        next_token.choose(logits, theirs)
        for name, value in vars(theirs).items():
            torch.testing.assert_close(getattr(ours, name), value, rtol=0, atol=0, msg=name)
    assert ours.ids[0].tolist() == [7, 1, 1, 0, 0]  # 7 ends the first sequence
    assert ours.unfinished[0] == 0
    assert ours.positions.tolist() == [3 + i for i in range(batch)]


def model(*names):
    """Decode with a tiny model through the kernels and through torch: the same tokens."""
    from tiny_models import make  # transformers takes seconds to import

    for name in ("llama", "qwen2", "qwen3", "rotated"):
        llama = make("qwen2" if name == "rotated" else name, torch.float32)
        if name == "rotated":  # q, k and v have a codebook each: x is rotated once for them
            llama = quantise_model(llama, "kmeans4-g32-hadamard", backend="cpu", progress=False)
        ids = torch.randint(6, 128, (2, 7))
        mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
        found = []
        for ops in (TritonOps(crowded=True), TorchOps()):
            step = LlamaStep(llama, 2, 64, ops=ops)
            logits = [step.prefill(ids, mask)]
            for _ in range(3):
                logits.append(step.decode(logits[-1].argmax(-1)))
            found.append(torch.stack(logits))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


WHAT = {f.__name__: f for f in (attend, short, refused, prompt, rest, gemv, choice, model)}
for case in sys.argv[2:]:
    print(*sys.argv[1:2], case, file=sys.stderr)  # the last one is what fails
    torch.manual_seed(0)
    WHAT[sys.argv[1]](*map(int, case.split("-")))
