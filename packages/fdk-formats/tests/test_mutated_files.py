"""Mutated files: each is refused by a ValueError, or loads as a strict reading of it says."""

import collections
import json
import math
import random
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mutations import mutate_file, split
from safetensors.torch import load_file

from fdk_formats import QuantisedTensor, load, quantise, save
from fdk_formats.files import SAFETENSORS_DTYPES
from fdk_formats.format import Format
from fdk_formats.packing import packed_width

COUNT = 3000  # 5 s
DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
SCALES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "e8m0": "U8"}


def originals() -> list[dict]:
    """Returns what the files hold before they are damaged."""
    torch.manual_seed(0)
    weight = torch.randn(2, 32)
    table = torch.arange(6.0).view(2, 3)
    return [
        {"w": quantise(weight, "nf4-g16"), "b": torch.ones(2)},
        {"w": quantise(weight, "affine3-g16-fp16"), "v": quantise(weight, "affine8-row-fp32-zint")},
        {"w": quantise(weight, "kmeans2-row-e8m0"), "t": table, "tied": table},
        {"x.packed": torch.tensor([True, False]), "i": torch.arange(3), "e": torch.empty(0, 3)},
    ]


def strict_reading(data: bytes) -> dict[str, object]:
    """Reads a file that ``load`` accepted, by json and numpy alone.

    A tensor is its dtype, shape and bytes; a weight its format, shape and tensors.

    Raises:
        AssertionError: if the file is not what fdk's format says.
    """
    header, tensors = split(data)
    metadata = header.pop("__metadata__")
    assert metadata["fdk.version"] == "1"
    entries, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        assert start == end
        assert stop - start == math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
        entries[name] = (entry["dtype"], tuple(entry["shape"]), tensors[start:stop])
        assert entry["dtype"] != "BOOL" or set(tensors[start:stop]) <= {0, 1}
        end = stop
    assert end == len(tensors)
    found, used = {}, set()
    for name, entry in once(metadata["fdk.weights"]).items():
        format, (n, k) = Format.parse(entry["format"]), entry["shape"]
        groups = 1 if format.group_size is None else k // format.group_size
        assert type(n) is type(k) is int
        assert groups * (format.group_size or k) == k > 0
        scale = SCALES[format.scale_dtype]
        zero = "U8" if format.zero_point == "int" else "BF16" if scale == "U8" else scale
        wanted = {
            "packed": ("U8", (n, packed_width(format.bits, k))),
            "scale": (scale, (n, groups)),
            **(
                {"zero_point": (zero, (n, groups))}
                if format.codebook == "affine"
                else {"codebook": ("F32", (1 << format.bits,))}
            ),
        }
        parts = {part: entries[f"{name}.{part}"] for part in wanted}
        assert {part: value[:2] for part, value in parts.items()} == wanted
        found[name] = (str(format), (n, k), parts)
        used |= {f"{name}.{part}" for part in wanted}
        check_values(parts, format)
    found |= {name: entry for name, entry in entries.items() if name not in used}
    for name, target in once(metadata["fdk.aliases"]).items():
        assert name not in found
        found[name] = found[target]
    return found


def once(text: str) -> dict:
    """Parses JSON whose keys occur once."""

    def pairs(items):
        assert len(dict(items)) == len(items)
        return dict(items)

    return json.loads(text, object_pairs_hook=pairs)


def values(entry) -> np.ndarray:
    dtype, _, data = entry
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": np.float32, "F16": np.float16, "U8": np.uint8}[dtype])


def check_values(parts, format) -> None:
    scale = values(parts["scale"]).astype(np.float64)
    if format.scale_dtype == "e8m0":
        assert (scale < 255).all()
        scale = np.where(scale == 0, 0.0, 2.0 ** (scale - 127))
    assert np.isfinite(scale).all()
    if "codebook" in parts:
        table = values(parts["codebook"])
        assert np.isfinite(table).all()
        assert (np.diff(table) >= 0).all()
        assert abs(table).max() <= 65504
        largest = abs(table).max()
    else:
        zero = values(parts["zero_point"]).astype(np.float64)
        assert (abs(zero) <= 1 << 24).all()
        largest = np.maximum(abs(zero), (1 << format.bits) - 1)
    assert (abs(scale) * largest < 2.0**128).all()


def plain(value):
    """Returns a loaded value as ``strict_reading`` gives it."""
    if isinstance(value, QuantisedTensor):
        parts = {name: plain(tensor) for name, tensor in value.tensors().items()}
        return (str(value.format), value.shape, parts)
    data = bytes(value.contiguous().view(-1).view(torch.uint8).tolist())
    return (SAFETENSORS_DTYPES[value.dtype], tuple(value.shape), data)


def check_mutations(folder: Path, count: int, seed: int = 0) -> collections.Counter:
    """Loads ``count`` mutated files; returns how many loaded and how many were refused, by reason.

    Raises:
        AssertionError: if a file loads as something else than a strict reading gives.
        Exception: any that ``load`` does not document.
    """
    rng = random.Random(seed)
    path = folder / "file.safetensors"
    files = []
    for tensors in originals():
        save(path, tensors, metadata={"by": "test"})
        files.append(path.read_bytes())
    outcomes = collections.Counter()
    for i in range(count):
        data = mutate_file(rng.choice(files), rng)
        path.write_bytes(data)
        try:
            loaded = load(path, mmap=False)
        except ValueError as error:
            if type(error) is not ValueError or not str(error).startswith(f"{path}: "):
                raise AssertionError(f"mutation {i} raises {error!r}") from error
            reason = re.sub(r"[^a-z ]", "", str(error).removeprefix(f"{path}: "))[:24]
            outcomes[f"refused: {reason}"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"mutation {i} raises {error!r}") from error
        try:
            wanted = strict_reading(data)
        except Exception as error:
            raise AssertionError(f"mutation {i} loads, a strict reading does not") from error
        assert {name: plain(value) for name, value in loaded.items()} == wanted, f"mutation {i}"
        outcomes["loaded"] += 1
    return outcomes


def test_mutated_files(tmp_path):
    outcomes = check_mutations(tmp_path, COUNT)
    assert outcomes.total() == COUNT
    # Neither check is idle.
    assert 0.05 * COUNT < outcomes["loaded"] < 0.8 * COUNT
    assert len(outcomes) > 20


def test_the_strict_reading_reads_what_save_writes(tmp_path):
    for tensors in originals():
        save(tmp_path / "x", tensors)
        read = strict_reading((tmp_path / "x").read_bytes())
        assert read == {name: plain(value) for name, value in tensors.items()}
        assert load_file(tmp_path / "x").keys() >= {n for n in read if isinstance(tensors[n], str)}


@pytest.mark.parametrize("damage", ["duplicate", "dtype", "offset"])
def test_the_strict_reading_refuses(tmp_path, damage):
    save(tmp_path / "x", originals()[0])
    data = (tmp_path / "x").read_bytes()
    old, new = {
        "duplicate": (b'{\\"w\\": ', b'{\\"w\\": 1, \\"w\\": '),
        "dtype": (b'"BF16"', b'"F16"'),
        "offset": (b'"data_offsets":[0,', b'"data_offsets":[1,'),
    }[damage]
    assert old in data
    changed = data[8:].replace(old, new)
    size = int.from_bytes(data[:8], "little") + len(changed) - len(data[8:])
    with pytest.raises(AssertionError):
        strict_reading(size.to_bytes(8, "little") + changed)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = check_mutations(Path(name), int(sys.argv[1]), int(sys.argv[2]))
    for outcome, times in found.most_common():
        print(f"{times:7} {outcome}")
