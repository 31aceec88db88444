"""Calibrated quantisation of whole models: Hessians by streaming, block after block.

Most models are chains of equal blocks. A block is run on what the quantised blocks before it give,
the second moments of what its linear layers receive are summed up, its layers are quantised and
replaced, and it is run again for the inputs of the next block. At any time the hidden states of the
calibration inputs and the Hessians of one block are held, whatever the size of the model. Layers
outside such chains are calibrated at the end, by runs of the whole model. The experts of a mixture
have Hessians of their own.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fdk_formats.compensate import Hessian, add_moments, output_error
from fdk_formats.distil import Teacher, distil, output_head
from fdk_formats.expert_moments import ExpertMoments, expert_moments
from fdk_formats.experts import ExpertLinear, layers_and_projections
from fdk_formats.format import Format
from fdk_formats.layer_kinds import matrix_of
from fdk_formats.model_inputs import Call, calls_of, device_of, in_fast_dtype
from fdk_formats.quantise import quantise, quantise_stack
from fdk_formats.tensor import QuantisedStack, QuantisedTensor, relative_error

logger = logging.getLogger(__name__)

# Up to this many bits a model without calibration is broken or nearly so.
ADVISED_BITS = 3

# How often ``calibrate_weights`` distils from each input.
EPOCHS = 2

RESULTS = "quantised-{:05}.safetensors"
DISTILLED = "distilled.safetensors"


@dataclass(frozen=True)
class CalibratedLayer:
    """One quantised layer, as ``calibrate`` yields it.

    Attributes:
        name: dotted name in the model.
        quantised: the weight, or the stack of a projection of experts.
        relative_error: RMS error of the weight, see ``relative_error``.
        output_error: RMS error of the outputs, see ``output_error``; None if the layer was never
            called with the calibration inputs, and so quantised without them.
    """

    name: str
    quantised: QuantisedTensor | QuantisedStack
    relative_error: float
    output_error: float | None


def calibrate(
    model: nn.Module,
    formats: Mapping[str, Format | str],
    inputs: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    folder: Path | str | None = None,
    progress: bool = True,
) -> Iterator[list[CalibratedLayer]]:
    """Quantises the linear layers of a model block after block, with calibration inputs.

    A generator. The layers that it yields must be replaced in ``model`` before it goes on (see
    ``replace_layers``), because the next block is calibrated with what they give.

    Args:
        model: any module, in evaluation mode. Its layers are only read.
        formats: the format of each layer to quantise, by dotted name: ``nn.Linear`` layers, and
            projections of experts, as ``layers.0.mlp.experts.down_proj``.
        inputs: what the model is called with, one call each: a tensor such as token ids
            ``[batch, tokens]``, a mapping of keyword arguments, or a tuple of arguments. One tensor
            ``[windows, tokens]`` is called window by window. Every row of a batch counts, padding
            too: better give none.
        device: where to run blocks; they move there and back one at a time. By default they run
            where the model is.
        folder: keeps the result of each block in files. Called again with the same arguments after
            a kill, it goes on where it stopped and gives the same result.
        progress: show a line with the remaining time on a terminal.

    Yields:
        The layers of one block at a time, in the order of the model.

    Raises:
        ValueError: if a name is neither, if there are no inputs, if a block gives numbers
            that are not finite, or if ``folder`` holds the results of other arguments.

    Example:
        >>> for layers in calibrate(model, dict.fromkeys(names, "kmeans3-g64"), tokens):
        ...     replace_layers(model, {each.name: each.quantised for each in layers})
    """
    wanted = {name: Format.parse(format) for name, format in formats.items()}
    sources = {
        name: module
        for name, module in layers_and_projections(model)
        if isinstance(module, nn.Linear | ExpertLinear)
    }
    for name in wanted:
        if name not in sources:
            raise ValueError(f"calibrate: {name!r} is no linear layer of the model, nor experts")
    calls = calls_of(inputs)
    store = _Store(Path(folder), wanted, sources, calls) if folder is not None else None
    bar, done = _Progress("quantise", "layers") if progress else None, 0
    for step, block in enumerate(_blocks(model, sources, wanted, calls, device)):
        layers = store.load(step, block.names) if store else None
        if layers is None:
            layers = _quantise_block(block, wanted)
            if store:
                store.save(step, layers)
        yield layers
        done += len(layers)
        if bar:
            bar.show(done, len(wanted))


def calibrate_weights(
    model: nn.Module,
    formats: Mapping[str, Format | str],
    inputs: Iterable[Any],
    *,
    epochs: int = EPOCHS,
    device: torch.device | str | None = None,
    folder: Path | str | None = None,
    progress: bool = True,
) -> dict[str, CalibratedLayer]:
    """Quantises layers by ``calibrate``, then trains scales of linear layers end to end.

    The weights in ``model`` become the values of the quantised ones. Of layers that share a weight
    the first counts.

    Args:
        model: see ``calibrate``, as for the other arguments.
        formats: see ``calibrate``.
        inputs: see ``calibrate``.
        epochs: how often ``distil`` uses each input; 0 for calibration alone, as for models
            without an output head. It runs the whole model where ``device`` says.
        device: see ``calibrate``.
        folder: see ``calibrate``; distillation goes on where it stopped, too.
        progress: see ``calibrate``.

    Returns:
        The layers by name, in the order of the model.
    """
    calls = calls_of(inputs)
    sources: dict[str, Any] = dict(layers_and_projections(model))
    owners = {id(sources[name].weight): name for name in reversed(list(formats))}
    formats = {name: format for name, format in formats.items() if name in owners.values()}
    home = device_of(model)
    place = torch.device(device) if device is not None else home
    with in_fast_dtype(model, calls, place):
        runs = [partial(call.run, model) for call in calls]
        teacher = None
        if epochs and output_head(model) is not None:
            teacher = Teacher(model.to(place), runs)
            model.to(home)
        layers = {}
        found_blocks = calibrate(
            model, formats, calls, device=device, folder=folder, progress=progress
        )
        for block in found_blocks:
            for layer in block:
                with torch.no_grad():
                    matrix_of(sources[layer.name]).copy_(layer.quantised.dequantise())
                layers[layer.name] = layer
        if teacher is not None:
            bar = _Progress("distil", "steps") if progress else None
            # Scales of experts stay: a text reaches each of them with few tokens.
            quantised = {name: layer.quantised for name, layer in layers.items()}
            weights = {n: q for n, q in quantised.items() if isinstance(q, QuantisedTensor)}
            model.to(place)
            found = distil(
                model,
                weights,
                teacher,
                runs,
                epochs=epochs,
                on_step=bar.show if bar else None,
                file=None if folder is None else Path(folder) / DISTILLED,
            )
            model.to(home)
            for name, q in found.items():
                layers[name] = replace(layers[name], quantised=q.to(home))
    return layers


def advise_calibration(formats: Iterable[Format]) -> None:
    """Logs, once, that calibration would help if any of the formats has 3 bits or fewer.

    For callers that quantise a model without calibration.
    """
    if any(format.bits <= ADVISED_BITS for format in formats):
        _advise()


@cache
def _advise() -> None:
    logger.warning(
        "quantising to 3 bits or fewer without calibration: a text of 16,000 tokens or more "
        "lowers the error of a language model several times (see calibrate)"
    )


def token_windows(text: str, tokenizer: Any, length: int = 512, count: int | None = None) -> Tensor:
    """Cuts a text into windows of tokens, for calibration or to measure on.

    Args:
        text: the text. For calibration it has to be broad: what it lacks is quantised worse.
        tokenizer: a Hugging Face tokenizer, or any callable from a text to a mapping with
            ``input_ids``. Where it begins a text with a token of its own, every window begins with
            that: without it, Gemma predicts little.
        length: tokens in a window.
        count: how many windows, spread evenly over the text; None for all.

    Returns:
        ``[windows, length, int64]``.

    Raises:
        ValueError: if the text is too short.
    """
    begin = _first_tokens(tokenizer)
    ids = torch.as_tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    own = length - len(begin)
    whole = len(ids) // own if own > 0 else 0
    wanted = 1 if count is None else count
    if wanted < 1:
        raise ValueError(f"wanted at least one window of {length} tokens, got {wanted}")
    if wanted > whole:
        raise ValueError(
            f"wanted {wanted} windows of {length} tokens, the text has {whole}; use "
            "a longer text, or fewer or shorter windows"
        )
    windows = ids[: whole * own].view(whole, own)
    if count is not None:
        windows = windows[torch.arange(count) * whole // count]
    return torch.cat([torch.tensor([begin]).expand(len(windows), -1).to(windows), windows], 1)


def _first_tokens(tokenizer: Any) -> list[int]:
    """Returns the token that the tokenizer begins texts with, if it does."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return []
    first = list(tokenizer("")["input_ids"][:1])
    return first if first == [bos] else []


def random_windows(tokenizer: Any, length: int = 512, count: int = 32) -> Tensor:
    """Draws windows of random tokens, for calibration without a text.

    Each token but the special ones is equally likely, the same ones at every call. Windows begin as
    those of ``token_windows``. Any text is better; at 3 bits random tokens are far better than
    nothing.

    Args:
        tokenizer: a Hugging Face tokenizer.
        length: tokens in a window.
        count: how many windows.

    Returns:
        ``[count, length, int64]``.

    Raises:
        ValueError: if a window has no room for a token.
    """
    begin = torch.tensor(_first_tokens(tokenizer), dtype=torch.int64)
    own = length - len(begin)
    if own < 1:
        raise ValueError(f"wanted windows of {len(begin) + 1} tokens or more, got {length}")
    special = set(tokenizer.all_special_ids)
    tokens = torch.tensor([each for each in range(len(tokenizer)) if each not in special])
    generator = torch.Generator().manual_seed(0)
    drawn = tokens[torch.randint(len(tokens), (count, own), generator=generator)]
    return torch.cat([begin.expand(count, -1), drawn], 1)


def _quantise_block(block: "_Block", formats: Mapping[str, Format]) -> list[CalibratedLayer]:
    hessians, of_experts = block.moments()
    layers = []
    for name in block.names:
        weight = matrix_of(block.sources[name]).detach()
        try:
            if isinstance(block.sources[name], ExpertLinear):
                q, loss = _quantised_stack(weight, formats[name], of_experts[name])
            else:
                q, loss = _quantised(weight, formats[name], hessians.get(name))
        except ValueError as error:
            raise ValueError(f"calibrate: layer {name}: {error}") from None
        if loss is None:
            logger.warning("%s: never called with the calibration inputs", name)
        q = q.to(weight.device)
        layers.append(CalibratedLayer(name, q, relative_error(weight, q), loss))
    return layers


def _quantised(
    weight: Tensor, format: Format, hessian: Hessian | None
) -> tuple[QuantisedTensor | QuantisedStack, float | None]:
    """Quantises a weight; returns the error of its outputs too, if they are known."""
    if hessian is None:
        return quantise(weight, format), None
    weight = weight.to(hessian.matrix.device)
    q = quantise(weight, format, hessian=hessian)
    return q, output_error(weight, q.dequantise(), hessian)


def _quantised_stack(
    weight: Tensor, format: Format, moments: ExpertMoments
) -> tuple[QuantisedTensor | QuantisedStack, float | None]:
    """Quantises a stack of experts, as ``_quantised``."""
    hessians = moments.hessians()
    if hessians is None:
        return quantise_stack(weight, format), None
    weight = weight.to(hessians[0].matrix.device)
    q = quantise_stack(weight, format, hessians=hessians)
    return q, moments.output_error(weight, q)


# Blocks


@dataclass(frozen=True)
class _Block:
    """Layers that are calibrated together.

    Attributes:
        names: the layers to quantise.
        run: runs the block, or the model, with all its inputs.
        sources: the layers of the model by name.
    """

    names: Sequence[str]
    run: Callable[[], None]
    sources: Mapping[str, nn.Module]

    def moments(self) -> tuple[dict[str, Hessian], dict[str, ExpertMoments]]:
        """Runs the block; returns moments of linear layers and of projections of experts, by name.

        Layers of one input share one object.
        """
        own = {name: self.sources[name] for name in self.names}
        experts = {name: layer for name, layer in own.items() if isinstance(layer, ExpertLinear)}
        sums = _Moments()
        with ExitStack() as hooks:
            for name, layer in own.items():
                if name not in experts:
                    handle = layer.register_forward_pre_hook(sums.hook(name))
                    hooks.callback(handle.remove)
            of_experts = hooks.enter_context(expert_moments(experts.values()))
            self.run()
        return sums.hessians(), dict(zip(experts, of_experts, strict=True))


class _Moments:
    """Sums of ``x x^T``, one per distinct input of the layers."""

    def __init__(self) -> None:
        self.leader: dict[str, str] = {}  # the first layer of the same input
        self.total: dict[str, Tensor] = {}
        self.count: dict[str, int] = {}
        self.latest: dict[str, Tensor] = {}  # the last input of each leader

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Returns a forward pre-hook for a layer."""

        def add(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            if name not in self.leader:
                found = (other for other, seen in self.latest.items() if seen is x)
                self.leader[name] = next(found, name)
            leader = self.leader[name]
            if leader != name and self.latest.get(leader) is x:
                return
            self.leader[name] = name
            self.latest[name] = x
            rows = x.detach().reshape(-1, x.shape[-1])
            if name not in self.total:
                shape = (rows.shape[1],) * 2
                self.total[name] = torch.zeros(shape, dtype=torch.float32, device=x.device)
                self.count[name] = 0
            add_moments(self.total[name], rows)
            self.count[name] += len(rows)

        return add

    def hessians(self) -> dict[str, Hessian]:
        """Returns the mean of ``x x^T`` by layer."""
        self.latest.clear()
        means = {
            name: Hessian(total / max(1, self.count[name])) for name, total in self.total.items()
        }
        return {name: means[leader] for name, leader in self.leader.items()}


def _blocks(
    model: nn.Module,
    sources: Mapping[str, nn.Module],
    wanted: Iterable[str],
    calls: Sequence[Call],
    device: torch.device | str | None,
) -> Iterator[_Block]:
    """Yields groups of layers in the order of the model; each must be replaced before the next."""
    left = dict.fromkeys(wanted)
    with torch.no_grad():
        for prefix, chain in _chains(model):
            names = [[n for n in left if n.startswith(f"{prefix}.{i}.")] for i in range(len(chain))]
            if not any(names):
                continue
            recorded = _record(model, chain, calls)
            if recorded is None:
                logger.info("%s: its blocks are no chain; calibrating them at the end", prefix)
                continue
            states, arguments = recorded
            for block, own, call in zip(chain, names, arguments, strict=True):
                yield from _run_block(block, own, sources, states, call, device)
                for name in own:
                    del left[name]
        if left:

            def run() -> None:
                for call in calls:
                    call.run(model)

            yield _Block(list(left), run, sources)


def _run_block(
    block: nn.Module,
    names: Sequence[str],
    sources: Mapping[str, nn.Module],
    states: list[Tensor],
    calls: Sequence[Call],
    device: torch.device | str | None,
) -> Iterator[_Block]:
    """Yields one block of a chain, then replaces the states by what it gives."""
    home = device_of(block)
    place = torch.device(device) if device is not None else home

    def outputs() -> Iterator[Tensor]:
        for state, call in zip(states, calls, strict=True):
            moved = call.to(place)
            args = (state.to(place), *moved.args[1:])
            yield _first(block(*args, **moved.kwargs)).to(state.device)

    def run() -> None:
        for _ in outputs():
            pass

    block.to(place)
    if names:
        yield _Block(names, run, sources)
        block.to(place)  # the replaced layers
    for index, state in enumerate(outputs()):
        states[index] = state
    block.to(home)


def _chains(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yields the outermost lists of several modules of one type, with their names."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        is_list = isinstance(module, nn.ModuleList) and len(module) > 1
        if is_list and len({type(block) for block in module.children()}) == 1:
            found.append(name)
            yield name, list(module.children())


class _RecordedError(Exception):
    """Ends a run of the model once the last block has been called."""


class _NoChainError(Exception):
    """Ends a recording: a block is not called with the output of the one before it."""


def _record(
    model: nn.Module, blocks: Sequence[nn.Module], calls: Sequence[Call]
) -> tuple[list[Tensor], list[list[Call]]] | None:
    """Records what each block is called with, without running any block but the first.

    The other blocks pass on what they receive. Masks and positions, which blocks share, are thus
    held once per input. Returns None if the blocks are no chain, each on the output of the last.

    Returns:
        The input of the first block per call, and the arguments of each block per call. Those of
        the first argument, the hidden state, are to be replaced.
    """
    recording = _Recording(len(blocks))
    with ExitStack() as stubs:
        for index, block in enumerate(blocks):
            block.forward = recording.stub(index, block.forward)
            stubs.callback(block.__dict__.pop, "forward")
        for call in calls:
            recording.position = 0
            try:
                call.run(model)
            except _RecordedError:
                continue
            except _NoChainError:
                pass
            return None
    return recording.states, recording.arguments


class _Recording:
    """Arguments of the calls of a chain's blocks, and the position in the chain."""

    def __init__(self, depth: int) -> None:
        self.states: list[Tensor] = []
        self.arguments: list[list[Call]] = [[] for _ in range(depth)]
        self.position = 0
        self.passed: Tensor | None = None  # what the block before gave
        self.rest: tuple[Any, ...] | None = None  # what blocks return after the hidden state

    def stub(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what takes the place of a block's ``forward``."""

        def record(*args: Any, **kwargs: Any) -> Any:
            if not args:  # the hidden state was passed by name
                first = next((k for k, v in kwargs.items() if isinstance(v, Tensor)), None)
                args = (kwargs.pop(first),) if first else (None,)
            state = args[0]
            is_next = index == self.position and isinstance(state, Tensor)
            if not is_next or (index > 0 and state is not self.passed):
                raise _NoChainError
            # A block runs twice: it must not append to a cache of keys and values.
            kwargs |= {name: None for name in kwargs if name.startswith("past_key_value")}
            if index == 0:
                if not self.states:
                    output = forward(*args, **kwargs)
                    self.rest = output[1:] if isinstance(output, tuple) else None
                self.states.append(state)
            self.arguments[index].append(Call((None, *args[1:]), kwargs))
            self.position += 1
            if self.position == len(self.arguments):
                raise _RecordedError
            self.passed = state.view_as(state)
            return self.passed if self.rest is None else (self.passed, *self.rest)

        return record


def _first(output: Any) -> Tensor:
    state: Tensor = output[0] if isinstance(output, tuple) else output
    if not bool(torch.isfinite(state).all()):
        raise ValueError("calibrate: a block gives NaN or infinity; try the model in bfloat16")
    return state


# Results on disk


class _Store:
    """Results of blocks in a folder."""

    def __init__(
        self,
        folder: Path,
        formats: Mapping[str, Format],
        sources: Mapping[str, Any],
        calls: Sequence[Call],
    ) -> None:
        self.folder, self.formats, self.sources = folder, formats, sources
        folder.mkdir(parents=True, exist_ok=True)
        plan = {
            "formats": {name: str(format) for name, format in formats.items()},
            "inputs": _fingerprint([call.args for call in calls], [call.kwargs for call in calls]),
            "weights": _fingerprint([sources[name].weight for name in formats]),
        }
        file = folder / "plan.json"
        if not file.exists():
            file.write_text(json.dumps(plan, indent=1))
        elif json.loads(file.read_text()) != plan:
            raise ValueError(
                f"calibrate: {folder} holds results of another model, format or calibration; "
                f"give an empty folder"
            )

    def save(self, step: int, layers: Sequence[CalibratedLayer]) -> None:
        """Writes the layers of a block; the file appears whole or not at all."""
        tensors, errors = {}, {}
        for layer in layers:
            errors[layer.name] = [layer.relative_error, layer.output_error]
            for key, tensor in layer.quantised.tensors().items():
                tensors[f"{layer.name}|{key}"] = tensor.contiguous()
        file = self.folder / RESULTS.format(step)
        part = file.with_suffix(".part")
        save_file(tensors, part, metadata={"errors": json.dumps(errors)})
        part.replace(file)

    def load(self, step: int, names: Sequence[str]) -> list[CalibratedLayer] | None:
        """Reads the layers of a block, or returns None if they are not there yet."""
        file = self.folder / RESULTS.format(step)
        if not file.exists():
            return None
        layers = []
        with safe_open(file, "pt") as tensors:
            errors = json.loads(tensors.metadata()["errors"])
            for name in names:
                weight = matrix_of(self.sources[name])
                format = self.formats[name]
                found = {key: tensors.get_tensor(f"{name}|{key}") for key in format.tensor_names}
                kind: Any = QuantisedStack if weight.ndim == 3 else QuantisedTensor
                q = kind(format, tuple(weight.shape), **found).to(weight.device)
                layers.append(CalibratedLayer(name, q, *errors[name]))
        return layers


def _fingerprint(*values: Any) -> str:
    """Hashes nested values with tensors; a tensor counts by its shape, dtype and bytes."""
    import hashlib

    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            tensor = value.detach().cpu().contiguous()
            digest.update(f"{tensor.shape}{tensor.dtype}".encode())
            digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key, each in value.items():
                digest.update(str(key).encode())
                add(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        else:
            digest.update(repr(value).encode())

    add(values)
    return digest.hexdigest()


class _Progress:
    """A line on the terminal with the remaining time."""

    def __init__(self, what: str, units: str) -> None:
        self.what, self.units, self.start = what, units, time.monotonic()

    def show(self, done: int, total: int) -> None:
        """Shows how many of all units are done."""
        passed = time.monotonic() - self.start
        rest = passed / done * (total - done)
        line = f"{self.what} {done}/{total} {self.units}, {passed:.0f} s, about {rest:.0f} s to go"
        if sys.stderr.isatty():
            print(f"\r{line}", end="\n" if done == total else "", file=sys.stderr)
        else:
            logger.info("%s", line)
