"""Tuning by a fake clock: run by test_interpreted.py with TRITON_INTERPRET=1."""

import json
import multiprocessing
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
from fdk_formats import Format
from fdk_formats.testing import Case

assert launch.INTERPRETED
fix_scalar_masks()
LAYER = ("custom4-g64", 48, 256)
KEY = "codebook4-n48-k256-g64-bfloat16-bfloat16-m8"
SMALL, GEMM = GemvConfig(4, 2, ahead=0), GemmConfig(1, 2, 16, split_k=2)


class Clock:
    """Microseconds by configuration; remembers what it was asked for."""

    def __init__(self, times: dict[object, float]) -> None:
        self.times, self.asked = times, []

    def __call__(self, calls: list[Callable[[], Tensor]]) -> float:
        config = calls[0].args[-1]
        self.asked.append((len(calls[0].args[0]), config))
        return self.times.get(config, 10.0)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, few candidates, and nothing compiled."""
    monkeypatch.setenv("FDK_CUDA_CACHE", str(tmp_path))
    monkeypatch.delenv(autotune.TUNE_VARIABLE, raising=False)
    monkeypatch.setattr(autotune, "candidates", lambda m, bits, gpu, affine: [SMALL, GEMM, None])
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """As a new process."""
    autotune._entries.cache_clear()
    autotune._mode.cache_clear()
    autotune._name.cache_clear()
    autotune._chosen.clear()
    autotune._failed.clear()


def configs(m: int, monkeypatch: pytest.MonkeyPatch, *, batch_invariant: bool = False) -> object:
    """What the op runs for m rows of LAYER."""
    case = Case(Format.parse(LAYER[0]), m, *LAYER[1:], torch.bfloat16)
    seen = []

    def linear(x: Tensor, w: launch.PackedWeight, bias: Tensor | None, config: object) -> Tensor:
        seen.append(config)
        return x.new_zeros(len(x), w.layout.n)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "linear", linear)
        backend = TritonBackend(batch_invariant=batch_invariant)
        backend.pack(case.quantised(), dtype=case.dtype)(case.random(m, case.k))
    return seen[0] if seen else "not asked"


def test_the_fastest_is_used_and_stored(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({GEMM: 4.0, SMALL: 6.0})
    assert autotune.tune_layers([LAYER], ms=[30], timer=clock) == 1
    # Measured at the bucket's largest m: the default, then the candidates.
    assert [m for m, _ in clock.asked] == [32] * 4
    assert clock.asked[0][1] == autotune.forward_config(*arrangement(), 32, H200)
    for _ in range(2):
        assert configs(17, monkeypatch) == configs(32, monkeypatch) == GEMM
        # Other buckets are as they were.
        assert configs(16, monkeypatch) == autotune.forward_config(*arrangement(), 16, H200)
        assert configs(33, monkeypatch) == autotune.forward_config(*arrangement(), 33, H200)
        forget()
    (file,) = fresh.glob("*.json")
    (entry,) = json.loads(file.read_text())["entries"].values()
    assert (entry["kernel"], entry["us"], entry["default_us"]) == ("gemm", 4.0, 10.0)


def arrangement() -> tuple[PackedLayout]:
    return (PackedLayout(*LAYER[1:], 4, 64),)


def test_nothing_is_tuned_twice() -> None:
    clock = Clock({})
    assert autotune.tune_layers([LAYER], ms=range(2, 9), timer=clock) == 1
    count = len(clock.asked)
    assert autotune.tune_layers([LAYER, LAYER], ms=[2, 5, 8], timer=clock) == 0
    forget()
    assert autotune.tune_layers([LAYER], ms=[8], timer=clock) == 0
    assert len(clock.asked) == count


@pytest.mark.parametrize(("n", "k", "count"), [(0, 64, 0), (1, 4, 1)])
def test_weights_of_no_bytes(n: int, k: int, count: int) -> None:
    """Without outputs nothing is run, so nothing is measured."""
    assert autotune.tune_layers([("custom1-row", n, k)], ms=[1], timer=Clock({})) == count


def test_other_activations_are_refused() -> None:
    with pytest.raises(TypeError, match=r"bfloat16 or torch\.float16, got torch\.float32"):
        autotune.tune_layers([LAYER], dtype=torch.float32, timer=Clock({}))


def test_nothing_is_measured_before_all_is_checked() -> None:
    clock = Clock({})
    with pytest.raises(ValueError, match=r"tune_layers: n of custom4-g64 .* got -1"):
        autotune.tune_layers([LAYER, (LAYER[0], -1, 256)], timer=clock)
    for m in (0, -3, 1.5):
        with pytest.raises(ValueError, match=rf"ms must be .* at least 1, got {m}"):
            autotune.tune_layers([LAYER], ms=[8, m], timer=clock)
    assert not clock.asked


def test_no_configuration_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "linear", lambda x, w, bias, config: x.new_zeros(len(x), 48))
    with (
        pytest.warns(UserWarning, match="is wrong, and not used"),
        pytest.raises(RuntimeError, match=r"m = 8: of 4 configurations none is right"),
    ):
        autotune.tune_layers([LAYER], ms=[8], timer=Clock({}))


def test_a_small_gain_does_not_replace_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    autotune.tune_layers([LAYER], ms=[8], timer=Clock({SMALL: 9.9}))
    assert configs(8, monkeypatch) == autotune.forward_config(*arrangement(), 8, H200)


def test_what_another_thread_measures_meanwhile_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    autotune.tune_layers([LAYER], ms=[64], timer=Clock({}))
    q = Case(Format.parse(LAYER[0]), 8, *LAYER[1:], torch.bfloat16).quantised()
    w, right = TritonLayout(q)._weight(), autotune._default_of

    def measured_meanwhile(w: launch.PackedWeight, m: int, device: int) -> object:
        monkeypatch.setattr(autotune, "_default_of", right)
        autotune.tune_layers([LAYER], ms=[8], timer=Clock({SMALL: 4.0}))
        return right(w, m, device)

    monkeypatch.setattr(autotune, "_default_of", measured_meanwhile)
    wanted = autotune.forward_config(*arrangement(), 8, H200)
    assert autotune.choose(w, 8, torch.bfloat16, -1) == wanted
    assert autotune.choose(w, 8, torch.bfloat16, -1) == SMALL


def test_dequantise_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    autotune.tune_layers([LAYER], ms=[64], timer=Clock({None: 1.0}))
    assert configs(40, monkeypatch) is None


def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = launch.gemv

    def wrong(x: Tensor, w: launch.PackedWeight, bias: Tensor | None, config: GemvConfig) -> Tensor:
        y = right(x, w, bias, config)
        return y * torch.nan if config == SMALL else y

    monkeypatch.setattr(launch, "gemv", wrong)
    clock = Clock({SMALL: 1.0})
    with pytest.warns(UserWarning, match="is wrong, and not used"):
        autotune.tune_layers([LAYER], ms=[1], timer=clock)
    assert SMALL not in [config for _, config in clock.asked]
    assert configs(1, monkeypatch) != SMALL


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> Tensor:
        raise autotune.triton.OutOfResources(300, 200, "shared memory")

    monkeypatch.setattr(launch, "gemm", too_large)
    clock = Clock({})
    autotune.tune_layers([LAYER], ms=[8], timer=clock)
    assert GEMM not in [config for _, config in clock.asked]


def test_batch_invariant_calls_are_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    autotune.tune_layers([LAYER], ms=[1, 8], timer=Clock({SMALL: 1.0}))
    assert configs(1, monkeypatch) == SMALL
    assert configs(1, monkeypatch, batch_invariant=True) == "not asked"


def test_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert configs(3, monkeypatch) == autotune.forward_config(*arrangement(), 3, H200)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 0, "gpu": "NAME", "entries": {"KEY": {"kernel": "gemv", "config": {}}}}',
        # When 3 bits had no table in shared memory, and room for twice the sums.
        '{"version": 3, "gpu": "NAME", "entries": {"KEY": {"kernel": "dequantise", "config": {}}}}',
        '{"version": 5, "gpu": "another", "entries": {"KEY": {"kernel": "dequantise"}}}',
        '{"version": 5, "gpu": "NAME", "entries": {"KEY": {"kernel": "gemv", "config": {}}}}',
        '{"version": 5, "gpu": "NAME", "entries": {"KEY": {"kernel": "other", "config": {}}}}',
        '{"version": 5, "gpu": "NAME", "entries": {"KEY": 5}}',
        '{"version": 5, "gpu": "NAME", "entries": 7}',
    ],
)
def test_a_damaged_file_is_as_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = autotune_cache.path_of(autotune._name(-1))
    text = text.replace("NAME", autotune._name(-1)).replace("KEY", KEY)
    path.write_text(text)
    assert autotune_cache.VERSION == 5
    assert configs(8, monkeypatch) == autotune.forward_config(*arrangement(), 8, H200)
    autotune.tune_layers([LAYER], ms=[8], timer=Clock({SMALL: 1.0}))
    forget()
    assert configs(8, monkeypatch) == SMALL


def test_another_gpu_has_a_file_of_its_own() -> None:
    names = ("NVIDIA H200, triton 3.6.0", "NVIDIA H200, triton 3.7.1", "NVIDIA L40S, triton 3.6.0")
    assert len({autotune_cache.path_of(name) for name in names}) == 3
    autotune_cache.store_entries(names[0], {"a": {"us": 1}})
    assert [autotune_cache.load_entries(name) for name in names] == [{"a": {"us": 1}}, {}, {}]


def store(i: int) -> None:
    """One process's entries."""
    for j in range(5):
        autotune_cache.store_entries("gpu", {f"{i}-{j}": {"us": i}})


def test_processes_lose_no_entries() -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(store, range(8), chunksize=1)
    assert len(autotune_cache.load_entries("gpu")) == 40


def test_a_directory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("FDK_CUDA_CACHE", str(fresh / "file"))
    assert autotune.tune_layers([LAYER], ms=[8], timer=Clock({SMALL: 1.0})) == 1
    assert configs(8, monkeypatch) == SMALL


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("FDK_CUDA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert configs(8, monkeypatch) == autotune.forward_config(*arrangement(), 8, H200)
    assert autotune.tune_layers([LAYER], ms=[8], timer=Clock({SMALL: 1.0})) == 1
    assert configs(8, monkeypatch) == SMALL


def test_what_cannot_be_written_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, fresh: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        autotune_cache.store_entries("gpu", {"a": {}})
    assert [path.suffix for path in fresh.iterdir()] == [".lock"]
    assert autotune_cache.load_entries("gpu") == {}


def weight(scale: torch.dtype, zero: torch.dtype | None) -> launch.PackedWeight:
    return autotune.random_weights(*arrangement(), scale, zero, -1)[0]


def test_keys_hold_every_dtype() -> None:
    assert autotune.key_of(weight(torch.bfloat16, None), 8, torch.bfloat16) == KEY
    dtypes = (torch.uint8, torch.float16, torch.float32)
    ws = [weight(scale, zero) for scale in dtypes for zero in (None, *dtypes)]
    keys = {autotune.key_of(w, 8, x) for w in ws for x in (torch.float16, torch.bfloat16)}
    assert len(keys) == 2 * len(ws) == 24


@pytest.mark.parametrize("format", ["nf4-g64", "int4-g64", "affine4-g64", "nf4-g64-e8m0"])
def test_layers_are_found_by_the_dtypes_they_have(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    autotune.tune_layers([(format, *LAYER[1:])], ms=[8], timer=Clock({SMALL: 1.0}))
    case = Case(Format.parse(format), 8, *LAYER[1:], torch.bfloat16)
    seen = []
    find = autotune.choose
    monkeypatch.setattr(autotune, "choose", lambda *args: seen.append(find(*args)) or seen[-1])
    TritonBackend().pack(case.quantised(), dtype=case.dtype)(case.random(8, case.k))
    assert seen == [SMALL]


def test_another_thread_may_forget_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Emptied(dict[tuple[object, ...], object]):
        """Another thread has emptied it whenever this one looks again."""

        def __setitem__(self, key: tuple[object, ...], config: object) -> None:
            pass

    autotune.tune_layers([LAYER], ms=[8], timer=Clock({SMALL: 1.0}))
    monkeypatch.setattr(autotune, "_chosen", Emptied())
    assert configs(8, monkeypatch) == SMALL


def test_dequantise_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    autotune.tune_layers([LAYER], ms=[64], timer=Clock({None: 1.0}))
    assert configs(40, monkeypatch) is None
    monkeypatch.setattr(autotune, "key_of", None)
    assert configs(40, monkeypatch) is None


def test_the_programs_generator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    autotune.tune_layers([LAYER], ms=[1, 8], timer=Clock({}))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("min of nothing")])
def test_tuning_that_fails_in_a_forward(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> float:
        raise error

    monkeypatch.setenv(autotune.TUNE_VARIABLE, "1")
    monkeypatch.setattr(autotune, "graph_time", fails)
    case = Case(Format.parse(LAYER[0]), 8, *LAYER[1:], torch.bfloat16)
    w = weight(torch.bfloat16, None)
    with pytest.warns(UserWarning, match=f"{KEY} is not tuned.*{error}") as caught:
        found = autotune.choose(w, 8, case.dtype, -1)
    assert len(caught) == 1
    assert found == autotune.forward_config(*arrangement(), 8, H200)
    # Nor again, by another m of the bucket, and where another bucket's success emptied ``_chosen``.
    autotune._chosen.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [autotune.choose(w, m, case.dtype, -1) for m in (8, 5)] == [found, found]


def test_a_capture_does_not_keep_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune.TUNE_VARIABLE, "1")
    clock = Clock({SMALL: 1.0})
    monkeypatch.setattr(autotune, "graph_time", clock)
    with monkeypatch.context() as patch:
        patch.setattr(autotune, "_is_capturing", lambda: True)
        assert configs(8, monkeypatch) == autotune.forward_config(*arrangement(), 8, H200)
    assert not clock.asked
    w = weight(torch.bfloat16, None)
    assert autotune.choose(w, 8, torch.bfloat16, -1) == SMALL
    with monkeypatch.context() as patch:
        patch.setattr(autotune, "_is_capturing", lambda: True)
        assert configs(8, monkeypatch) == SMALL


def test_gpus_of_a_kind_share_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_name", autotune.cache(lambda device: "two of them"))
    monkeypatch.setattr(launch, "gpu_at", lambda device: H200)
    w = weight(torch.bfloat16, None)
    before = autotune.choose(w, 8, torch.bfloat16, 1)
    autotune.tune_layers([LAYER], ms=[8], timer=Clock({SMALL: 1.0}))
    assert autotune.choose(w, 8, torch.bfloat16, 1) == SMALL != before


def test_a_capture_is_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_tuning_switched_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune.TUNE_VARIABLE, "0")
    autotune.tune_layers([LAYER], ms=[8], timer=Clock({SMALL: 1.0}))
    assert configs(8, monkeypatch) == autotune.forward_config(*arrangement(), 8, H200)


@pytest.mark.parametrize("text", ["true", "2", "off"])
def test_an_unknown_value_of_the_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune.TUNE_VARIABLE, text)
    with pytest.raises(ValueError, match=f"FDK_CUDA_TUNE must be 0, 1 or not set, got '{text}'"):
        configs(8, monkeypatch)


def test_gpus() -> None:
    assert [gpu_of(c) for c in ((9, 0), (8, 0), (8, 6))] == [GPUS[9, 0], GPUS[8, 0], GPUS[8, 6]]
    # The nearest before it; the first for what is older than all.
    assert [gpu_of(c) for c in ((8, 7), (10, 3), (12, 1), (7, 5))] == [
        GPUS[8, 6],
        GPUS[10, 0],
        GPUS[12, 0],
        GPUS[8, 0],
    ]
    # The numbers that the H200's configurations were measured with.
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
def test_real_candidates_fit(gpu: Gpu, affine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_only_what_has_room_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of all warps lie in a table, if it is large enough, or beside it."""
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
def test_what_a_gpu_leaves_aside_is_no_candidate(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetching to the L2 and overlap need 9.0: before it, two ways are left of four."""
    monkeypatch.undo()
    gpu = GPUS[capability]
    found = small_candidates(2, gpu, affine=False)
    found |= {autotune.forward_config(PackedLayout(n, 4096, 2, 64), 8, gpu) for n in (4096, 8192)}
    differs = capability >= (9, 0)
    assert gpu.can_overlap == differs
    assert any(c.fetch for c in found) == any(c.overlap for c in found) == differs
    assert len(small_candidates(2, gpu, affine=False)) == (36 if differs else 18)
