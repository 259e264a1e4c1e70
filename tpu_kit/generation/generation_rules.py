"""Applies a model's generation config in decoding, as transformers' logits processors do, with fixed shapes.

The rules read the tokens so far from a tensor of fixed length on the device. The host reads no tokens, and a new length
compiles no new program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tpu_kit.generation.sampling import Sampling

_OPTIONS = {"repetition_penalty": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Options that `Sampling` may leave to the model -> their neutral values."""
_SAMPLED = ("top_k", "top_p", "min_p")  # no effect at temperature 0

_NOT_APPLIED = {
    "guidance_scale": 1, "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "num_beams": 1,
    "num_beam_groups": 1, "forced_bos_token_id": None, "forced_eos_token_id": None, "token_healing": False,
    "exponential_decay_length_penalty": None, "watermarking_config": None, "constraints": None, "force_words_ids": None,
    "penalty_alpha": None, "dola_layers": None, "max_time": None,
}  # fmt: skip
"""Settings that change greedy decoding and that the kit does not support -> their neutral values."""
_NOT_SAMPLED = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}
"""Unsupported settings that change only sampling -> their neutral values."""


@dataclass(frozen=True)
class GenerationRules:
    """Rules for the next token, from a generation config.

    Attributes:
        biases: sequences of token ids with a bias. If a row ends in all ids but the last, the last id's logit gets it.
        first: token ids that cannot begin a reply.
        ngram: length of token sequences that may occur only once in prompt and reply; 0 = no such rule.
        min_length: minimum number of tokens of prompt and reply together.
        min_new_tokens: minimum number of tokens of a reply.
    """

    biases: tuple[tuple[tuple[int, ...], float], ...] = ()
    first: tuple[int, ...] = ()
    ngram: int = 0
    min_length: int = 0
    min_new_tokens: int = 0

    @classmethod
    def of(cls, config: Any) -> GenerationRules:
        """Reads the rules of a `GenerationConfig` of transformers; ignores settings that are no rule of this class.

        `sequence_bias` gives `biases`; `bad_words_ids` and `suppress_tokens` give biases of -inf. The other rules are
        begin_suppress_tokens, no_repeat_ngram_size, min_length and min_new_tokens.

        Raises:
            ValueError: transformers does not accept a setting.
        """
        from transformers import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

        biases: dict[tuple[int, ...], float] = {}
        try:
            if config.sequence_bias is not None:
                biases |= SequenceBiasLogitsProcessor(config.sequence_bias).sequence_bias
            ends = _ids(config.eos_token_id)
            if config.bad_words_ids is not None:
                words = NoBadWordsLogitsProcessor(config.bad_words_ids, torch.tensor(ends) if ends else None)
                biases |= words.sequence_bias
            biases |= {(token,): float("-inf") for token in _ids(config.suppress_tokens)}
            return cls(
                tuple(biases.items()), tuple(_ids(config.begin_suppress_tokens)), config.no_repeat_ngram_size or 0,
                config.min_length or 0, config.min_new_tokens or 0,
            )  # fmt: skip
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the model's generation_config.json cannot be used: {error}") from error

    @property
    def reads_tokens(self) -> bool:
        """Whether a rule depends on the tokens so far, not only on their number."""
        return self.ngram > 0 or any(len(ids) > 1 for ids, _ in self.biases)

    def tensors(self, vocabulary: int, ends: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of the rules for `apply`, on the host.

        First is (3, V) fp32: the biases of single tokens, -inf for `first`, and -inf for `ends`. Then (2,) int64:
        min_length and min_new_tokens. Then, for every length L of longer sequences in `biases`, ids (S, L) int64 and
        biases (S,) fp32.

        Args:
            vocabulary: the model's vocabulary size V.
            ends: (V,) int64, 1 for tokens that end a reply.

        Raises:
            ValueError: a token of `biases` is not in the vocabulary; such tokens of `first` are ignored.
        """
        if bad := [token for ids, _ in self.biases for token in ids if token >= vocabulary]:
            raise ValueError(f"the model's generation_config.json names token {bad[0]} of {vocabulary}; correct it")
        always, first = torch.zeros(vocabulary), torch.zeros(vocabulary)
        for ids, bias in self.biases:
            if len(ids) == 1:
                always[ids[0]] += bias
        first[[token for token in self.first if token < vocabulary]] = float("-inf")
        early = torch.where(ends.cpu() > 0, float("-inf"), 0.0)
        made = [torch.stack([always, first, early]), torch.tensor([self.min_length, self.min_new_tokens])]
        for _, group in sorted(self._groups.items()):
            made += [torch.tensor([ids for ids, _ in group]), torch.tensor([bias for _, bias in group])]
        return made

    @property
    def _groups(self) -> dict[int, list[tuple[tuple[int, ...], float]]]:
        """The biases of sequences of two or more tokens, by their length."""
        groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        for ids, bias in self.biases:
            if len(ids) > 1:
                groups.setdefault(len(ids), []).append((ids, bias))
        return groups

    def apply(
        self, logits: torch.Tensor, step: torch.Tensor, position: torch.Tensor, said: torch.Tensor | None,
        tensors: list[torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Returns new logits, (B, V) fp32, with the rules applied; all tensors are on the device.

        Args:
            logits: (B, V) fp32.
            step: (1,) int64, the number of reply tokens so far.
            position: (B,) int64, index of the last token in its row of prompt and reply, without padding.
            said: (B, T) int64, the tokens of prompt and reply up to `position`; None unless `reads_tokens`.
            tensors: the result of `tensors`, on the device.
        """
        (always, first, early), limits, *groups = tensors
        logits = logits + always + torch.where(step == 0, first, 0.0)
        open_ = (step < limits[1]) | (position + 1 < limits[0])
        logits = logits + torch.where(open_[:, None], early, 0.0)
        if said is None:
            return logits
        for ids, bias in zip(groups[::2], groups[1::2], strict=True):
            logits = logits + _completed(said, position, ids, bias, logits)
        return _without_repeats(logits, position, said, self.ngram) if self.ngram else logits


NO_RULES = GenerationRules()


def _ids(value: Any) -> list[int]:
    """Returns a setting that is None, a token id or several ids as a list."""
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _last(said: torch.Tensor, position: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the last tokens of each row, (B, count); in a shorter row, the first entries are arbitrary."""
    places = position[:, None] + torch.arange(1 - count, 1, device=said.device)
    return said.gather(1, places.clamp(min=0))


def _completed(
    said: torch.Tensor, position: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Returns (B, V), the sums of `bias` (S,) for tokens that would complete a sequence of `ids` (S, L)."""
    begun = ids.shape[1] - 1
    matches = (_last(said, position, begun)[:, None] == ids[:, :-1]).all(-1) & (position[:, None] + 1 >= begun)
    added = torch.where(matches, bias, 0.0)
    return torch.zeros_like(logits).scatter_add(1, ids[:, -1].expand(len(said), -1), added)


def _without_repeats(logits: torch.Tensor, position: torch.Tensor, said: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the logits (B, V), -inf for tokens that would repeat a sequence of `size` tokens in the row.

    `position` and `said` are as in `GenerationRules.apply`.
    """
    windows = said.shape[1] - size + 1
    ends = torch.arange(size - 1, said.shape[1], device=said.device)
    matches = (ends <= position[:, None]) & (position[:, None] + 1 >= size)
    if size > 1:
        begun = _last(said, position, size - 1)
        for place in range(size - 1):
            matches = matches & (said[:, place : place + windows] == begun[:, place : place + 1])
    # Positions without a match are scattered to an extra column after the vocabulary.
    column = torch.where(matches, said[:, size - 1 :], logits.shape[1])
    found = torch.zeros(len(said), logits.shape[1] + 1, device=said.device).scatter(1, column, 1.0)
    return torch.where(found[:, :-1] > 0, float("-inf"), logits)


# ------------------------------------------------------------------------------------------ with a run's own options


@dataclass(frozen=True)
class ModelDefaults:
    """The decoding settings of a model's generation config.

    Attributes:
        options: values for repetition_penalty, top_k, top_p and min_p of `Sampling`, by name, as far as set.
        stop: texts that end a reply.
        rules: other settings that the kit applies.
        applied: settings of `options` and `rules` that are not neutral, with their values by name.
        not_applied: unsupported settings that change greedy decoding in transformers, likewise.
        not_sampled: unsupported settings that change only sampling in transformers, likewise.
    """

    options: Mapping[str, Any]
    stop: tuple[str, ...]
    rules: GenerationRules
    applied: Mapping[str, Any]
    not_applied: Mapping[str, Any]
    not_sampled: Mapping[str, Any]

    @classmethod
    def of(cls, config: Any) -> ModelDefaults:
        """Reads a `GenerationConfig` (None: no settings); raises ValueError if transformers does not take a setting."""
        if config is None:
            return cls({}, (), NO_RULES, {}, {}, {})
        given = {name: value for name, value in config.to_dict().items() if value is not None}
        options = {name: given[name] for name in _OPTIONS if name in given}
        neutral: dict[str, Any] = _OPTIONS | dict.fromkeys(_RULES, 0)
        applied = {name: given[name] for name in neutral if given.get(name) not in (None, neutral[name], [])}
        stop = given.get("stop_strings") or ()
        different = [
            {name: given[name] for name, value in table.items() if given.get(name, value) not in (value, None, False)}
            for table in (_NOT_APPLIED, _NOT_SAMPLED)
        ]
        return cls(options, (stop,) if isinstance(stop, str) else tuple(stop), GenerationRules.of(config), applied,
                   *different)  # fmt: skip

    def fill(self, sampling: Sampling) -> Sampling:
        """Returns a copy of options with values for None, and with the model's stop texts after its own.

        None in repetition_penalty, top_k, top_p or min_p becomes the model's value, or if the model sets none, the
        neutral value (1, 0, 1, 0). If `sampling.model_defaults` is false, None becomes the neutral value, and no stop
        text is added.
        """
        options = self.options if sampling.model_defaults else {}
        found: dict[str, Any] = {
            name: options.get(name, value) for name, value in _OPTIONS.items() if getattr(sampling, name) is None
        }
        stop = self.stop if sampling.model_defaults else ()
        return replace(sampling, **found, stop=(*sampling.stop, *stop))

    def describe(self, sampling: Sampling) -> str:
        """Returns a line that names the model's settings applied and not applied to `sampling`; "" if there are none.

        It leaves out settings that `sampling` overrides, and settings of sampling if `sampling` is greedy. If
        `sampling.model_defaults` is false, it says that `applied` are not applied; "" if there are none.
        """
        config = "decoding         the model's generation_config"
        if not sampling.model_defaults:
            text = f"{config} ({_shown(self.applied)}) is not applied: samples are from the model's own distribution"
            return text if self.applied else ""
        drawn = sampling.temperature > 0
        used = {name: value for name, value in self.applied.items() if drawn or name not in _SAMPLED}
        used = {name: value for name, value in used.items() if getattr(sampling, name, None) is None}
        used |= {"stop_strings": list(self.stop)} if self.stop else {}
        lost = {**self.not_applied, **(self.not_sampled if drawn else {})}
        parts = ["applies " + _shown(used)] if used else []
        parts += [f"has {_shown(lost)}, which transformers applies and the kit does not"] if lost else []
        return f"{config} {'; '.join(parts)}" if parts else ""


_RULES = (
    "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "min_length",
    "min_new_tokens",
)  # fmt: skip


def _shown(settings: Mapping[str, Any]) -> str:
    """Returns settings as "name=value, ...", with the length of lists and dictionaries of more than 3 entries."""
    texts = []
    for name, value in settings.items():
        many = isinstance(value, list | dict) and len(value) > 3
        texts.append(f"{name} ({len(value)} entries)" if many else f"{name}={value}")
    return ", ".join(texts)
