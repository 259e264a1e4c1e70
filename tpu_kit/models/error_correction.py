"""The error-correction head: a small module that changes the last hidden states before the output layer.

For a last hidden state h with root mean square s, the head computes

    f = silu(A h / s + a),   p(r | h) = sum_k w_k(f) N(r; m_k(f), diag(d_k(f))^2),   h' = h + tanh(g) s U [f, E[r | h]]

p is a mixture-density network (Bishop, 1994, Neural Computing Research Group report NCRG/94/004) of the residual r that
`training.error_correction` defines. The gate g starts at 0 (as in Flamingo, Alayrac et al., arXiv:2204.14198), so that
an untrained head changes nothing.

The head is saved in the folder of the adapter. Its function is not linear, so it cannot be merged into the weights.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpu_kit.models.architecture import CORRECTION

NAME = "error_correction"
FILES = (f"{NAME}.json", f"{NAME}.safetensors")
_LEAST = 1e-2  # standard deviation: the density of a residual that is nearly always 0 stays finite


class Mixture(NamedTuple):
    """A mixture of K Gaussians with diagonal covariances in D dimensions, for each token.

    Attributes:
        log_weights: (..., K) logarithms of the weights, whose sum is 1.
        means: (..., K, D).
        deviations: (..., K, D) standard deviations.
    """

    log_weights: torch.Tensor
    means: torch.Tensor
    deviations: torch.Tensor

    def mean(self) -> torch.Tensor:
        """Returns the expectation, (..., D)."""
        return (self.log_weights.exp()[..., None] * self.means).sum(-2)

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the logarithm of the density at `value`, (..., D): (...) nats."""
        apart = (value[..., None, :] - self.means) / self.deviations
        each = -(apart.square() / 2 + self.deviations.log() + math.log(2 * math.pi) / 2).sum(-1)
        return torch.logsumexp(self.log_weights + each, dim=-1)


class ErrorCorrection(torch.nn.Module):
    """The head; its parameters are fp32, and it computes in fp32.

    Args:
        hidden_size: H of the model.
        width: of f; by default as the components and the size in `architecture.CORRECTION`.
        components: K Gaussians.
        size: D dimensions of the projected residual.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int = CORRECTION[0],
        components: int = CORRECTION[1],
        size: int = CORRECTION[2],
    ) -> None:
        super().__init__()
        self.settings = {"hidden_size": hidden_size, "width": width, "components": components, "size": size}
        self.trunk = torch.nn.Linear(hidden_size, width, dtype=torch.float32)
        self.mixture = torch.nn.Linear(width, components * (1 + 2 * size), dtype=torch.float32)
        self.output = torch.nn.Linear(width + size, hidden_size, bias=False, dtype=torch.float32)
        self.gate = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Mixture]:
        """Returns the corrected states, (..., H) in the dtype of `hidden`, and the estimate of their residuals."""
        states = hidden.float()
        scale = (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        features = F.silu(_linear(self.trunk, states / scale))
        count, size = self.settings["components"], self.settings["size"]
        weights, rest = _linear(self.mixture, features).split([count, 2 * count * size], dim=-1)
        means, raw = rest.unflatten(-1, (count, 2 * size)).split(size, dim=-1)
        estimate = Mixture(F.log_softmax(weights, dim=-1), means, F.softplus(raw) + _LEAST)
        correction = _linear(self.output, torch.cat([features, estimate.mean()], dim=-1))
        return (states + torch.tanh(self.gate.float()) * scale * correction).to(hidden.dtype), estimate


def _linear(layer: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
    return F.linear(states, layer.weight.float(), None if layer.bias is None else layer.bias.float())


def has_head(folder: Path) -> bool:
    """Whether a folder of trained weights has a head, or a part of one."""
    return any((folder / name).is_file() for name in FILES)


def attach(decoder: torch.nn.Module, folder: Path, hidden_size: int) -> None:
    """Makes a decoder return corrected states, by the head in a folder.

    Args:
        decoder: of transformers, which returns `last_hidden_state`.
        folder: of the trained weights.
        hidden_size: of the model.

    Raises:
        ValueError: a file of the head is missing or damaged, or it is of a model of another size.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        settings = json.loads((folder / FILES[0]).read_text())
        head = ErrorCorrection(**settings)
        head.load_state_dict(load_file(folder / FILES[1]))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"the error-correction head in {folder} cannot be read ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}). Give the folder that training wrote, or delete {' and '.join(FILES)} to "
            "use the adapter without it"
        ) from error
    if settings["hidden_size"] != hidden_size:
        raise ValueError(
            f"the error-correction head in {folder} is for hidden states of {settings['hidden_size']} numbers, and the "
            f"model has {hidden_size}: set model.name to the base model of that run"
        )
    decoder.add_module(NAME, head)
    decoder.register_forward_hook(_correct)


def _correct(decoder: torch.nn.Module, inputs: Any, output: Any) -> Any:
    """The hook; it takes the head from the decoder, because a copy of the model has a head of its own."""
    output.last_hidden_state = decoder.get_submodule(NAME)(output.last_hidden_state)[0]
    return output


@contextlib.contextmanager
def without_head(folder: Path) -> Iterator[Path]:
    """Gives a folder of trained weights without its head: links to the other files, or the folder if it has none."""
    if not has_head(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tpu_kit-") as links:
        for path in folder.iterdir():
            if path.name not in FILES:
                os.symlink(path.absolute(), Path(links, path.name))
        yield Path(links)
