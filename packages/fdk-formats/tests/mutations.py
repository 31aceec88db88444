"""Mutations of files: damaged bytes, headers and metadata, from a seed.

Used by ``test_mutated_files.py`` and by fuzz tests of the readers. A long run:

    python packages/fdk-formats/tests/test_mutated_files.py 50000
"""

import json
import random
import string

# Values that parsers and allocations stumble over.
HOSTILE = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    1.5,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    1 << 64,
    10**400,
    float("inf"),
    float("nan"),
    "",
    "x",
    "\0",
    "\ud800",
    "custom4-g16",
    "affine8-row-fp32-zint",
    "F32",
    "U8",
    "BOOL",
    "F4",
    "F8_E8M0",
    [],
    [0],
    [1 << 62, 1 << 62],
    [0, 1 << 62, 1 << 62],
    [[[[]]]],
    {},
    {"format": "nf4-g64", "shape": [1, 64]},
]


def mutate_bytes(data: bytes, random: random.Random) -> bytes:
    """Returns ``data`` with some bytes flipped, replaced, cut, repeated, inserted or swapped."""
    damaged = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        size = len(damaged)
        at = random.randrange(size + 1)
        length = random.choice([1, 1, 2, 8, 64, size // 2])
        match random.randrange(6):
            case 0 if size:
                damaged[at % size] ^= 1 << random.randrange(8)
            case 1 if size:
                damaged[at % size] = random.choice(b'\x00\x01\x7f\x80\xff0129"\\[]{}:,-.eE')
            case 2:
                del damaged[at : at + length]
            case 3:
                damaged[at:at] = random.randbytes(length)
            case 4:
                damaged[at:at] = damaged[at : at + length]
            case 5:
                damaged = damaged[:at]
    return bytes(damaged)


def mutate_value(value: object, random: random.Random) -> object:
    """Returns JSON with a part replaced, removed, renamed, or taken from elsewhere in it."""
    paths = list(_paths(value))
    path = random.choice(paths)
    match random.randrange(5):
        case 0:
            new = random.choice(HOSTILE)
        case 1:
            new = _at(value, random.choice(paths))
        case 2 if isinstance(_at(value, path), int):
            new = _at(value, path) + random.choice([-8, -1, 1, 2, 8, 1 << 32])
        case 3 if isinstance(_at(value, path), str):
            letters = list(_at(value, path))
            letters.insert(random.randrange(len(letters) + 1), random.choice(string.printable))
            new = "".join(letters)
        case _:
            return _without(value, path, random)
    return _with(value, path, new)


def _paths(value: object, path: tuple = ()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _paths(value[key], (*path, key))


def _at(value, path):
    for key in path:
        value = value[key]
    return value


def _with(value, path, new):
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = _with(value[path[0]], path[1:], new)
    return copied


def _without(value, path, random):
    """Removes an entry; half of the time gives its value another name."""
    if not path:
        return value
    parent = _at(value, path[:-1]).copy()
    removed = parent.pop(path[-1])
    if isinstance(parent, dict) and random.random() < 0.5:
        parent[random.choice([*parent, f"{path[-1]}x", "__metadata__", "w", "w.scale"])] = removed
    return _with(value, path[:-1], parent)


def split(data: bytes) -> tuple[dict, bytes]:
    """Returns the header and the tensor data of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join(text: str, data: bytes) -> bytes:
    """Returns a safetensors file of a header's text and tensor data."""
    header = text.encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + data


def mutate_file(data: bytes, random: random.Random) -> bytes:
    """Returns a safetensors file with its bytes, header, fdk metadata or tensor data damaged."""
    kind = random.randrange(6)
    if kind == 0:
        return mutate_bytes(data, random)
    header, tensors = split(data)
    if kind == 1:
        return join(json.dumps(header), mutate_bytes(tensors, random)[: len(tensors)])
    if kind == 2:
        text = json.dumps(header, ensure_ascii=random.random() < 0.5)
        return join(
            mutate_bytes(text.encode(), random)
            .decode("utf-8", "surrogateescape")
            .encode("utf-8", "replace")
            .decode(),
            tensors,
        )
    if kind == 3:
        return join(json.dumps(mutate_value(header, random)), tensors)
    metadata = header["__metadata__"]
    key = random.choice(sorted(metadata))
    if kind == 4 and metadata[key].startswith("{"):
        metadata[key] = json.dumps(mutate_value(json.loads(metadata[key]), random))
    else:
        text = mutate_bytes(metadata[key].encode(), random).decode("utf-8", "replace")
        # A key twice: what was there, then what is damaged.
        metadata[key] = text if random.random() < 0.8 else f"{metadata[key][:-1]},{text[1:]}"
    return join(json.dumps(header), tensors)
