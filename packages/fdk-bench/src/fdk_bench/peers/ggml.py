"""The C interface of ggml, llama.cpp's library of kernels, as far as one product needs it."""

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache, partial
from importlib import util
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

# Where the libraries lie; else those of the package llama-cpp-python are taken.
FOLDER_VARIABLE = "FDK_GGML"
LIBRARIES = ("ggml-base", "ggml-cpu", "ggml")
SUFFIXES = (".so", ".dylib", ".dll")
F32 = 0
MAX_THREADS = 512  # GGML_MAX_N_THREADS
CONTEXT_BYTES = 1 << 16
AMX = "AMX"  # the layout whose products go through tiles
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
# The functions used: result, arguments.
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
    """The functions of ``SIGNATURES``, from whichever library has each."""

    def __init__(self, folder: Path) -> None:
        loaded = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in _libraries(folder)]
        self._functions: dict[str, Callable[..., int]] = {}
        for name, (result, arguments) in SIGNATURES.items():
            function = next(getattr(lib, name) for lib in loaded if hasattr(lib, name))
            function.restype, function.argtypes = result, arguments
            self._functions[name.removeprefix("ggml_")] = function
        self.log_set(SILENT, None)  # it prints a line for each weight that it lays out

    def __getattr__(self, name: str) -> Callable[..., int]:
        return self._functions[name]

    def traits(self, type: int) -> TypeTraits:
        """Of a type of weight."""
        traits: TypeTraits = self.get_type_traits(type).contents  # type: ignore[attr-defined]
        return traits

    def quantise(self, type: int, W: Tensor) -> Tensor:
        """The bytes of ``W :: [n, k, float32]`` in a type, ``[n, row bytes, uint8]``."""
        n, k = W.shape
        data = torch.empty(n, self.row_size(type, k), dtype=torch.uint8)
        self.quantize_chunk(type, W.contiguous().data_ptr(), data.data_ptr(), 0, n, k, None)
        return data

    def dequantise(self, type: int, data: Tensor, k: int) -> Tensor:
        """What they stand for, ``[n, k, float32]``."""
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
    """Where ggml's libraries are, or None."""
    folders = []
    if named := os.environ.get(FOLDER_VARIABLE):
        folders.append(Path(named))
    elif (spec := util.find_spec("llama_cpp")) is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "lib")
    return next((folder for folder in folders if len(_libraries(folder)) == len(LIBRARIES)), None)


@cache
def load(folder: Path) -> Ggml:
    """ggml, loaded once."""
    return Ggml(folder)


class OwnThread:
    """A thread for what must not share one with other code: ``own(work)`` is ``work()`` there."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._local = threading.local()

    def __call__(self, work: Callable[[], Result]) -> Result:
        """Its result or error. The way there takes 42 to 99 us; work that is there goes none."""
        if getattr(self._local, "is_own", False):
            return work()
        return self._thread.submit(self._run, work, torch.is_inference_mode_enabled()).result()

    def _run(self, work: Callable[[], Result], inference_mode: bool) -> Result:
        self._local.is_own = True
        with torch.inference_mode(inference_mode):
            return work()


class Engine:
    """ggml's CPU backend with threads of its own that stay."""

    def __init__(self, ggml: Ggml, threads: int) -> None:
        self.ggml = ggml
        self.backend = ggml.backend_cpu_init()
        params = ggml.threadpool_params_default(threads)
        self._pool = ggml.threadpool_new(ctypes.byref(params))  # type: ignore[arg-type]
        ggml.backend_cpu_set_n_threads(self.backend, threads)
        ggml.backend_cpu_set_threadpool(self.backend, self._pool)
        # A thread whose tiles nobody else configures: ggml does that once a thread, other libraries
        # and fdk-cpu for each product, and take it back.
        self.own_thread = OwnThread()

    def __del__(self) -> None:
        self.ggml.backend_free(self.backend)
        self.ggml.threadpool_free(self._pool)

    def rest(self) -> None:
        """Puts the threads to sleep until the next product: they wait for it spinning, for long."""
        self.ggml.threadpool_pause(self._pool)

    def buffer_types(self) -> list[int]:
        """Those that lay a weight out anew for this CPU, best first, and last the plain one."""
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
    """``y = x @ W.T`` with a weight of ggml, in the best layout that this CPU has for it."""

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
        """``x :: [m, k]`` to ``[m, n]`` of its dtype."""
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
