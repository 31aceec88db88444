"""llama.cpp's CPU kernels, called through the C interface of its library ggml."""

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from importlib import util
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fdk_bench.cases import KernelCase
from fdk_bench.peers.base import Peer, Prepared, copies_of
from fdk_bench.timing import run_here

# Folder of the libraries; else those of the package llama-cpp-python are used.
FOLDER_VARIABLE = "FDK_GGML"
LIBRARIES = ("ggml-base", "ggml-cpu", "ggml")
SUFFIXES = (".so", ".dylib", ".dll")
F32 = 0
MAX_THREADS = 512  # GGML_MAX_N_THREADS
CONTEXT_BYTES = 1 << 16
AMX = "AMX"  # name of the layout for tiles
# Rows that are quantised, then repeated: the search takes seconds for a whole layer.
ROWS = 64
# x is rounded to 8 bits in blocks of 32 or 256: about 0.6 % of y.
ACTIVATION_ERROR = 2e-2
Result = TypeVar("Result")


class InitParams(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class ThreadpoolParams(ctypes.Structure):
    """``struct ggml_threadpool_params``."""

    _fields_ = (
        ("cpumask", c_bool * MAX_THREADS),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


class TypeTraits(ctypes.Structure):
    """``struct ggml_type_traits``."""

    _fields_ = (
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, c_void_p, POINTER(c_float), c_int64)),
        ("from_float_ref", c_void_p),
    )


LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
SILENT = LogCallback(lambda level, text, data: None)
# Result and arguments of the functions that are used.
SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "ggml_log_set": (None, (LogCallback, c_void_p)),
    "ggml_init": (c_void_p, (InitParams,)),
    "ggml_free": (None, (c_void_p,)),
    "ggml_new_tensor_2d": (c_void_p, (c_void_p, c_int, c_int64, c_int64)),
    "ggml_mul_mat": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    "ggml_new_graph_custom": (c_void_p, (c_void_p, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (c_void_p, c_void_p)),
    "ggml_row_size": (c_size_t, (c_int, c_int64)),
    "ggml_get_type_traits": (POINTER(TypeTraits), (c_int,)),
    "ggml_quantize_chunk": (
        c_size_t,
        (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    ),
    "ggml_threadpool_params_default": (ThreadpoolParams, (c_int,)),
    "ggml_threadpool_new": (c_void_p, (POINTER(ThreadpoolParams),)),
    "ggml_threadpool_pause": (None, (c_void_p,)),
    "ggml_threadpool_free": (None, (c_void_p,)),
    "ggml_backend_cpu_init": (c_void_p, ()),
    "ggml_backend_free": (None, (c_void_p,)),
    "ggml_backend_cpu_set_n_threads": (None, (c_void_p, c_int)),
    "ggml_backend_cpu_set_threadpool": (None, (c_void_p, c_void_p)),
    "ggml_backend_get_device": (c_void_p, (c_void_p,)),
    "ggml_backend_dev_backend_reg": (c_void_p, (c_void_p,)),
    "ggml_backend_dev_supports_op": (c_bool, (c_void_p, c_void_p)),
    "ggml_backend_reg_get_proc_address": (c_void_p, (c_void_p, c_char_p)),
    "ggml_backend_buft_name": (c_char_p, (c_void_p,)),
    "ggml_backend_cpu_buffer_type": (c_void_p, ()),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, (c_void_p, c_void_p)),
    "ggml_backend_buffer_free": (None, (c_void_p,)),
    "ggml_backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_graph_compute": (c_int, (c_void_p, c_void_p)),
}


class Ggml:
    """The functions of ``SIGNATURES``, each from the library that has it."""

    def __init__(self, folder: Path) -> None:
        loaded = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in _libraries(folder)]
        self._functions: dict[str, Callable[..., int]] = {}
        for name, (result, arguments) in SIGNATURES.items():
            function = next(getattr(lib, name) for lib in loaded if hasattr(lib, name))
            function.restype, function.argtypes = result, arguments
            self._functions[name.removeprefix("ggml_")] = function
        self.log_set(SILENT, None)  # it prints a line for each weight that it repacks

    def __getattr__(self, name: str) -> Callable[..., int]:
        return self._functions[name]

    def traits(self, type: int) -> TypeTraits:
        """Return the traits of a weight type."""
        traits: TypeTraits = self.get_type_traits(type).contents  # type: ignore[attr-defined]
        return traits

    def quantise(self, type: int, W: Tensor) -> Tensor:
        """Quantise ``W :: [n, k, float32]`` to a type: ``[n, row bytes, uint8]``."""
        n, k = W.shape
        data = torch.empty(n, self.row_size(type, k), dtype=torch.uint8)
        self.quantize_chunk(type, W.contiguous().data_ptr(), data.data_ptr(), 0, n, k, None)
        return data

    def dequantise(self, type: int, data: Tensor, k: int) -> Tensor:
        """Return the values of quantised bytes, ``[n, k, float32]``."""
        W = torch.empty(data.shape[0], k)
        pointer = ctypes.cast(W.data_ptr(), POINTER(c_float))
        self.traits(type).to_float(data.data_ptr(), pointer, W.numel())
        return W


def _libraries(folder: Path) -> list[Path]:
    found = [
        next(
            (path for suffix in SUFFIXES if (path := folder / f"lib{name}{suffix}").is_file()), None
        )
        for name in LIBRARIES
    ]
    return [path for path in found if path is not None]


def library_folder() -> Path | None:
    """Return the folder of ggml's libraries, or None."""
    folders = []
    if named := os.environ.get(FOLDER_VARIABLE):
        folders.append(Path(named))
    elif (spec := util.find_spec("llama_cpp")) is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "lib")
    return next((folder for folder in folders if len(_libraries(folder)) == len(LIBRARIES)), None)


@cache
def load(folder: Path) -> Ggml:
    """Load ggml, once."""
    return Ggml(folder)


class OwnThread:
    """A thread reserved for one library; ``own(work)`` runs work in it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._local = threading.local()

    def __call__(self, work: Callable[[], Result]) -> Result:
        """Run work in the thread; return its result or raise its error. It adds 42 to 99 us."""
        if getattr(self._local, "is_own", False):
            return work()
        return self._thread.submit(self._run, work, torch.is_inference_mode_enabled()).result()

    def _run(self, work: Callable[[], Result], inference_mode: bool) -> Result:
        self._local.is_own = True
        with torch.inference_mode(inference_mode):
            return work()


class Engine:
    """ggml's CPU backend with its own thread pool."""

    def __init__(self, ggml: Ggml, threads: int) -> None:
        self.ggml = ggml
        self.backend = ggml.backend_cpu_init()
        params = ggml.threadpool_params_default(threads)
        self._pool = ggml.threadpool_new(ctypes.byref(params))  # type: ignore[arg-type]
        ggml.backend_cpu_set_n_threads(self.backend, threads)
        ggml.backend_cpu_set_threadpool(self.backend, self._pool)
        # ggml configures AMX tiles once per thread, but other libraries and fdk-cpu configure and
        # release them for each product, so ggml gets its own thread.
        self.own_thread = OwnThread()

    def __del__(self) -> None:
        self.ggml.backend_free(self.backend)
        self.ggml.threadpool_free(self._pool)

    def rest(self) -> None:
        """Put the threads to sleep, which would otherwise spin until the next product."""
        self.ggml.threadpool_pause(self._pool)

    def buffer_types(self) -> list[int]:
        """Return the buffer types that repack a weight, best first, and last the plain one."""
        device = self.ggml.backend_get_device(self.backend)
        registry = self.ggml.backend_dev_backend_reg(device)
        name = b"ggml_backend_dev_get_extra_bufts"
        found = []
        if address := self.ggml.backend_reg_get_proc_address(registry, name):
            listing = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(device)
            i = 0
            while listing and listing[i]:
                found.append(int(listing[i]))
                i += 1
        return [*found, self.ggml.backend_cpu_buffer_type()]


class Product:
    """``y = x @ W.T`` with a weight of ggml, in the best layout that it has for this CPU."""

    def __init__(self, engine: Engine, type: int, data: Tensor, k: int) -> None:
        self._engine, self._ggml, self._n, self._k = engine, engine.ggml, data.shape[0], k
        self._graphs: dict[int, tuple[int, int, int]] = {}
        self._held: list[tuple[int, int]] = []  # contexts and their buffers
        for kind in engine.buffer_types():
            context = self._context()
            W = self._ggml.new_tensor_2d(context, type, k, self._n)
            self._allocate(context, kind)
            self._W = W
            if self._supported():
                break
        self.layout = ctypes.string_at(self._ggml.backend_buft_name(kind)).decode()
        self._ggml.backend_tensor_set(W, data.data_ptr(), 0, data.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[m, n]`` in the dtype of ``x :: [m, k]``."""
        if self.layout == AMX and x.shape[0] > 1:
            return self._engine.own_thread(partial(self._product, x))
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        m = x.shape[0]
        if m not in self._graphs:
            self._graphs[m] = self._graph(m)
        graph, source, result = self._graphs[m]
        wide = x.to(torch.float32).contiguous()
        self._ggml.backend_tensor_set(source, wide.data_ptr(), 0, wide.nbytes)
        status = self._ggml.backend_graph_compute(self._engine.backend, graph)
        if status != 0:
            raise RuntimeError(f"ggml: computing failed with status {status}")
        y = torch.empty(m, self._n)
        self._ggml.backend_tensor_get(result, y.data_ptr(), 0, y.nbytes)
        return y.to(x.dtype)

    def __del__(self) -> None:
        for context, buffer in self._held:
            self._ggml.backend_buffer_free(buffer)
            self._ggml.free(context)

    def _context(self) -> int:
        return self._ggml.init(InitParams(CONTEXT_BYTES, None, True))

    def _allocate(self, context: int, kind: int) -> None:
        buffer = self._ggml.backend_alloc_ctx_tensors_from_buft(context, kind)
        self._held.append((context, buffer))

    def _graph(self, m: int) -> tuple[int, int, int]:
        context = self._context()
        x = self._ggml.new_tensor_2d(context, F32, self._k, m)
        y = self._ggml.mul_mat(context, self._W, x)
        graph = self._ggml.new_graph_custom(context, 8, False)
        self._ggml.build_forward_expand(graph, y)
        self._allocate(context, self._ggml.backend_cpu_buffer_type())
        return graph, x, y

    def _supported(self) -> bool:
        context = self._context()
        x = self._ggml.new_tensor_2d(context, F32, self._k, 1)
        y = self._ggml.mul_mat(context, self._W, x)
        device = self._ggml.backend_get_device(self._engine.backend)
        answer = bool(self._ggml.backend_dev_supports_op(device, y))
        self._ggml.free(context)
        return answer


@dataclass(frozen=True)
class GgmlType:
    """A weight type: its name, its number in ggml, and the weights of a block."""

    name: str
    number: int
    block: int


# For each width the type that was fastest at m = 1 (4096 x 4096, Zen 4).
TYPES = {
    8: GgmlType("Q8_0", 8, 32),
    6: GgmlType("Q6_K", 14, 256),
    5: GgmlType("Q5_K", 13, 256),
    4: GgmlType("IQ4_NL", 20, 32),
    3: GgmlType("Q3_K", 11, 256),
    2: GgmlType("TQ2_0", 35, 256),
}
# How rows name ggml's layout of the weight.
LAYOUTS = {"CPU": "", AMX: " for AMX"}
# Also 4 bits without a codebook, and 2 bits that are not ternary.
Q4_0 = {4: GgmlType("Q4_0", 2, 32)}
Q2_K = {2: GgmlType("Q2_K", 10, 256)}


class LlamaCpp(Peer):
    """A matrix product of ggml, with the weight type that has the bits of the case.

    Args:
        name: its name in options and rows.
        types: weight type by bits.
    """

    note = "activations rounded to 8 bits; blocks of 32 or 256"

    def __init__(self, name: str, types: Mapping[int, GgmlType]) -> None:
        self.name, self.types = name, types

    def missing(self) -> str | None:
        """See ``Peer``."""
        if library_folder() is not None:
            return None
        return f"pip install llama-cpp-python, or {FOLDER_VARIABLE}=<folder of libggml>"

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        if case.device != "cpu":
            return f"is measured on a cpu, got {case.device}"
        if case.quantised is None or case.bits not in self.types:
            return f"needs {', '.join(map(str, self.types))} bits, got {case.format}"
        block = self.types[case.bits].block
        if case.k % block:
            return f"needs k % {block} == 0, got k={case.k}"
        return None

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        folder = library_folder()
        assert folder is not None
        type, ggml = self.types[case.bits], load(folder)
        rows = min(ROWS, case.n)
        W = torch.randn(rows, case.k, generator=torch.Generator().manual_seed(0)) / case.k**0.5
        rows_of_codes = ggml.quantise(type.number, W)
        repeats = -(-case.n // rows)
        data = rows_of_codes.repeat(repeats, 1)[: case.n].contiguous()
        engine = Engine(ggml, torch.get_num_threads())
        calls = [
            Product(engine, type.number, data, case.k)
            for _ in range(copies_of(case, data.nbytes, copies))
        ]

        def weight(dtype: torch.dtype) -> Tensor:
            decoded = ggml.dequantise(type.number, rows_of_codes, case.k).to(dtype)
            return decoded.repeat(repeats, 1)[: case.n]

        # Types of a width differ in their scales: 2.0625 bits (TQ2_0), 2.625 (Q2_K).
        stored = 8 * rows_of_codes.nbytes / rows / case.k
        backend = f"llama.cpp {type.name} ({stored:g} bits)"
        layout = calls[0].layout
        backend += LAYOUTS.get(layout, " repacked")
        return Prepared(
            calls,
            weight,
            data.nbytes,
            backend,
            extra_error=ACTIVATION_ERROR,
            rest=engine.rest,
            place=engine.own_thread if layout == AMX else run_here,
        )


# Each that takes a width gives a row.
LLAMA_CPP = (
    LlamaCpp("llama.cpp", TYPES),
    LlamaCpp("llama.cpp-Q4_0", Q4_0),
    LlamaCpp("llama.cpp-Q2_K", Q2_K),
)
