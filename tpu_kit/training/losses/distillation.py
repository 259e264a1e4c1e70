"""Distillation: the loss of a model that learns from a frozen teacher.

The divergences follow Agarwal et al. (arXiv:2306.13649), summed over the tokens with labels, without Hinton's factor
temperature**2. The teacher runs in the step's program, or the batch has its top logits, read from files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import torch
import torch.nn.functional as F

from tpu_kit.config.loader import DistillConfig, ModelConfig, TrainConfig
from tpu_kit.model import causal_lm as models
from tpu_kit.model import trainable
from tpu_kit.model.base_model import check_vocabulary
from tpu_kit.model.loop.layer_calls import keep_after, kept_states
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.model.weights.source import check_positions, load_tokenizer, read_config
from tpu_kit.training.losses.loss import IGNORE, Likelihood, chunked, head_outputs, rows_in_chunks, shift_labels
from tpu_kit.training.objectives import Cost, Frozen, Objective, Sums, SupervisedObjective
from tpu_kit.xla.scan import Tensors, after

_NONE = -1e30  # the log of probability 0: finite, because 0 times an infinite gradient is nan


class DistillationObjective(Objective):
    """The weighted sum of four losses over the tokens with labels: logits, labels, hidden states and embeddings.

    Evaluation uses the negative log-likelihood of the labels, which is comparable with other runs.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._distill = config, config.distill
        self._supervised = SupervisedObjective(config.optim)
        weights = {name: getattr(config.distill, f"{name}_weight") for name in _PARTS}
        self._weights = {name: weight for name, weight in weights.items() if weight}
        self.extra = tuple(f"distill_{name}" for name in self._weights)
        if config.distill.files:
            k = config.distill.top_k
            self.columns = {"top_ids": (k, torch.int32), "top_log_p": (k + 1, torch.float32)}

    def check(self) -> None:
        """Raises ValueError unless the teacher has the model's tokenizer and enough positions for `data.max_length`.

        It also raises ValueError if the teacher's tokenizer cannot be read, or has more tokens than the teacher has
        embeddings. A model must have its layers of distill.layers and, with distill.files, at least `top_k` logits.
        """
        config = self._config
        teacher, name = config.teacher, f"distill.teacher={config.distill.teacher}"
        assert teacher is not None
        own = load_tokenizer(config.model).get_vocab()
        try:
            other, settings = load_tokenizer(teacher).get_vocab(), read_config(teacher)
        except ValueError as error:
            told = str(error).replace("model.name", "distill.teacher").replace("model.trust", "distill.teacher_trust")
            raise ValueError(told) from error
        if differ := sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token)):
            raise ValueError(
                f"{name} has another tokenizer than model.name={config.model.name}: {len(differ):,} of {len(own):,} "
                f"and {len(other):,} tokens differ, such as {differ[0]!r}. Their logits are not comparable: choose a "
                "teacher of the same family"
            )
        models_of = [read_config(config.model), settings]  # None if unreadable; loading reports why
        sizes = [whole.get_text_config().vocab_size for whole in models_of if whole is not None]
        text = settings.get_text_config() if settings else None
        check_vocabulary(len(other), getattr(text, "vocab_size", None), name)
        check_positions(config.data.max_length, getattr(text, "max_position_embeddings", None), name)
        if sizes and config.distill.files and config.distill.top_k > min(sizes):
            raise ValueError(
                f"distill.top_k={config.distill.top_k}: there are {min(sizes)} logits; set it to that or less"
            )
        for side, (whole, of) in enumerate(zip(models_of, (f"model.name={config.model.name}", name), strict=True)):
            if whole is None:
                continue
            count = whole.get_text_config().num_hidden_layers
            if wrong := sorted({pair[side] for pair in config.distill.pairs if pair[side] > count}):
                raise ValueError(
                    f"distill.layers={config.distill.layers}: {of} has {count} layers, and no layer "
                    f"{', '.join(map(str, wrong))}; name layers from 1 to {count}"
                )

    def attach(self, model: torch.nn.Module, load: Callable[[ModelConfig], Any]) -> None:
        """Sets `model.teacher` to the frozen model that `load` returns, and makes both models keep the compared states.

        `load` gets the teacher's configuration. If hidden sizes differ, also sets `model.objective` to fp32 projections
        of compared states to the teacher's size, if any states are compared. Does nothing with distill.files. Raises
        ValueError as `trainable.freeze`.
        """
        if self._distill.files:
            return
        assert self._config.teacher is not None
        model.teacher = teacher = trainable.freeze(load(self._config.teacher), self._distill.teacher_dtype)
        sizes = [models.text_config(side).hidden_size for side in (model, teacher)]
        projected = ["embeddings"] if "embeddings" in self._weights else []
        for pair in self._distill.pairs:
            projected.append(_name(pair))
            for side, layer in zip((model, teacher), pair, strict=True):
                keep_after(models.base_model(side).get_decoder(), layer)
        if projected and sizes[0] != sizes[1]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._config.optim.seed)
                model.objective = torch.nn.ModuleDict(
                    {name: torch.nn.Linear(sizes[0], sizes[1], False, dtype=torch.float32) for name in projected}
                )

    def cost(self, tokens: int, hidden_size: int) -> Cost:
        """Returns the cost of the teacher and, if hidden sizes differ, of projections of compared states; 0 with files.

        `hidden_size` is the model's; `tokens` has no effect.
        """
        teacher = self._config.teacher
        if self._distill.files or teacher is None:
            return Cost()
        compared = len(self._distill.pairs) + ("embeddings" in self._weights)
        size = read_shape(teacher).hidden if compared else hidden_size
        params = compared * hidden_size * size if size != hidden_size else 0
        return Cost(params, frozen=(Frozen("teacher", teacher, 1 + compared),))

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """See `Objective.__call__`."""
        if not model.training:
            return self._supervised(model, batch)
        labels = shift_labels(batch["labels"], batch["segment_ids"])
        teacher: Any = None if self._distill.files else model.teacher
        inputs, constants, head, theirs = [labels], [], None, {}
        if teacher is None:
            inputs += [batch[name].unflatten(1, (labels.shape[1], -1)) for name in self.columns]
        else:
            with torch.no_grad():
                states = models.hidden_states(teacher.eval(), batch)
                theirs = self._compared(teacher, batch)
            # The teacher's forward pass ends before the model's begins, so that their activations never coexist.
            done = [states, *theirs.values()]
            batch = dict(zip(batch, after(done, list(batch.values())), strict=True))
            head = models.output_embedding(teacher)
            constants = [tensor.to(states.dtype) for tensor in head.tensors.values()]
            inputs += [states]
        hidden = models.hidden_states(model, batch)
        apart = self._apart(model, self._compared(model, batch), theirs, labels)
        own = models.output_embedding(model)
        (hidden, *inputs), chunk = rows_in_chunks(self._config.optim.loss_chunk, [hidden, *inputs])
        rule = Divergence(
            self._distill, self._weights.get("logits", 0.0), self._weights.get("labels", 0.0),
            Likelihood(own, self._config.optim.label_smoothing), head,
        )  # fmt: skip
        inputs = [tensor.flatten(0, 1) for tensor in inputs]
        loss, logits, nll = chunked(rule, hidden.flatten(0, 1), own, inputs, chunk, constants, 3)
        for name, value in apart.items():
            loss = loss + self._weights[name] * value
        parts = {"logits": logits, "labels": nll, **apart}
        return Sums(loss, (labels != IGNORE).sum().float(), tuple(parts[name].detach() for name in self._weights))

    def _compared(self, model: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the (B, S, H) states to compare: "layers_M_T" for layers M (model) and T (teacher), and "embeddings".

        `model` is the model or its teacher; call this after its forward pass of `batch`.
        """
        base, side = models.base_model(model), 0 if hasattr(model, "teacher") else 1
        layers = kept_states(base.get_decoder())
        states = {_name(pair): layers[pair[side]] for pair in self._distill.pairs}
        if "embeddings" in self._weights:
            states["embeddings"] = base.get_input_embeddings()(batch["input_ids"])
        return states

    def _apart(
        self,
        model: torch.nn.Module,
        ours: dict[str, torch.Tensor],
        theirs: dict[str, torch.Tensor],
        labels: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Returns mean squared differences of states, summed over tokens with labels, as "hidden" and "embeddings".

        `ours` and `theirs` are from `_compared`; projections of `model` are applied to `ours`. `labels` are shifted.
        """
        sums: dict[str, torch.Tensor] = {}
        for name, states in ours.items():
            if hasattr(model, "objective"):
                weight = model.get_parameter(f"objective.{name}.weight")
                states = F.linear(states, weight.to(states.dtype))
            squares = (states.float() - theirs[name].float()).square().mean(-1)
            kind = "embeddings" if name == "embeddings" else "hidden"
            sums[kind] = sums.get(kind, 0.0) + torch.where(labels != IGNORE, squares, 0.0).sum()
        return sums


_PARTS = ("logits", "labels", "hidden", "embeddings")


def _name(pair: tuple[int, int]) -> str:
    """Returns the name of a pair of layers (model's, teacher's) for tensors and parameters."""
    return f"layers_{pair[0]}_{pair[1]}"


@dataclass(frozen=True)
class Divergence:
    """The divergence of a chunk and the likelihood of its labels: a `loss.ChunkLoss`.

    It returns the weighted loss, the divergence (0 if its weight is 0) and the negative log-likelihood. Its further
    inputs are the teacher's last hidden states (c, H), with its output layer as constants, or without a `teacher`
    top_ids (c, k) and top_log_p (c, k + 1).
    """

    distill: DistillConfig
    weight: float
    labels_weight: float
    likelihood: Likelihood
    teacher: models.OutputHead | None

    def __call__(
        self, logits: torch.Tensor, inputs: Tensors, constants: Tensors, grad: bool
    ) -> tuple[Tensors, torch.Tensor | None]:
        """See `loss.ChunkLoss`."""
        labels, *others = inputs
        (nll,), slope = self.likelihood(logits, [labels], [], grad)
        apart = torch.zeros_like(nll)
        if self.weight:
            with torch.set_grad_enabled(grad):
                leaf = logits.detach().requires_grad_(grad)
                log_q, log_p = self._log_probabilities(self.likelihood.head.scaled(leaf), others, constants)
                tokens = divergence(log_p.detach(), log_q, self.distill.divergence)
                apart = torch.where(labels != IGNORE, tokens, 0.0).sum()
            if slope is not None:
                steeper = self.weight * torch.autograd.grad(apart, leaf)[0]
                slope = steeper + self.labels_weight * slope if self.labels_weight else steeper
            apart = apart.detach()
        elif slope is not None:
            slope = self.labels_weight * slope
        return [self.weight * apart + self.labels_weight * nll, apart, nll], slope

    def _log_probabilities(
        self, logits: torch.Tensor, others: Tensors, constants: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the (c, outcomes) log-probabilities at distill.temperature of the model, then of the teacher.

        `others` are the inputs without labels. Outcomes are tokens or, with files, the teacher's top k and all others.
        """
        if self.teacher is None:
            ids, log_p = others
            count = ids.shape[1] + (ids.shape[1] < logits.shape[1])  # if k is the whole vocabulary, no others
            return top_log_probabilities(logits, ids, self.distill.temperature)[:, :count], log_p[:, :count]
        with torch.no_grad():
            named = dict(zip(self.teacher.tensors, constants, strict=True))
            theirs = self.teacher.scaled(head_outputs(others[0], **named))
        size = min(logits.shape[-1], theirs.shape[-1])  # the longer vocabulary has padding at its end
        log_q, log_p = (F.log_softmax(side[:, :size] / self.distill.temperature, dim=-1) for side in (logits, theirs))
        return log_q, log_p


def top_log_probabilities(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns (c, k + 1) log-probabilities at a temperature: of tokens `ids`, (c, k), and of all others together."""
    logits, ids = logits / temperature, ids.long()
    whole = torch.logsumexp(logits, dim=-1, keepdim=True)
    others = torch.logsumexp(logits.scatter(1, ids, _NONE), dim=-1, keepdim=True)
    return torch.cat([logits.gather(1, ids) - whole, others - whole], dim=1)


def divergence(log_p: torch.Tensor, log_q: torch.Tensor, kind: str) -> torch.Tensor:
    """Computes the (c,) divergences in nats from (c, outcomes) log-probabilities of the teacher (p) and the model (q).

    `kind`: "forward" is KL(p, q), "reverse" KL(q, p), and "js" KL(p, m) / 2 + KL(q, m) / 2 with m = (p + q) / 2.
    """
    if kind == "forward":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if kind == "reverse":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    middle = torch.logsumexp(torch.stack([log_p, log_q]), dim=0) - log(2)
    return (log_p.exp() * (log_p - middle) + log_q.exp() * (log_q - middle)).sum(-1) / 2
