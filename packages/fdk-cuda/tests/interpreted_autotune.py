"""Tuning with a fake clock; test_interpreted.py runs this file with TRITON_INTERPRET=1."""

import fcntl
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton_interpreter import fix_scalar_masks

from fdk_cuda.triton import TritonBackend, TritonLayout, autotune, autotune_cache, launch
from fdk_cuda.triton.configs import GPUS, H200, GemmConfig, GemmWgmmaConfig, GemvConfig, Gpu, gpu_of
from fdk_cuda.triton.configs.gemm import fit, serves_gemm_wgmma
from fdk_cuda.triton.layout import PackedLayout
from fdk_cuda.triton.packed_weight import PackedWeight
from fdk_formats import Format
from fdk_formats.testing import Case

Patch, Chosen = pytest.MonkeyPatch, Callable[..., object]
assert launch.INTERPRETED
fix_scalar_masks()
LAYER = ("custom4-g64", 48, 256)
LAYOUT = PackedLayout(*LAYER[1:], 4, 64)
KEY = "codebook4-n48-k256-g64-bfloat16-bfloat16-m8"
SMALL, GEMM = GemvConfig(4, 2, ahead=0), GemmConfig(1, 2, 16, split_k=2)


class Clock:
    """A timer with fixed microseconds per configuration, which records what it timed."""

    def __init__(self, times: dict[object, float]) -> None:
        self.times, self.asked = times, []

    def __call__(self, calls: list[Callable[[], Tensor]]) -> float:
        config = calls[0].args[-1]
        self.asked.append((len(calls[0].args[0]), config))
        return self.times.get(config, 10.0)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """Gives each test an empty cache, few candidates and a fresh process's state."""
    monkeypatch.setenv("FDK_CUDA_CACHE", str(tmp_path))
    monkeypatch.delenv(autotune.TUNE_VARIABLE, raising=False)
    monkeypatch.setattr(autotune, "candidates", lambda m, bits, gpu, affine: [SMALL, GEMM, None])
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """Resets the state that a new process would not have."""
    autotune._entries.cache_clear()
    autotune._mode.cache_clear()
    autotune._name.cache_clear()
    autotune._chosen.clear()
    autotune._failed.clear()


@pytest.fixture
def chosen(monkeypatch: Patch) -> Chosen:
    """Returns the configuration that the op runs for m rows of LAYER."""

    def configuration(m: int, *, batch_invariant: bool = False) -> object:
        case = Case(Format.parse(LAYER[0]), m, *LAYER[1:], torch.bfloat16)
        seen = []

        def linear(x: Tensor, w: PackedWeight, bias: Tensor | None, config: object) -> Tensor:
            seen.append(config)
            return x.new_zeros(len(x), w.layout.n)

        with monkeypatch.context() as patch:
            patch.setattr(launch, "linear", linear)
            backend = TritonBackend(batch_invariant=batch_invariant)
            backend.pack(case.quantised(), dtype=case.dtype)(case.random(m, case.k))
        return seen[0] if seen else "not asked"

    return configuration


def default(m: int) -> object:
    return autotune.forward_config(LAYOUT, m, H200)


def tune(times: dict[object, float], *ms: int) -> Clock:
    """Tunes LAYER by a clock with these times."""
    clock = Clock(times)
    autotune.tune_layers([LAYER], ms=ms or [8], timer=clock)
    return clock


def test_the_fastest_is_used_and_stored(fresh: Path, chosen: Chosen) -> None:
    clock = Clock({GEMM: 4.0, SMALL: 6.0})
    assert autotune.tune_layers([LAYER], ms=[30], timer=clock) == 1
    # Measured at the bucket's largest m: the default, then the candidates.
    assert [m for m, _ in clock.asked] == [32] * 4
    assert clock.asked[0][1] == default(32)
    for _ in range(2):
        assert chosen(17) == chosen(32) == GEMM
        # Other buckets keep their defaults.
        assert chosen(16) == default(16)
        assert chosen(33) == default(33)
        forget()
    (file,) = fresh.glob("*.json")
    (entry,) = json.loads(file.read_text())["entries"].values()
    assert (entry["kernel"], entry["us"], entry["default_us"]) == ("gemm", 4.0, 10.0)


def test_nothing_is_tuned_twice() -> None:
    clock = Clock({})
    assert autotune.tune_layers([LAYER], ms=range(2, 9), timer=clock) == 1
    count = len(clock.asked)
    assert autotune.tune_layers([LAYER, LAYER], ms=[2, 5, 8], timer=clock) == 0
    forget()
    assert autotune.tune_layers([LAYER], ms=[8], timer=clock) == 0
    assert len(clock.asked) == count


@pytest.mark.parametrize(("n", "k", "count"), [(0, 64, 0), (1, 4, 1)])
def test_empty_weights(n: int, k: int, count: int) -> None:
    """Nothing runs without outputs, so nothing is timed."""
    assert autotune.tune_layers([("custom1-row", n, k)], ms=[1], timer=Clock({})) == count


def test_other_activations_are_refused() -> None:
    with pytest.raises(TypeError, match=r"bfloat16 or torch\.float16, got torch\.float32"):
        autotune.tune_layers([LAYER], dtype=torch.float32, timer=Clock({}))


def test_arguments_are_checked_first() -> None:
    clock = Clock({})
    with pytest.raises(ValueError, match=r"tune_layers: n of custom4-g64 .* got -1"):
        autotune.tune_layers([LAYER, (LAYER[0], -1, 256)], timer=clock)
    for m in (0, -3, 1.5):
        with pytest.raises(ValueError, match=rf"ms must be .* at least 1, got {m}"):
            autotune.tune_layers([LAYER], ms=[8, m], timer=clock)
    assert not clock.asked


def test_no_right_configuration(monkeypatch: Patch) -> None:
    monkeypatch.setattr(launch, "linear", lambda x, w, bias, config: x.new_zeros(len(x), 48))
    with (
        pytest.warns(UserWarning, match="is wrong, and not used"),
        pytest.raises(RuntimeError, match=r"m = 8: of 4 configurations none is right"),
    ):
        tune({})


def test_a_small_gain_does_not_replace_the_default(chosen: Chosen) -> None:
    tune({SMALL: 9.9})
    assert chosen(8) == default(8)


def test_results_of_another_thread_are_used(monkeypatch: Patch) -> None:
    tune({}, 64)
    q = Case(Format.parse(LAYER[0]), 8, *LAYER[1:], torch.bfloat16).quantised()
    w, right = TritonLayout(q)._weight(), autotune._default_of

    def measured_meanwhile(w: PackedWeight, m: int, device: int) -> object:
        monkeypatch.setattr(autotune, "_default_of", right)
        tune({SMALL: 4.0})
        return right(w, m, device)

    monkeypatch.setattr(autotune, "_default_of", measured_meanwhile)
    wanted = default(8)
    assert autotune.choose(w, 8, torch.bfloat16, -1) == wanted
    assert autotune.choose(w, 8, torch.bfloat16, -1) == SMALL


def test_a_wrong_answer_is_not_timed(chosen: Chosen, monkeypatch: Patch) -> None:
    right = launch.gemv

    def wrong(x: Tensor, w: PackedWeight, bias: Tensor | None, config: GemvConfig) -> Tensor:
        y = right(x, w, bias, config)
        return y * torch.nan if config == SMALL else y

    monkeypatch.setattr(launch, "gemv", wrong)
    clock = Clock({SMALL: 1.0})
    with pytest.warns(UserWarning, match="is wrong, and not used"):
        autotune.tune_layers([LAYER], ms=[1], timer=clock)
    assert SMALL not in [config for _, config in clock.asked]
    assert chosen(1) != SMALL


def test_configurations_that_do_not_fit_are_skipped(monkeypatch: Patch) -> None:
    def too_large(*_: object) -> Tensor:
        raise autotune.triton.OutOfResources(300, 200, "shared memory")

    monkeypatch.setattr(launch, "gemm", too_large)
    clock = Clock({})
    autotune.tune_layers([LAYER], ms=[8], timer=clock)
    assert GEMM not in [config for _, config in clock.asked]


def test_batch_invariant_calls_are_not_tuned(chosen: Chosen) -> None:
    tune({SMALL: 1.0}, 1, 8)
    assert chosen(1) == SMALL
    assert chosen(1, batch_invariant=True) == "not asked"


def test_first_use(chosen: Chosen, monkeypatch: Patch) -> None:
    monkeypatch.setenv(autotune.TUNE_VARIABLE, "1")
    clock = Clock({SMALL: 1.0})
    monkeypatch.setattr(autotune, "graph_time", clock)
    case = Case(Format.parse(LAYER[0]), 8, *LAYER[1:], torch.bfloat16)
    layout = TritonBackend().pack(case.quantised(), dtype=case.dtype)
    for m in (5, 8, 2):
        layout(case.random(m, case.k))
    assert {m for m, _ in clock.asked} == {8}
    count = len(clock.asked)
    forget()
    layout(case.random(3, case.k))
    assert len(clock.asked) == count
    monkeypatch.setenv(autotune.TUNE_VARIABLE, "0")
    forget()
    assert chosen(3) == default(3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 0, "gpu": "NAME", "entries": {"KEY": {"kernel": "gemv", "config": {}}}}',
        '{"version": 3, "gpu": "NAME", "entries": {"KEY": {"kernel": "dequantise", "config": {}}}}',
        '{"version": 5, "gpu": "another", "entries": {"KEY": {"kernel": "dequantise"}}}',
        '{"version": 5, "gpu": "NAME", "entries": {"KEY": {"kernel": "gemv", "config": {}}}}',
        '{"version": 5, "gpu": "NAME", "entries": {"KEY": {"kernel": "other", "config": {}}}}',
        '{"version": 5, "gpu": "NAME", "entries": {"KEY": 5}}',
        '{"version": 5, "gpu": "NAME", "entries": 7}',
        '{"version": 5, "gpu": "NAME", "entries": {"KEY": {"kernel": ["gemv"], "config": {}}}}',
        '{"version": 5, "gpu": "NAME", "entries": {"KEY": {"kernel": "gemv", "config": [1]}}}',
        '{"version": 5, "gpu": "NAME", "entries": {"KEY": {"config": {}}}}',
        '{"version": [Infinity, 1]}',
        "[" * 100_000,
        '{"version":' + "[" * 100_000,
        *(
            '{"version": 5, "gpu": "NAME", "entries": {"KEY": {"kernel": "gemv", "config": '
            f'{{"n_tiles": {n_tiles}, "warps": {warps}, "ahead": {ahead}, "fetch": 0, '
            '"overlap": false, "registers": 0, "minus": false}}}}'
            for n_tiles, warps, ahead in [
                (4, 3, 0),  # each number is of the right type and was never tried
                (1 << 40, 2, 0),
                (-4, 2, 0),
                ('"4"', 2, 0),
                (4, 2, 9999),
            ]
        ),
    ],
    ids=range(21),
)
def test_damaged_files_are_ignored(text: str, chosen: Chosen) -> None:
    path = autotune_cache.path_of(autotune._name(-1))
    text = text.replace("NAME", autotune._name(-1)).replace("KEY", KEY)
    path.write_text(text)
    assert autotune_cache.VERSION == 5
    assert chosen(8) == default(8)
    tune({SMALL: 1.0})
    forget()
    assert chosen(8) == SMALL


def test_another_gpu_has_a_file_of_its_own() -> None:
    names = ("NVIDIA H200, triton 3.6.0", "NVIDIA H200, triton 3.7.1", "NVIDIA L40S, triton 3.6.0")
    assert len({autotune_cache.path_of(name) for name in names}) == 3
    autotune_cache.store_entries(names[0], {"a": {"us": 1}})
    assert [autotune_cache.load_entries(name) for name in names] == [{"a": {"us": 1}}, {}, {}]


def store(i: int) -> None:
    """Stores the entries of one process."""
    for j in range(5):
        autotune_cache.store_entries("gpu", {f"{i}-{j}": {"us": i}})


def test_a_planted_lock_is_not_followed(fresh: Path) -> None:
    kept = fresh / "kept"
    kept.write_text("kept")
    lock = autotune_cache.path_of("gpu").with_suffix(".lock")
    lock.symlink_to(kept)
    autotune_cache.store_entries("gpu", {"a": {}})
    assert kept.read_text() == "kept"
    assert autotune_cache.load_entries("gpu") == {}
    lock.unlink()
    os.mkfifo(lock)
    autotune_cache.store_entries("gpu", {"a": {}})  # a FIFO can be locked, and does not block
    assert autotune_cache.load_entries("gpu") == {"a": {}}


def test_a_lock_that_is_never_released(fresh: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(autotune_cache, "LOCK_SECONDS", 0.05)
    with autotune_cache.path_of("gpu").with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        autotune_cache.store_entries("gpu", {"a": {}})
        assert autotune_cache.load_entries("gpu") == {}
    autotune_cache.store_entries("gpu", {"a": {}})
    assert autotune_cache.load_entries("gpu") == {"a": {}}


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: os.symlink(path.parent / "x", path)])
def test_planted_entries_are_neither_read_nor_waited_for(
    plant: Callable[[Path], None], chosen: Chosen, fresh: Path
) -> None:
    tune({SMALL: 1.0})
    path = autotune_cache.path_of(autotune._name(-1))
    path.rename(fresh / "x")
    plant(path)
    forget()
    with pytest.warns(RuntimeWarning, match="does not use its cache .*tuned-"):
        assert chosen(8) == default(8)
    tune({SMALL: 1.0})  # replaces what was planted
    forget()
    assert chosen(8) == SMALL


def test_entries_that_others_can_write(chosen: Chosen, fresh: Path) -> None:
    tune({SMALL: 1.0})
    autotune_cache.path_of(autotune._name(-1)).chmod(0o666)
    forget()
    with pytest.warns(RuntimeWarning, match=r"can be written by others \(mode 0666"):
        assert chosen(8) == default(8)


def test_processes_lose_no_entries() -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(store, range(8), chunksize=1)
    assert len(autotune_cache.load_entries("gpu")) == 40


def test_a_directory_that_cannot_be_written(
    chosen: Chosen, monkeypatch: Patch, fresh: Path
) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("FDK_CUDA_CACHE", str(fresh / "file"))
    assert autotune.tune_layers([LAYER], ms=[8], timer=Clock({SMALL: 1.0})) == 1
    assert chosen(8) == SMALL


def test_a_user_without_a_home(chosen: Chosen, monkeypatch: Patch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("FDK_CUDA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert chosen(8) == default(8)
    assert autotune.tune_layers([LAYER], ms=[8], timer=Clock({SMALL: 1.0})) == 1
    assert chosen(8) == SMALL


def test_failed_writes_leave_nothing(monkeypatch: Patch, fresh: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        autotune_cache.store_entries("gpu", {"a": {}})
    assert [path.suffix for path in fresh.iterdir()] == [".lock"]
    assert autotune_cache.load_entries("gpu") == {}


def weight(scale: torch.dtype, zero: torch.dtype | None) -> PackedWeight:
    return autotune.random_weights(LAYOUT, scale, zero, -1)[0]


def test_keys_hold_every_dtype() -> None:
    assert autotune.key_of(weight(torch.bfloat16, None), 8, torch.bfloat16) == KEY
    dtypes = (torch.uint8, torch.float16, torch.float32)
    ws = [weight(scale, zero) for scale in dtypes for zero in (None, *dtypes)]
    keys = {autotune.key_of(w, 8, x) for w in ws for x in (torch.float16, torch.bfloat16)}
    assert len(keys) == 2 * len(ws) == 24


@pytest.mark.parametrize("format", ["nf4-g64", "int4-g64", "affine4-g64", "nf4-g64-e8m0"])
def test_layers_are_found_by_their_dtypes(format: str, monkeypatch: Patch) -> None:
    autotune.tune_layers([(format, *LAYER[1:])], ms=[8], timer=Clock({SMALL: 1.0}))
    case = Case(Format.parse(format), 8, *LAYER[1:], torch.bfloat16)
    seen = []
    find = autotune.choose
    monkeypatch.setattr(autotune, "choose", lambda *args: seen.append(find(*args)) or seen[-1])
    TritonBackend().pack(case.quantised(), dtype=case.dtype)(case.random(8, case.k))
    assert seen == [SMALL]


def test_another_thread_may_clear_the_choices(chosen: Chosen, monkeypatch: Patch) -> None:
    class Emptied(dict[tuple[object, ...], object]):
        """A dictionary that another thread empties at once."""

        def __setitem__(self, key: tuple[object, ...], config: object) -> None:
            pass

    tune({SMALL: 1.0})
    monkeypatch.setattr(autotune, "_chosen", Emptied())
    assert chosen(8) == SMALL


def test_dequantise_can_win_and_is_kept(chosen: Chosen, monkeypatch: Patch) -> None:
    tune({None: 1.0}, 64)
    assert chosen(40) is None
    monkeypatch.setattr(autotune, "key_of", None)
    assert chosen(40) is None


def test_the_random_state_is_unchanged(monkeypatch: Patch) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    tune({}, 1, 8)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("min of nothing")])
def test_failed_tuning_at_first_use(error: Exception, monkeypatch: Patch) -> None:
    def fails(*_: object) -> float:
        raise error

    monkeypatch.setenv(autotune.TUNE_VARIABLE, "1")
    monkeypatch.setattr(autotune, "graph_time", fails)
    case = Case(Format.parse(LAYER[0]), 8, *LAYER[1:], torch.bfloat16)
    w = weight(torch.bfloat16, None)
    with pytest.warns(UserWarning, match=f"{KEY} is not tuned.*{error}") as caught:
        found = autotune.choose(w, 8, case.dtype, -1)
    assert len(caught) == 1
    assert found == default(8)
    # It is not tried again, for another m of the bucket or after ``_chosen`` was cleared.
    autotune._chosen.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [autotune.choose(w, m, case.dtype, -1) for m in (8, 5)] == [found, found]


def test_capture_does_not_cache_the_default(chosen: Chosen, monkeypatch: Patch) -> None:
    monkeypatch.setenv(autotune.TUNE_VARIABLE, "1")
    clock = Clock({SMALL: 1.0})
    monkeypatch.setattr(autotune, "graph_time", clock)
    with monkeypatch.context() as patch:
        patch.setattr(autotune, "_is_capturing", lambda: True)
        assert chosen(8) == default(8)
    assert not clock.asked
    w = weight(torch.bfloat16, None)
    assert autotune.choose(w, 8, torch.bfloat16, -1) == SMALL
    with monkeypatch.context() as patch:
        patch.setattr(autotune, "_is_capturing", lambda: True)
        assert chosen(8) == SMALL


def test_equal_gpus_share_results(monkeypatch: Patch) -> None:
    monkeypatch.setattr(autotune, "_name", autotune.cache(lambda device: "two of them"))
    monkeypatch.setattr(launch, "gpu_at", lambda device: H200)
    w = weight(torch.bfloat16, None)
    before = autotune.choose(w, 8, torch.bfloat16, 1)
    tune({SMALL: 1.0})
    assert autotune.choose(w, 8, torch.bfloat16, 1) == SMALL != before


def test_captures_are_thread_local(monkeypatch: Patch) -> None:
    asked = {}

    def refuse(graph: object, **options: object) -> None:
        asked.update(options)
        raise InterruptedError

    for name in ("synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    with pytest.raises(InterruptedError):
        autotune.graph_time([lambda: torch.ones(1)])
    assert asked == {"capture_error_mode": "thread_local"}


def test_tuning_switched_off(chosen: Chosen, monkeypatch: Patch) -> None:
    monkeypatch.setenv(autotune.TUNE_VARIABLE, "0")
    tune({SMALL: 1.0})
    assert chosen(8) == default(8)


@pytest.mark.parametrize("text", ["true", "2", "off"])
def test_an_unknown_value_of_the_variable(text: str, chosen: Chosen, monkeypatch: Patch) -> None:
    monkeypatch.setenv(autotune.TUNE_VARIABLE, text)
    with pytest.raises(ValueError, match=f"FDK_CUDA_TUNE must be 0, 1 or not set, got '{text}'"):
        chosen(8)


def test_gpus() -> None:
    assert [gpu_of(c) for c in ((9, 0), (8, 0), (8, 6))] == [GPUS[9, 0], GPUS[8, 0], GPUS[8, 6]]
    # The nearest older one; the first for GPUs that are older than all.
    assert [gpu_of(c) for c in ((8, 7), (10, 3), (12, 1), (7, 5))] == [
        GPUS[8, 6],
        GPUS[10, 0],
        GPUS[12, 0],
        GPUS[8, 0],
    ]
    assert (H200.few_outputs, H200.enough_programs, H200.shared_bytes) == (4096, 256, 232448)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=[f"{a}.{b}" for a, b in GPUS])
def test_defaults_fit_every_gpu(gpu: Gpu) -> None:
    for bits in range(1, 9):
        for n, k in ((64, 64), (4096, 4096), (28672, 8192)):
            a = PackedLayout(n, k, bits, 64)
            for m in (1, 8, 16, 17, 64, 65, 128, 129, 4096):
                config = autotune.forward_config(a, m, gpu)
                if serves_gemm_wgmma(a, m, gpu):
                    assert isinstance(config, GemmWgmmaConfig)
                    continue
                kinds = (GemvConfig, GemmConfig, type(None))
                assert isinstance(config, kinds[(m > 16) + (m > 128)])
                if isinstance(config, GemmConfig):
                    assert fit(config, bits, gpu.shared_bytes) == config
                    assert config.split_k == 1 or config.split_k <= 2 * a.k_tiles


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("gpu", GPUS.values(), ids=[f"{a}.{b}" for a, b in GPUS])
def test_real_candidates_fit(gpu: Gpu, affine: bool, monkeypatch: Patch) -> None:
    monkeypatch.undo()
    for m in autotune.BUCKETS:
        for bits in (1, 4, 8):
            layout = PackedLayout(4096, 4096, bits, 64)
            found = autotune.candidates(layout, m, gpu, affine=affine)
            assert len(set(found)) == len(found)
            assert (None in found) == (m > 8)
            assert any(isinstance(c, GemvConfig) for c in found) == (m <= 16)
            gemms = [c for c in found if isinstance(c, GemmConfig)]
            assert all(fit(c, bits, gpu.shared_bytes) == c for c in gemms)


def small_candidates(bits: int, gpu: Gpu, *, affine: bool, m: int = 8) -> set[object]:
    layout = PackedLayout(4096, 4096, bits, 64)
    found = autotune.candidates(layout, m, gpu, affine=affine)
    return {config for config in found if isinstance(config, GemvConfig)}


def test_candidates_fit_in_shared_memory(monkeypatch: Patch) -> None:
    """Partial sums of all warps reuse the table if it is large enough."""
    monkeypatch.undo()
    every = small_candidates(4, H200, affine=True)
    assert len(every) == 36
    for bits in (1, 4, 7, 8):
        assert small_candidates(bits, H200, affine=False) == every
    # 32 KiB of sums, a table of 16 KiB.
    large = {c for c in every if c.n_tiles * c.warps == 64}
    for bits in (3, 6):
        assert small_candidates(bits, H200, affine=False) == every - large
    for bits in (4, 6):
        assert small_candidates(bits, H200, affine=True, m=16) == every - large
    large |= {c for c in every if c.n_tiles * c.warps == 32}
    assert small_candidates(6, H200, affine=False, m=16) == every - large


@pytest.mark.parametrize("capability", GPUS, ids=str)
def test_candidates_without_prefetch_and_overlap(
    capability: tuple[int, int], monkeypatch: Patch
) -> None:
    """Both need compute capability 9.0; earlier GPUs have half of the candidates."""
    monkeypatch.undo()
    gpu = GPUS[capability]
    found = small_candidates(2, gpu, affine=False)
    found |= {autotune.forward_config(PackedLayout(n, 4096, 2, 64), 8, gpu) for n in (4096, 8192)}
    differs = capability >= (9, 0)
    assert gpu.can_overlap == differs
    assert any(c.fetch for c in found) == any(c.overlap for c in found) == differs
    assert len(small_candidates(2, gpu, affine=False)) == (36 if differs else 18)
