"""Distillation: scales and codebooks trained so that a model predicts as its source does.

Codes stay as they are. The loss is the Kullback-Leibler divergence of the next token from the
source's prediction, and gradients pass through the whole model, so that layers make up for each
other's errors, which calibrating them one by one cannot. Training only the scales end to end is
the second phase of EfficientQAT (Chen et al. 2024).

Meanwhile the weights of the model hold the values of the codes. The gradient of a weight is summed
up to those of its scales and codebook as soon as it is there, and freed: beyond what a forward and
backward pass of the model takes there are the codes, a byte each.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fdk_formats.compensate import unit_values
from fdk_formats.packing import pack
from fdk_formats.rotation import rotate
from fdk_formats.scales import Grid, decode_scale, encode_scale, largest_scale
from fdk_formats.tensor import QuantisedTensor

# Adam's steps: the change of a scale's logarithm, and that of a codebook's entry in units of their
# mean magnitude, for up to RATE_BITS bits; above, they halve with each bit, as errors do. They rise
# for WARM_UP steps, and fall to zero by a cosine.
RATE = 5e-3
RATE_BITS = 3
WARM_UP = 4
BETAS = (0.9, 0.99)
# Inputs are put together for a step until they have this many tokens.
STEP_TOKENS = 1024
# Codebooks of more bits hardly matter.
CODEBOOK_BITS = 4
# Positions whose predictions are held at once: 262,144 words of float32 take 134 MB.
POSITIONS = 128
# The state is kept at most this often, and no more than a twentieth of the time is spent on it.
SAVE_SECONDS = 30.0
SAVE_SHARE = 20
MOMENTS = ("exp_avg", "exp_avg_sq")

Run = Callable[[], Any]


def output_head(model: nn.Module) -> nn.Module | None:
    """Returns the output head of a Hugging Face language model; None for other models."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    return head if isinstance(head, nn.Module) else None


class Teacher:
    """The predictions of a language model for some inputs.

    Held as the inputs of the output head, ``[tokens, hidden]`` per call: the head computes the
    predictions again where they are needed.

    Args:
        model: the source, before its layers are quantised.
        runs: functions that run the model, one per input.

    Raises:
        ValueError: if the model has no output head.
    """

    def __init__(self, model: nn.Module, runs: Sequence[Run]) -> None:
        head = output_head(model)
        if head is None:
            raise ValueError(
                f"distil: wanted a language model with an output head (get_output_embeddings), "
                f"got {type(model).__name__}"
            )
        self.head = head
        with torch.no_grad():
            self.states = [self.state_of(run) for run in runs]

    def state_of(self, run: Run) -> Tensor:
        """Runs the model up to its output head; returns the head's input, ``[tokens, hidden]``."""

        def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
            raise _HeadReachedError(args[0])

        handle = self.head.register_forward_pre_hook(stop)
        try:
            run()
        except _HeadReachedError as reached:
            return reached.state.flatten(0, -2)
        finally:
            handle.remove()
        raise ValueError("distil: the model does not call its output head")

    def divergence(self, state: Tensor, expected: Tensor) -> tuple[float, Tensor]:
        """Computes the mean divergence over tokens and its gradient for ``state``.

        Args:
            state: inputs of the head in the quantised model, ``[tokens, hidden]``.
            expected: those in the source.
        """

        def divergence(found: Tensor, rows: slice) -> Tensor:
            with torch.no_grad():
                wanted = self.head(expected[rows].to(found.device)).float().log_softmax(-1)
            part: Tensor = (wanted.exp() * (wanted - found)).sum() / len(state)
            return part

        return self._differentiate(state, divergence)

    def likelihood_gradient(self, state: Tensor, generator: torch.Generator) -> Tensor:
        """Computes the gradient of the log likelihood of tokens drawn from the predictions.

        Args:
            state: inputs of the head, ``[tokens, hidden]``.
            generator: draws one token for each prediction.
        """

        def likelihood(found: Tensor, _: slice) -> Tensor:
            # Drawn on the CPU: the same on every device.
            drawn = found.detach().exp().cpu().multinomial(1, generator=generator)
            total: Tensor = found.gather(1, drawn.to(found.device)).sum()
            return total

        return self._differentiate(state, likelihood)[1]

    def _differentiate(
        self, state: Tensor, value: Callable[[Tensor, slice], Tensor]
    ) -> tuple[float, Tensor]:
        """Sums a function of the predictions, POSITIONS at a time.

        Args:
            state: inputs of the head, ``[tokens, hidden]``.
            value: computes a number from the log probabilities of some tokens, ``[rows, words]``,
                and which tokens they are.

        Returns:
            The sum, and its gradient for ``state``.
        """
        gradient, total = torch.empty_like(state), 0.0
        for start in range(0, len(state), POSITIONS):
            rows = slice(start, start + POSITIONS)
            part = state[rows].detach().requires_grad_(True)
            result = value(self.head(part).float().log_softmax(-1), rows)
            (gradient[rows],) = torch.autograd.grad(result, part)
            total += result.item()
        return total, gradient


class _HeadReachedError(Exception):
    """Ends a run of a model before its output head."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state = state


def distil(
    model: nn.Module,
    layers: Mapping[str, QuantisedTensor],
    teacher: Teacher,
    runs: Sequence[Run],
    *,
    epochs: int,
    on_step: Callable[[int, int], None] | None = None,
    file: Path | None = None,
) -> dict[str, QuantisedTensor]:
    """Trains scales and codebooks of the quantised layers of a language model.

    Args:
        model: the model, in evaluation mode; the weights of ``layers`` are overwritten by the
            values of the result.
        layers: quantised weights to start from, by the dotted name of their layer.
        teacher: the predictions of the source for ``runs``.
        runs: functions that run the model, one per input.
        epochs: how often each input is used.
        on_step: called with the number of the step and of all steps.
        file: keeps the state of training. Called again with the same arguments after a kill, it
            goes on from there and gives the same result.

    Returns:
        The weights with new scales and codebooks.

    Raises:
        ValueError: if predictions are not finite.
    """
    steps = [step for epoch in range(epochs) for step in _steps(teacher.states, epoch)]
    with ExitStack() as stack:
        stack.enter_context(frozen(model))
        stack.enter_context(torch.enable_grad())
        trained = {name: _Trained(model.get_submodule(name), q) for name, q in layers.items()}
        for each in trained.values():
            stack.callback(each.handle.remove)
        parameters = [p for each in trained.values() for p in each.parameters]
        groups = [{"params": each.parameters, "rate": each.rate} for each in trained.values()]
        adam = torch.optim.Adam(groups, lr=RATE, betas=BETAS, eps=1e-15)
        state_file = _StateFile(file, adam, parameters, len(steps)) if file is not None else None
        done = state_file.load() if state_file else 0
        if done:
            for each in trained.values():
                each.write()
        for number, step in enumerate(steps):
            if number < done:
                continue
            for group in adam.param_groups:
                group["lr"] = group["rate"] * _schedule(number, len(steps))
            tokens = sum(len(teacher.states[index]) for index in step)
            for index in step:
                state = teacher.state_of(runs[index])
                loss, gradient = teacher.divergence(state, teacher.states[index])
                if not math.isfinite(loss):
                    raise ValueError("distil: the model's predictions are not finite")
                state.backward(gradient * (len(state) / tokens))
            adam.step()
            for each in trained.values():
                each.write()
            if state_file:
                state_file.save(number + 1)
            if on_step:
                on_step(number + 1, len(steps))
    return {name: each.quantised() for name, each in trained.items()}


class _StateFile:
    """Trained parameters and Adam's moments after some step, in a file."""

    def __init__(
        self, file: Path, adam: torch.optim.Adam, parameters: Sequence[nn.Parameter], steps: int
    ) -> None:
        self.file, self.adam, self.parameters, self.steps = file, adam, parameters, steps
        self.wait, self.saved = SAVE_SECONDS, time.monotonic()

    def save(self, step: int) -> None:
        """Writes the state if the last time is long ago, or if training is over."""
        start = time.monotonic()
        if step < self.steps and start - self.saved < self.wait:
            return
        tensors = {}
        for index, parameter in enumerate(self.parameters):
            tensors[f"{index}.value"] = parameter.detach()
            for key in MOMENTS:
                tensors[f"{index}.{key}"] = self.adam.state[parameter][key]
        part = self.file.with_suffix(".part")
        save_file(tensors, part, metadata={"step": str(step), "steps": str(self.steps)})
        part.replace(self.file)
        self.saved = time.monotonic()
        self.wait = max(SAVE_SECONDS, SAVE_SHARE * (self.saved - start))

    def load(self) -> int:
        """Reads the state; returns after how many steps it was, 0 if there is none."""
        if not self.file.exists():
            return 0
        with safe_open(self.file, "pt") as tensors:
            found = tensors.metadata()
            if int(found["steps"]) != self.steps:
                return 0
            for index, parameter in enumerate(self.parameters):
                parameter.data.copy_(tensors.get_tensor(f"{index}.value"))
                moments = {
                    key: tensors.get_tensor(f"{index}.{key}").to(parameter.device)
                    for key in MOMENTS
                }
                step = torch.tensor(float(found["step"]))
                self.adam.state[parameter] = {"step": step, **moments}
        return int(found["step"])


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Turns off the gradients of all parameters, and on again those that had them."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)


def _steps(states: Sequence[Tensor], epoch: int) -> list[list[int]]:
    """Returns the inputs of each step of an epoch, each once, in an order of its own."""
    order = torch.randperm(len(states), generator=torch.Generator().manual_seed(epoch))
    steps: list[list[int]] = []
    tokens = STEP_TOKENS
    for index in order.tolist():
        if tokens >= STEP_TOKENS:
            steps.append([])
            tokens = 0
        steps[-1].append(index)
        tokens += len(states[index])
    return steps


def _schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2


class _Trained:
    """Scales and codebook of one weight as parameters.

    Attributes:
        change: natural logarithm of new over old scales, ``[n, k/G]``.
        shift: new less old codebook in units of its mean magnitude, ``[2^bits]``; None if the
            codebook stays.
    """

    def __init__(self, layer: nn.Module, q: QuantisedTensor) -> None:
        weight = layer.get_parameter("weight")
        self.weight, self.q, self.codes = weight, q, q.codes()
        self.start = decode_scale(q.scale)
        self.change = nn.Parameter(torch.zeros_like(self.start))
        self.shift: nn.Parameter | None = None
        if q.codebook is not None and q.format.is_fitted and q.format.bits <= CODEBOOK_BITS:
            self.shift = nn.Parameter(torch.zeros_like(q.codebook))
        self.zero_gradients()
        weight.requires_grad_(True)
        self.handle = weight.register_post_accumulate_grad_hook(self._reduce)
        self.write()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [self.change] if self.shift is None else [self.change, self.shift]

    @property
    def rate(self) -> float:
        """Adam's highest rate for the format."""
        return RATE * 2.0 ** min(0, RATE_BITS - self.q.format.bits)

    def zero_gradients(self) -> None:
        """Sets all gradients to zero."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def grid(self) -> Grid:
        """Returns scales and codebook as stored."""
        limit = largest_scale(self.q.format.scale_dtype)
        scale = (self.start * self.change.exp()).clamp(-limit, limit)
        codebook = self.q.codebook
        if self.shift is not None:
            assert codebook is not None
            codebook = codebook + self.shift * codebook.abs().mean()
        stored = encode_scale(scale, self.q.format.scale_dtype)
        return Grid(self.q.format, stored, codebook, self.q.zero_point)

    @torch.no_grad()
    def write(self) -> None:
        """Writes the values to the weight, and zeroes the gradients."""
        values = self.grid().decode(self.codes, slice(None), torch.float32)
        if self.q.format.rotation is not None:
            values = rotate(values, inverse=True)
        self.weight.copy_(values)
        self.zero_gradients()

    @torch.no_grad()
    def _reduce(self, weight: Tensor) -> None:
        """Sums the weight's gradient up to those of scales and codebook, and frees it."""
        assert weight.grad is not None
        assert self.change.grad is not None
        grid, grad = self.grid(), weight.grad.float()
        weight.grad = None
        if self.q.format.rotation is not None:
            grad = rotate(grad)
        grad = grad.view(*self.start.shape, -1)
        scale = decode_scale(grid.scale)
        unit = unit_values(grid, self.codes).view(grad.shape)
        self.change.grad += unit.mul_(grad).sum(-1) * scale
        if self.shift is not None:
            assert self.shift.grad is not None
            assert self.q.codebook is not None
            scaled = grad.mul_(scale[..., None]).view(self.q.shape)
            sums = torch.bincount(self.codes.view(-1), scaled.view(-1), len(self.shift))
            self.shift.grad += sums.float() * self.q.codebook.abs().mean()

    def quantised(self) -> QuantisedTensor:
        """Returns the trained weight."""
        grid = self.grid()
        codebook, packed = grid.codebook, self.q.packed
        if self.shift is not None:
            assert codebook is not None
            codebook, order = codebook.sort()
            packed = pack(order.argsort().to(torch.uint8)[self.codes.int()], self.q.format.bits)
        return replace(self.q, packed=packed, scale=grid.scale, codebook=codebook)
