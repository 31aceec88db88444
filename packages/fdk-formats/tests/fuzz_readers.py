"""Fuzzes the readers: `fuzz_readers.py TARGET [-max_total_time=20] [other options of libFuzzer]`.

An input is a list of bytes that choose a seed and what to damage in it: bytes of a tensor, its
dtype or shape, its name, the configuration. Atheris evolves inputs by the branches that they reach
in the readers; without it they are random, from a fixed seed. Every input must end in a documented
error, or in values that equal an independent reading of the same bytes, and must not take memory
beyond LIMIT_BYTES.
"""

import contextlib
import io
import json
import math
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from mutations import mutate_file
from safetensors.torch import save

try:
    import atheris
except ImportError:
    atheris = None

instrumented = ["fdk_formats.readers", "fdk_formats.untrusted", "fdk_formats.files"]
with atheris.instrument_imports(include=instrumented) if atheris else contextlib.nullcontext():
    from test_mutated_files import originals, plain, strict_reading

    import fdk_formats
    import fdk_formats.files
    import fdk_formats.readers
    import fdk_formats.untrusted
    from fdk_formats import QuantisedTensor, readers
    from fdk_formats.readers.gguf import read_gguf

LIMIT_BYTES = 64 << 20  # inputs are of at most 100 kB, and torch's own buffers grow now and then
ADDRESS_SPACE = 1 << 30
MAX_ELEMENTS = 1 << 14
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
)
SIZES = (0, 1, 2, 3, 7, 8, 16, 31, 32, 64, 100)
# JSON text of values: sizes at every limit, numbers that no float holds, other types.
JSON_VALUES = (
    *("null", "true", "false", "0", "1", "-1", "2", "3", "4", "8", "16", "32", "64", "4.0"),
    *("1e400", "NaN", "-Infinity", "1000000000", "9223372036854775807", "18446744073709551616"),
    *('""', '"gptq"', '"gptq_v2"', '"gemv"', '"gemv_fast"', '"nf4"', '"\\ud800"', "[]", "{}"),
    *("[[1]]", '{"bits": 8}', '{"a": {"bits": 2}}', "1" + "0" * 400, "[" * 200 + "]" * 200),
)


class Choices:
    """Numbers taken from the bytes of an input; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def below(self, count: int) -> int:
        """Returns a number from 0 to ``count - 1``."""
        width = 1 if count <= 256 else 4
        taken = self.data[self.at : self.at + width]
        self.at += width
        return int.from_bytes(taken, "little") % count

    def of(self, values):
        """Returns one of the values."""
        return values[self.below(len(values))]

    @property
    def left(self) -> bool:
        return self.at < len(self.data)


def damaged(choices: Choices, tensors: dict, config: dict) -> tuple[dict, str]:
    """Returns copies of tensors and configuration with the chosen damage."""
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    values = {key: json.dumps(value) for key, value in config.items()}
    text = None
    for _ in range(8):
        if not choices.left:
            break
        names = sorted(tensors) or [""]
        name = choices.of(names)
        match choices.below(8):
            case 0 if name:  # a byte
                flat = tensors[name].reshape(-1).view(torch.uint8)
                if len(flat):
                    flat[choices.below(len(flat))] = choices.below(256)
            case 1 if name:  # a run of bytes
                flat = tensors[name].reshape(-1).view(torch.uint8)
                if len(flat):
                    start = choices.below(len(flat))
                    flat[start : start + choices.below(64)] = choices.below(256)
            case 2 if name:  # a dtype, of the same bytes or of the same values
                dtype = choices.of(DTYPES)
                if choices.below(2):
                    flat = tensors[name].reshape(-1).view(torch.uint8)
                    width = dtype.itemsize
                    tensors[name] = flat[: len(flat) // width * width].view(dtype)
                else:
                    tensors[name] = tensors[name].to(dtype)
            case 3 if name:  # a shape
                shape = list(tensors[name].shape)
                match choices.below(4):
                    case 0 if shape:
                        shape[choices.below(len(shape))] = choices.of(SIZES)
                    case 1 if shape:
                        del shape[choices.below(len(shape))]
                    case 2:
                        shape.insert(choices.below(len(shape) + 1), choices.of((1, 2)))
                    case _:
                        shape = shape[::-1]
                count = min(math.prod(shape), MAX_ELEMENTS)
                flat = tensors[name].reshape(-1)
                if math.prod(shape) == count and len(flat):
                    tensors[name] = flat.repeat(-(-count // len(flat)))[:count].view(shape)
                elif math.prod(shape) == 0:
                    tensors[name] = flat[:0].view(shape)
            case 4 if name:
                del tensors[name]
            case 5 if name:  # two names exchanged, or one more name
                other = choices.of(names)
                tensors[name], tensors[other] = tensors[other], tensors[name]
                if choices.below(4) == 0:
                    tensors[f"{name}.x"] = tensors[name]
            case 6 if values:
                values[choices.of(sorted(values))] = choices.of(JSON_VALUES)
            case 7 if values:  # bytes of the text
                whole = bytearray(_object_text(values).encode())
                whole[choices.below(len(whole))] = choices.below(256)
                text = whole.decode("latin1")
            case _:
                pass
    # safetensors refuses to write tensors that share memory
    return {n: t.contiguous().clone() for n, t in tensors.items()}, text or _object_text(values)


def _object_text(values: dict[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in values.items()) + "}"


# Independent readings: numpy, a bit at a time.


def bits_down(words, bits):
    """Unpacks little-endian bit streams down the columns of int32 words."""
    raw = words.numpy().view(np.uint32)
    each = (raw[:, None, :] >> np.arange(32, dtype=np.uint32)[None, :, None]) & 1
    each = each.reshape(-1, bits, raw.shape[1]).astype(np.int64)
    return (each << np.arange(bits)[None, :, None]).sum(1)


def float32(tensor):
    return tensor.float().numpy()


def strict_gptq(found, tensors, config):
    bits_of = lambda t: t["qzeros"].shape[1] * 32 // t["scales"].shape[1]  # noqa: E731
    for name in [name for name in found if name.endswith(".weight") and is_quantised(found[name])]:
        x = name.removesuffix("weight")
        parts = {key: tensors[x + key] for key in ("qweight", "qzeros", "scales")}
        bits = bits_of(parts)
        codes = bits_down(parts["qweight"], bits)  # [k, n]
        zeros = bits_down(parts["qzeros"].T.contiguous(), bits).T  # [k/G, n]
        if config.get("checkpoint_format", config.get("format")) != "gptq_v2":
            zeros = (zeros + 1) % (1 << bits)
        k = len(codes)
        groups = np.arange(k) // (k // len(zeros))
        if x + "g_idx" in tensors:
            groups = tensors[x + "g_idx"].numpy().astype(np.int64)
        wanted = (codes - zeros[groups]).astype(np.float32) * float32(parts["scales"])[groups]
        ours = found[name].dequantise().numpy()
        if x + "input_permutation" in found:
            restored = np.empty_like(ours)
            restored[:, found[x + "input_permutation"].numpy()] = ours
            ours = restored
        same(ours, wanted.T)


def strict_awq(found, tensors, config):
    version = str(config.get("version", "gemm")).lower()
    for name in [name for name in found if name.endswith(".weight") and is_quantised(found[name])]:
        x = name.removesuffix("weight")
        qweight, qzeros, scales = (tensors[x + key] for key in ("qweight", "qzeros", "scales"))
        if version == "gemm":
            order = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # the nibble of each output
            unpack = lambda t: bits_down(t.reshape(1, -1), 4).T.reshape(*t.shape, 8)  # noqa: E731
            codes = unpack(qweight)[..., order].reshape(len(qweight), -1)
            zeros = unpack(qzeros)[..., order].reshape(len(qzeros), -1)
            groups = np.arange(len(codes)) // (len(codes) // len(zeros))
            same(
                found[name].dequantise().numpy(),
                ((codes - zeros[groups]).astype(np.float32) * float32(scales)[groups]).T,
            )
        elif version == "gemv":
            codes = bits_down(qweight.T.contiguous(), 4).T
            zeros = bits_down(qzeros.T.contiguous(), 4).T
            groups = np.arange(codes.shape[1]) // found[name].group_size
            wanted = (codes - zeros[:, groups]).astype(np.float32) * float32(scales)[:, groups]
            same(found[name].dequantise().numpy(), wanted)
        else:  # the kernel adds the rounded -zero * scale
            groups = np.arange(found[name].shape[1]) // found[name].group_size
            scale, minimum = float32(scales)[groups].T, float32(qzeros)[groups].T
            wanted = found[name].codes().numpy() * scale + minimum
            assert (np.abs(found[name].dequantise().numpy() - wanted) <= 1e-2 * np.abs(scale)).all()


def strict_hqq(found, tensors, config):
    sizes = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
    for name in [name for name in found if name.endswith(".weight") and is_quantised(found[name])]:
        x = name.removesuffix("weight")
        bits = sizes[bytes(tensors[x + "packing"].tolist()).decode()]
        n, k = tensors[x + "shape"].flatten().tolist()  # the reader takes [1, 2] too
        word = torch.int32 if bits == 3 else torch.uint8
        words = tensors[x + "W_q"].view(word).numpy().astype(np.int64)
        per_word = 10 if bits == 3 else 8 // bits
        shifts = [bits * (per_word - 1 - i) for i in range(per_word)]
        codes = np.concatenate([words >> shift & (1 << bits) - 1 for shift in shifts])
        scale, zero = float32(tensors[x + "scale"]), float32(tensors[x + "zero"])
        group = found[name].group_size
        codes = codes[: n * k // group].astype(np.float32)
        same(found[name].dequantise().numpy(), ((codes - zero) * scale).reshape(n, k))


def strict_bitsandbytes(found, tensors, config):
    for name in [name for name in found if is_quantised(found[name])]:
        key = next(k for k in tensors if k.startswith(f"{name}.quant_state."))
        state = json.loads(bytes(tensors[key].tolist()))
        raw = tensors[name].reshape(-1).view(torch.uint8).numpy()
        codes = np.stack([raw >> 4, raw & 15], 1).reshape(-1)
        absmax = tensors[f"{name}.absmax"]
        if f"{name}.nested_absmax" in tensors:
            outer = float32(tensors[f"{name}.nested_absmax"])
            at = np.arange(len(absmax)) // state["nested_blocksize"]
            table = float32(tensors[f"{name}.nested_quant_map"])
            scale = table[absmax.numpy()] * outer[at] + np.float32(state["nested_offset"])
        else:
            scale = float32(absmax)
        values = float32(tensors[f"{name}.quant_map"])[codes].reshape(len(scale), -1)
        same(found[name].dequantise().numpy(), (values * scale[:, None]).reshape(state["shape"]))


def strict_one_bit_wonder(found, tensors, config):
    for name in [name for name in found if is_quantised(found[name])]:
        x = name.removesuffix("weight")
        packed, scales = tensors[x + "weight_packed"].numpy(), float32(tensors[x + "scales"])
        centroids = tensors[x + "centroids"].numpy()
        bits = int(math.log2(len(centroids)))
        codes = np.unpackbits(packed, axis=1).reshape(len(packed), -1, bits)
        codes = (codes.astype(np.int64) << np.arange(bits)[::-1]).sum(-1)
        with np.errstate(over="ignore"):
            values = centroids[codes].reshape(*scales.shape, -1) * scales[..., None]
        same(found[name].dequantise().numpy(), values.reshape(codes.shape))


def strict_gguf(found, data):
    import gguf

    with tempfile.NamedTemporaryFile(dir=FOLDER, suffix=".gguf") as file:
        file.write(data)
        file.flush()
        try:
            theirs = gguf.GGUFReader(file.name).tensors
        except Exception:  # it raises anything; ours must then have read something it cannot
            COUNTS["read by this reader only"] += 1
            return
        assert [tensor.name for tensor in theirs] == list(found)
        for tensor in theirs:
            ours = found[tensor.name]
            if not is_quantised(ours):
                if ours.dtype != torch.bfloat16 or tensor.tensor_type.name == "BF16":
                    raw = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
                    same(ours.reshape(-1).view(torch.uint8).numpy(), raw)
                continue
            with np.errstate(all="ignore"):
                wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            values = ours.dequantise().numpy()
            if ours.zero_point is None:
                same(values, wanted)
            else:
                step = ours.scale.abs() * (ours.zero_point.abs() + (1 << ours.format.bits))
                bound = step.repeat_interleave(ours.group_size, 1).numpy() * 2**-21
                assert (np.abs(values.astype(np.float64) - wanted) <= bound).all()


def is_quantised(value):
    return isinstance(value, QuantisedTensor)


def same(ours, wanted):
    assert ours.shape == wanted.shape, (ours.shape, wanted.shape)
    assert np.array_equal(ours, wanted, equal_nan=True)


# Seeds


def words(*shape):
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).to(torch.int32)


def halves(*shape):
    return (torch.rand(shape) + 0.1).half()


def gptq_seeds():
    for bits in (2, 3, 4, 8):
        tensors = {
            "a.qweight": words(64 * bits // 32, 32),
            "a.qzeros": words(2, bits),
            "a.scales": halves(2, 32),
            "a.g_idx": torch.arange(64, dtype=torch.int32) % 2,
            "a.bias": torch.ones(32),
        }
        config = {"bits": bits, "group_size": 32, "desc_act": True, "sym": False}
        yield tensors, config | {"checkpoint_format": "gptq_v2", "dynamic": {}}
        tensors = tensors | {"a.g_idx": torch.arange(64, dtype=torch.int32) // 32}
        yield tensors, {"bits": bits, "quant_method": "gptq", "group_size": 32}


def awq_seeds():
    gemm = {"a.qweight": words(64, 2), "a.qzeros": words(2, 2), "a.scales": halves(2, 16)}
    yield gemm, {"bits": 4, "version": "gemm", "group_size": 32}
    gemv = {"a.qweight": words(16, 8), "a.qzeros": words(16, 4), "a.scales": halves(16, 32)}
    yield gemv, {"w_bit": 4, "version": "GEMV", "q_group_size": 32, "zero_point": True}
    fast = {"a.qweight": words(4, 64).to(torch.int16), "a.scales": halves(32, 16)}
    zeros = torch.randint(16, (32, 16))
    fast["a.qzeros"] = -(fast["a.scales"].float() * zeros).half()
    yield fast, {"bits": 4, "version": "gemv_fast", "group_size": 32}


def hqq_seeds():
    text = lambda value: torch.tensor(list(value.encode()), dtype=torch.uint8)  # noqa: E731
    for nbits, packing, dtype, per_word in (
        (8, "8bit_u8", torch.uint8, 1),
        (5, "8bit_u8", torch.uint8, 1),
        (4, "4bit_u8", torch.uint8, 2),
        (3, "3bit_32", torch.int32, 10),
        (2, "2bit_u8", torch.uint8, 4),
        (1, "1bit_u8", torch.uint8, 8),
    ):
        for axis in (1, 0):
            rows, columns = (16, 32) if axis else (32, 16)
            block = -(-rows // per_word)
            codes = torch.randint(1 << min(nbits * per_word, 31), (block, columns))
            scales = (rows, 1) if axis else (1, columns)
            yield (
                {
                    "a.W_q": codes.to(dtype),
                    "a.nbits": torch.tensor(nbits, dtype=torch.int32),
                    "a.group_size": torch.tensor(32, dtype=torch.int32),
                    "a.axis": torch.tensor(axis, dtype=torch.int32),
                    "a.shape": torch.tensor([8, 64]),
                    "a.packing": text(packing),
                    "a.compute_dtype": text("torch.float16"),
                    "a.scale": halves(*scales),
                    "a.zero": halves(*scales),
                    "a.quant_scale": torch.tensor(0, dtype=torch.uint8),
                    "a.quant_zero": torch.tensor(0, dtype=torch.uint8),
                },
                {},
            )


def bitsandbytes_seeds():
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            state = {"quant_type": kind, "blocksize": 32, "shape": [8, 64], "dtype": "float16"}
            tensors = {
                "a.weight": torch.randint(256, (256, 1), dtype=torch.uint8),
                "a.weight.quant_map": torch.randn(16),
                "a.weight.absmax": torch.rand(16),
            }
            if nested:
                state |= {"nested_blocksize": 8, "nested_offset": 0.5, "nested_dtype": "float32"}
                tensors |= {
                    "a.weight.absmax": torch.randint(256, (16,), dtype=torch.uint8),
                    "a.weight.nested_absmax": torch.rand(2),
                    "a.weight.nested_quant_map": torch.randn(256),
                }
            yield tensors, state


def one_bit_wonder_seeds():
    for bits in (1, 2, 4, 8):
        yield (
            {
                "a.weight_packed": torch.randint(256, (8, 8 * bits), dtype=torch.uint8),
                "a.scales": halves(8, 2).bfloat16(),
                "a.centroids": torch.randn(1 << bits).sort().values,
            },
            {"relative_scale": "absmax", "bits": bits, "block_size": 32},
        )


def gguf_seeds():
    """Returns whole files: one of each type, and one that transformers would load."""
    import gguf

    rng = np.random.default_rng(0)

    def written(tensors, **metadata):
        with tempfile.NamedTemporaryFile(dir=FOLDER, suffix=".gguf") as file:
            writer = gguf.GGUFWriter(file.name, "llama")
            writer.add_array("tokens", ["a", "bc"])
            for key, value in metadata.items():
                writer.add_uint32(f"llama.attention.{key}", value)
            for name, (kind, data) in tensors.items():
                writer.add_tensor(name, data, raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            return Path(file.name).read_bytes()

    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        data = rng.integers(0, 60, (2, size), dtype=np.uint8)
        if block == 1:
            data = np.zeros((2, 4), {8: np.float64, 4: np.float32, 2: np.float16, 1: np.int8}[size])
            kind = gguf.GGMLQuantizationType({8: 28, 4: 0, 2: 1, 1: 24}[size])
        yield written({"w": (kind, data)})
    kind = gguf.GGMLQuantizationType
    weight = rng.integers(0, 60, (8, 18), dtype=np.uint8)
    names = ("token_embd", "blk.0.attn_q", "blk.0.attn_k", "blk.0.ffn_up", "output")
    tensors = {f"{name}.weight": (kind.Q4_0, weight) for name in names}
    tensors["rope_freqs.weight"] = (kind.F32, np.ones(4, np.float32))
    yield written(tensors, head_count=2, head_count_kv=1)


# Targets

FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
COUNTS: Counter[str] = Counter()
DOCUMENTED = (ValueError, TypeError)


def run_folder(load, strict, config_name, seeds):
    """Returns a target that damages a folder and loads it."""
    torch.manual_seed(0)
    seeds = list(seeds)
    folder = Path(tempfile.mkdtemp(dir=FOLDER))

    def target(data: bytes) -> None:
        choices = Choices(data)
        tensors, config = choices.of(seeds)
        tensors, text = damaged(choices, tensors, config)
        raw = text.encode("utf8", "surrogatepass")
        if config_name is not None:
            (folder / config_name).write_bytes(raw)
        elif config:  # the state of bitsandbytes, a tensor of JSON
            state = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            tensors[f"a.weight.quant_state.bitsandbytes__{config['quant_type']}"] = state
        (folder / "model.safetensors").write_bytes(save(tensors))
        try:
            found = load(folder)
        except DOCUMENTED:
            COUNTS["refused"] += 1
            return
        COUNTS["read"] += 1
        try:
            settings = json.loads(text)
        except ValueError:
            settings = {}
        strict(found, tensors, settings)

    return target, []


def run_file():
    """Returns a target that loads fdk's own files, damaged by the mutator of their tests."""
    path = Path(tempfile.mkdtemp(dir=FOLDER)) / "file.safetensors"
    files = []
    for tensors in originals():
        fdk_formats.save(path, tensors, metadata={"by": "fuzz"})
        files.append(path.read_bytes())

    def target(data: bytes) -> None:
        rng = random.Random(data)
        content = mutate_file(rng.choice(files), rng)
        path.write_bytes(content)
        try:
            found = fdk_formats.load(path, mmap=False)
        except DOCUMENTED:
            COUNTS["refused"] += 1
            return
        COUNTS["read"] += 1
        assert {name: plain(value) for name, value in found.items()} == strict_reading(content)

    return target, []


def run_gguf():
    """Returns a target that reads a file from its bytes; the first byte chooses the options."""

    def target(data: bytes) -> None:
        options, content = data[:1] or b"\0", data[1:]
        hf_names = bool(options[0] & 1)
        dequantise = torch.bfloat16 if options[0] & 2 else None
        try:
            found = read_gguf(io.BytesIO(content), hf_names=hf_names, dequantise=dequantise)
        except DOCUMENTED:
            COUNTS["refused"] += 1
            return
        COUNTS["read"] += 1
        if not hf_names:
            strict_gguf(found, content)

    seeds = list(gguf_seeds())
    return target, [bytes([options]) + seed for options in (0, 1, 2) for seed in seeds]


def load_gptq(folder):
    return readers.load_gptq(folder, wrap_zeros=True)


def load_hqq(folder):
    """Reads strictly where a format holds the weight, and dequantises otherwise."""
    try:
        return readers.load_hqq(folder)
    except ValueError:
        return readers.load_hqq(folder, dequantise=torch.float32)


TARGETS = {
    "file": run_file,
    "gguf": run_gguf,
    "gptq": lambda: run_folder(load_gptq, strict_gptq, "quantize_config.json", gptq_seeds()),
    "awq": lambda: run_folder(readers.load_awq, strict_awq, "quant_config.json", awq_seeds()),
    "hqq": lambda: run_folder(load_hqq, strict_hqq, None, hqq_seeds()),
    "bitsandbytes": lambda: run_folder(
        readers.load_bitsandbytes, strict_bitsandbytes, None, bitsandbytes_seeds()
    ),
    "one_bit_wonder": lambda: run_folder(
        readers.load_one_bit_wonder,
        strict_one_bit_wonder,
        "quantization_config.json",
        one_bit_wonder_seeds(),
    ),
}


def checked(target):
    """Wraps a target: counts inputs and watches memory."""

    def run(data: bytes) -> None:
        COUNTS["inputs"] += 1
        before = reset_peak()
        target(data)
        grown = resident("VmHWM") - before
        # The first inputs load libraries.
        assert grown <= LIMIT_BYTES or COUNTS["inputs"] < 100, f"took {grown} bytes"

    return run


def reset_peak() -> int:
    """Makes the largest resident memory until now the present one, in bytes, and returns it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident("VmHWM")


def resident(field: str) -> int:
    """Returns a field of Linux's status of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split(maxsplit=1)[0]) * 1024


def limit_address_space() -> None:
    """Makes an allocation beyond ADDRESS_SPACE more than now fail."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, resource.RLIM_INFINITY))


def run_random(target, seeds, seconds: float) -> None:
    """Runs random inputs, and seeds with random damage, for a time."""
    rng = random.Random(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if seeds:
            data = bytearray(rng.choice(seeds))
            for _ in range(rng.randrange(1, 5)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        else:
            data = rng.randbytes(rng.randrange(1, 64))
        target(bytes(data))


def main(name: str, *options: str) -> None:
    """Fuzzes one target until its time is over or an input fails."""
    torch.set_num_threads(1)
    target, seeds = TARGETS[name]()
    target = checked(target)
    for seed in seeds or [bytes([i]) for i in range(16)]:
        target(seed)
    limit_address_space()
    times = [option for option in options if option.startswith("-max_total_time=")]
    seconds = float(times[-1].partition("=")[2]) if times else 20.0
    if atheris is None:
        run_random(target, seeds, seconds)
        print(f"{name}: {dict(COUNTS)}")
        return
    folder = Path("build/fuzz-readers")
    corpus = folder / name
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(seeds):
        (corpus / f"seed-{i}").write_bytes(seed)
    end = time.monotonic() + seconds

    def until_the_end(data: bytes) -> None:
        target(data)
        if time.monotonic() > end and not COUNTS["told"]:
            COUNTS["told"] = 1
            counts = {key: count for key, count in COUNTS.items() if key != "told"}
            print(f"{name}: {counts}", flush=True)

    limits = [] if times else ["-max_total_time=20"]
    limits += ["-max_len=4096", "-len_control=0", "-rss_limit_mb=4096", "-verbosity=0"]
    found = f"-artifact_prefix={folder}/{name}-"
    atheris.Setup([sys.argv[0], *limits, found, *options, str(corpus)], until_the_end)
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: fuzz_readers.py {{{','.join(TARGETS)}}} [options of libFuzzer]")
    main(sys.argv[1], *sys.argv[2:])
