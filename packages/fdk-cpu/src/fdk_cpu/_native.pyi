from typing import TypeAlias

Bytes: TypeAlias = tuple[int, int]  # address and size; (0, 0) for None

TILE_K: int  # positions of k in a tile; rows are padded to a multiple
HUGE_PAGE: int  # bytes
MAX_THREADS: int

class Weight:
    def __init__(
        self,
        n: int,
        k: int,
        group_size: int,
        bits: int,
        codes: Bytes,
        scales: Bytes,
        scale_type: str,
        zeros: Bytes,
        zero_type: str,
        codebook: Bytes,
        /,
    ) -> None: ...
    def linear(
        self,
        activation: str,
        x: Bytes,
        m: int,
        bias: Bytes,
        y: Bytes,
        threads: int,
        batch_invariant: bool,
        /,
    ) -> None: ...
    def linear_int8(
        self,
        activation: str,
        levels: Bytes,
        step: float,
        offset: float,
        x: Bytes,
        m: int,
        bias: Bytes,
        y: Bytes,
        threads: int,
        batch_invariant: bool,
        /,
    ) -> None: ...
    def grad_x(
        self, activation: str, grad_y: Bytes, m: int, grad_x: Bytes, threads: int, /
    ) -> None: ...

class ExpertStack:
    def __init__(
        self,
        experts: int,
        n: int,
        k: int,
        group_size: int,
        bits: int,
        codes: Bytes,
        scales: Bytes,
        scale_type: str,
        zeros: Bytes,
        zero_type: str,
        codebooks: Bytes,
        /,
    ) -> None: ...
    def linear(
        self,
        activation: str,
        x: Bytes,
        ids: Bytes,
        tokens: int,
        top_k: int,
        bias: Bytes,
        routing_weights: Bytes,
        y: Bytes,
        threads: int,
        batch_invariant: bool,
        /,
    ) -> None: ...
    def grad_x(
        self,
        activation: str,
        grad_y: Bytes,
        ids: Bytes,
        tokens: int,
        top_k: int,
        grad_x: Bytes,
        threads: int,
        /,
    ) -> None: ...

def dense_linear(
    gemv: bool,
    dtype: str,
    x: Bytes,
    m: int,
    w: Bytes,
    n: int,
    k: int,
    y: Bytes,
    threads: int,
    /,
) -> None: ...

class NearestCode:
    def __init__(self, code: Bytes, order: bytes, /) -> None: ...
    def quantise(
        self,
        dtype: str,
        values: Bytes,
        block_size: int,
        packed: Bytes,
        absmax: Bytes,
        threads: int,
        /,
    ) -> None: ...

def dequantise_blocks(
    bits: int,
    code: Bytes,
    dtype: str,
    packed: Bytes,
    absmax: Bytes,
    block_size: int,
    values: Bytes,
    threads: int,
    /,
) -> None: ...
def round_groups(
    midpoints: Bytes,
    entries: Bytes,
    values: Bytes,
    scale: Bytes,
    codes: Bytes,
    rounded: Bytes,
    threads: int,
    /,
) -> None: ...
def group_errors(
    midpoints: Bytes,
    entries: Bytes,
    values: Bytes,
    scale: Bytes,
    importance: Bytes,
    errors: Bytes,
    threads: int,
    /,
) -> None: ...
def group_products(
    midpoints: Bytes,
    entries: Bytes,
    values: Bytes,
    scale: Bytes,
    importance: Bytes,
    product: Bytes,
    square: Bytes,
    threads: int,
    /,
) -> None: ...
def round_columns(
    midpoints: Bytes,
    entries: Bytes,
    wanted: Bytes,
    reference: Bytes,
    feedback: Bytes,
    scale: Bytes,
    zero: Bytes,
    codes: Bytes,
    residual: Bytes,
    threads: int,
    /,
) -> None: ...
def rotate(
    activation: str, x: Bytes, block: int, inverse: bool, y: Bytes, threads: int, /
) -> None: ...
def layout_sizes(n: int, k: int, group_size: int, bits: int, /) -> tuple[int, int]: ...
def pack_codes(
    n: int, k: int, group_size: int, bits: int, packed: Bytes, codes: Bytes, threads: int, /
) -> None: ...
def unpack_codes(
    n: int, k: int, group_size: int, bits: int, codes: Bytes, packed: Bytes, threads: int, /
) -> None: ...
def pack_groups(
    n: int, k: int, group_size: int, item: int, groups: Bytes, packed: Bytes, /
) -> None: ...
def unpack_groups(
    n: int, k: int, group_size: int, item: int, packed: Bytes, groups: Bytes, /
) -> None: ...

class WeightMemory:
    def __init__(self, nbytes: int, /) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def read_sum(data: Bytes, threads: int, /) -> int: ...
def copy_memory(from_: Bytes, to: Bytes, threads: int, /) -> None: ...
def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def set_instruction_set(name: str, /) -> None: ...

# (plain, n, k, bias), or (weight, first row, n, bias, None or (levels, step, offset), whether to
# rotate x).
Rows = tuple[object, ...]

class DecodeStep:
    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        ffn: int,
        vocabulary: int,
        eps: float,
        scale: float,
        dtype: str,
        /,
    ) -> None: ...
    def add_block(
        self,
        norms: tuple[Bytes, ...],
        qkv: list[Rows],
        o: list[Rows],
        gate_up: list[Rows],
        down: list[Rows],
        /,
    ) -> None: ...
    def set_head(self, norm: Bytes, head: list[Rows], /) -> None: ...
    def run(
        self,
        batch: int,
        length: int,
        slot: int,
        x: Bytes,
        cos: Bytes,
        sin: Bytes,
        starts: Bytes,
        cache: Bytes,
        logits: Bytes,
        threads: int,
        /,
    ) -> None: ...
