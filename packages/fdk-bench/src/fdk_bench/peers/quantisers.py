"""Other projects' quantisers of a model's weights, each in a process and environment of its own."""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fdk_bench.peers.llama_cpp import FOLDER_VARIABLE, library_folder

SCRIPT = Path(__file__).with_name("quantise_weights.py")
ERROR_CHARACTERS = 2000


class PeerError(RuntimeError):
    """A peer failed; the message is the end of what it printed."""


@dataclass(frozen=True, eq=False)
class QuantisedWeights:
    """The answer of a quantiser.

    Attributes:
        weights: by layer, ``[n, k, float32]``: what the codes stand for.
        nbytes: by layer, what is stored: codes, scales, zero points, codebooks.
        version: of the project; empty where it has none.
    """

    weights: Mapping[str, Tensor]
    nbytes: Mapping[str, float]
    version: str = ""


@dataclass(frozen=True, eq=False)
class Quantiser:
    """Another project's quantiser.

    Attributes:
        name: its name in options.
        method: its function in ``quantise_weights.py``.
        module, package: the module it needs and the package to install.
        settings: by the name of a row, the fields of the request.
        calibrated: whether it uses the calibration text.
    """

    name: str
    method: str
    module: str
    package: str
    settings: Mapping[str, Mapping[str, int | str]]
    calibrated: bool = True

    def missing(self, python: str) -> str | None:
        """Return what to install for a Python, or None."""
        if not self.module:
            if library_folder() is not None:
                return None
            return f"pip install llama-cpp-python, or {FOLDER_VARIABLE}=<folder of libggml>"
        test = f"import importlib.util as u, sys; sys.exit(u.find_spec({self.module!r}) is None)"
        try:
            absent = subprocess.run([python, "-c", test], check=False).returncode
        except OSError as error:
            return f"{python} does not run: {error.strerror}"
        if not absent:
            return None
        return f"pip install {self.package}, or --peer-python {self.name}=<a Python that has it>"

    def quantise(
        self,
        row: str,
        python: str,
        model: str,
        weights: Mapping[str, Tensor],
        importance: Mapping[str, Tensor],
        calibration: Tensor,
    ) -> QuantisedWeights:
        """Quantise the weights of a model's layers.

        Args:
            row: a name of ``settings``.
            python: path of the Python that has the project.
            model: folder or id of the model.
            weights: by layer, ``[n, k]``.
            importance: by layer, ``[k]``: mean square of each input over the calibration text.
            calibration: tokens of that text, ``[windows, window]``.

        Raises:
            PeerError: where it fails.
        """
        local = Path(model).is_dir()
        with tempfile.TemporaryDirectory() as folder:
            request, answer = Path(folder) / "request.pt", Path(folder) / "answer.pt"
            fields = {
                "method": self.method,
                "package": self.package if self.module else "",
                "ggml": str(library_folder() or ""),
                "model": str(Path(model).resolve()) if local else model,
                "weights": {name: weight.cpu() for name, weight in weights.items()},
                "importance": {name: values.cpu() for name, values in importance.items()},
                "calibration": calibration.cpu(),
                "threads": torch.get_num_threads(),
                "answer": str(answer),
                **self.settings[row],
            }
            torch.save(fields, request)
            # -P: else the folder of the script would come first among the modules.
            # Not resolved: the link in an environment is what names the environment.
            here = str(Path(python).absolute())
            command = [here, "-P", str(SCRIPT), str(request)]
            # Its logs stay where it runs, and nothing is fetched for a folder.
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=os.environ | ({"HF_HUB_OFFLINE": "1"} if local else {}),
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode or not answer.is_file():
                said = done.stdout.strip()[-ERROR_CHARACTERS:]
                raise PeerError(f"{self.name} ended with code {done.returncode}: {said}")
            return QuantisedWeights(**torch.load(answer, weights_only=True))


def _integers(name: str, widths: Sequence[int]) -> dict[str, dict[str, int | str]]:
    return {f"{name}{bits}-g64": {"bits": bits, "group_size": 64} for bits in widths}


QUANTISERS = (
    Quantiser("hqq", "hqq", "hqq", "hqq", _integers("hqq", (4, 3, 2)), calibrated=False),
    Quantiser(
        "bitsandbytes",
        "bitsandbytes",
        "bitsandbytes",
        "bitsandbytes",
        {"bitsandbytes-nf4-g64": {"group_size": 64}},
        calibrated=False,
    ),
    Quantiser(
        "torchao", "torchao", "torchao", "torchao", _integers("torchao", (4, 3)), calibrated=False
    ),
    Quantiser(
        "gptqmodel", "gptqmodel", "gptqmodel", "gptqmodel", _integers("gptqmodel", (4, 3, 2))
    ),
    Quantiser(
        "llm-compressor",
        "llm_compressor",
        "llmcompressor",
        "llmcompressor",
        _integers("llm-compressor", (4, 3, 2)),
    ),
    Quantiser(
        "auto-round", "auto_round", "auto_round", "auto-round", _integers("auto-round", (4, 3, 2))
    ),
    Quantiser(
        "llama.cpp",
        "llama_cpp",
        "",
        "",
        {
            f"llama.cpp-{type}": {"type": type}
            for type in ("Q4_K", "Q3_K", "IQ3_XXS", "Q2_K", "IQ2_XS")
        },
    ),
)


def quantisers_named(names: Sequence[str]) -> list[tuple[Quantiser, str]]:
    """Return quantisers with the names of their rows.

    Args:
        names: ``all``, ``none``, quantisers (all their rows), or rows such as ``hqq3-g64``.

    Raises:
        ValueError: for an unknown name, and for ``none`` with others.
    """
    if "none" in names and set(names) != {"none"}:
        raise ValueError(f"--against: wanted none alone, or peers; got {', '.join(names)}")
    rows = [(quantiser, row) for quantiser in QUANTISERS for row in quantiser.settings]
    known = {"all", "none", *(q.name for q in QUANTISERS), *(row for _, row in rows)}
    if unknown := [name for name in names if name not in known]:
        wanted = ", ".join(q.name for q in QUANTISERS)
        raise ValueError(
            f"--against: wanted all, none, {wanted}, or a row such as hqq3-g64; "
            f"got {', '.join(unknown)}"
        )
    return [(q, row) for q, row in rows if {"all", q.name, row} & set(names)]
