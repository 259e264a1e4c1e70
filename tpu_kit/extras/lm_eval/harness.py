"""Runs the tasks of lm-evaluation-harness on the kit's generator, on any backend.

    import lm_eval                                    # pip install lm-eval
    from tpu_kit.extras.lm_eval.harness import harness_model
    lm_eval.simple_evaluate(harness_model(config, "runs/my-run/adapter"), tasks=["gsm8k"])

Every kind of request is a launch whose replicas share the work; the calling process uses no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import TrainConfig
from tpu_kit.generation.answers import GenerationRequest, answer
from tpu_kit.generation.prompts import Completion
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.storage.run_folder import adapter_at_hand
from tpu_kit.model import rotary
from tpu_kit.model.weights.source import load_tokenizer, read_config

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first given name wins
_PASSED_ON = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")


def harness_model(
    config: TrainConfig,
    adapter_dir: str | Path | None = None,
    *,
    batch_size: int = 32,
    truncate: bool = False,
) -> Any:
    """Returns an `lm_eval.api.model.LM` that answers with the kit's generator; loads only the tokenizer.

    Every call of the methods for requests (`Requests`) then launches replicas and loads the model.

    Args:
        config: the model, the reasoning tags and the launch.
        adapter_dir: a run or its adapter, a folder or gs://bucket/run; None for the base model.
        batch_size: maximum rows of a batch per replica.
        truncate: whether to cut off the beginning of contexts that are too long; otherwise requests with them raise
            ValueError.

    Raises:
        ValueError: lm-eval is not installed, or the adapter or the tokenizer cannot be read.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise ValueError(f"lm-evaluation-harness cannot be imported ({error}): pip install lm-eval") from error
    kind = type("HarnessModel", (Requests, LM), {"__module__": __name__})
    return kind(config, adapter_dir, batch_size, truncate)


class Requests:
    """Answers lm-eval's three kinds of requests; `harness_model` combines this class with lm-eval's `LM`.

    The `args` of a request are (context, options), (context, continuation) or (text,), in the order of the methods.
    Every call loads the model anew, and returns its results in the order of the requests.
    """

    def __init__(self, config: TrainConfig, adapter_dir: str | Path | None, batch_size: int, truncate: bool) -> None:
        super().__init__()
        self._config, self._adapter, self._batch_size, self._truncate = config, adapter_dir, batch_size, truncate
        with adapter_at_hand(adapter_dir) as folder:
            self._tokenizer = load_tokenizer(config.model, folder)
        settings = read_config(config.model)
        positions = rotary.max_positions(settings.get_text_config()) if settings else None
        self._positions = positions or config.data.max_length

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns the answer to every context, up to its first stop string.

        Options are "until" (a stop string or a list), the maximum number of new tokens as "max_gen_toks" or a synonym
        (256 by default), "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty" and "seed".
        Without "temperature", or with "do_sample" false, decoding is greedy; "do_sample" true alone means temperature
        1. Reasoning between the tags of `config.data` is left out, and stop strings do not end it. A reply that ends
        within its reasoning has the answer "".

        Raises:
            ValueError: there is another option, or a value is out of range; or a context with the new tokens exceeds
                the model's positions, and `truncate` is false.
        """
        groups: dict[Sampling, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(_sampling(request.args[1]), []).append(number)
        contexts = [self._encode(request.args[0]) or [self._first] for request in requests]
        asks = [
            GenerationRequest([contexts[number] for number in numbers], sampling, truncate=self._truncate)
            for sampling, numbers in groups.items()
        ]
        texts = [""] * len(requests)
        for numbers, completions in zip(groups.values(), self._answer(asks).completions, strict=True):
            for number, completion in zip(numbers, completions, strict=True):
                texts[number] = self._answer_of(completion)
        return texts

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Returns (log-likelihood in nats, whether greedy decoding produces it) for every continuation.

        White space at the end of a context counts as the beginning of its continuation. A blank context becomes BOS, or
        EOS if the tokenizer has no BOS.

        Raises:
            ValueError: a continuation has no tokens, or as many as the model has positions or more; or it is too long
                with its context, and `truncate` is false.
        """
        rows, lengths = [], []
        for number, request in enumerate(requests):
            head, tail = self._pair(*request.args)
            if not tail:
                raise ValueError(f"request {number}: the continuation {request.args[1]!r} is empty")
            if len(tail) >= self._positions:
                raise ValueError(
                    f"request {number}: its continuation has {len(tail)} tokens, but at most {self._positions - 1} fit "
                    "the model's positions; remove the request, or use a model with more positions"
                )
            rows.append(self._cut([*head, *tail], number))
            lengths.append(len(tail))
        ratings = self._answer([], rows).ratings
        return [
            (sum(rating.logprobs[-length:]), all(rating.likeliest[-length:]))
            for rating, length in zip(ratings, lengths, strict=True)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Returns the log-likelihoods of whole texts in nats, in `windows` if they exceed the model's positions.

        The token before a text is BOS, or EOS if the tokenizer has no BOS. An empty text has 0.0. `truncate` has no
        effect: all tokens of a text count.
        """
        rows, owners, lengths = [], [], []
        for number, request in enumerate(requests):
            for row, new in windows([self._first, *self._encode(request.args[0], special=False)], self._positions):
                rows.append(row)
                owners.append(number)
                lengths.append(new)
        totals = [0.0] * len(requests)
        for owner, length, rating in zip(owners, lengths, self._answer([], rows).ratings, strict=True):
            totals[owner] += sum(rating.logprobs[-length:])
        return totals

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a chat as text by the chat template; `add_generation_prompt` False: to continue its last message."""
        return self._tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the tokenizer's chat template, for lm-eval's records; "" without one. The argument has no effect."""
        return str(self._tokenizer.chat_template or "")

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm-eval caches rendered requests."""
        return self._config.model.name.replace("/", "__")

    def _answer_of(self, completion: Completion) -> str:
        """Returns a reply without its reasoning; "" if it ended within it."""
        if completion.reasoning is None:
            return completion.text
        return completion.text.rpartition(self._config.data.think_close)[2].lstrip() if completion.answer else ""

    def _answer(self, asks: Sequence[GenerationRequest], rows: Sequence[Sequence[int]] = ()) -> Any:
        return answer(self._config, asks, rows, adapter_dir=self._adapter, batch_size=self._batch_size)

    @property
    def _first(self) -> int:
        """The token before a text without a context: BOS, or EOS if there is none."""
        begin = self._tokenizer.bos_token_id
        return int(self._tokenizer.eos_token_id if begin is None else begin)

    def _encode(self, text: str, special: bool = True) -> list[int]:
        """Returns the token ids of `_with_ends`."""
        return self._with_ends(text, special)[0]

    def _with_ends(self, text: str, special: bool = True) -> tuple[list[int], list[int]]:
        """Returns the token ids of a text, and for each token the index of the character after it.

        `special` adds the tokenizer's special tokens at the beginning, unless the text begins with BOS; never EOS.
        """
        begin, end = self._tokenizer.bos_token, self._tokenizer.eos_token_id
        special = special and not (begin and text.startswith(begin))  # a rendered chat includes it
        encoded = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        if special and ids[-1:] == [end]:
            ids.pop()  # some tokenizers end every text
        return ids, [end for _, end in encoded["offset_mapping"]][: len(ids)]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of context and continuation; trailing spaces of the context go to the continuation.

        A blank context becomes BOS, or EOS without BOS. A token across the border goes to the continuation.
        """
        bare = context.rstrip()
        if not bare:
            return [self._first], self._encode(context + continuation, special=False)
        ids, ends = self._with_ends(context + continuation)
        cut = next((index for index, end in enumerate(ends) if end > len(bare)), len(ids))
        return ids[:cut] or [self._first], ids[cut:]

    def _cut(self, row: list[int], number: int) -> list[int]:
        """Returns a row cut at its beginning to the model's positions.

        Raises ValueError, with the request's `number`, if the row is longer and `truncate` is false.
        """
        if len(row) > self._positions and not self._truncate:
            raise ValueError(
                f"request {number}: its {len(row)} tokens are more than the {self._positions} positions of the model; "
                "cut off its beginning with harness_model(truncate=True)"
            )
        return row[-self._positions :]


def windows(row: list[int], width: int) -> Iterable[tuple[list[int], int]]:
    """Yields (window, number of new tokens at its end) for windows of at most `width` tokens that cover a row.

    `width` is at least 2. Every token of the row except the first is new in exactly one window, so a row of one token
    has no window. Before its new tokens a window has one token of context; the last window has as many as fit.
    """
    done = 1
    while done < len(row):
        end = min(len(row), done + width - 1)
        yield row[max(0, end - width) : end] if end == len(row) else row[done - 1 : end], end - done
        done = end


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """Converts lm-eval's generation options; without options, greedy with at most 256 tokens.

    Raises ValueError for options that the generator lacks, and for values out of range.
    """
    rest = dict(options)
    lengths = [rest.pop(name) for name in _LENGTHS if name in rest]
    stop = rest.pop("until", None) or []
    stop = (stop,) if isinstance(stop, str) else tuple(filter(None, stop))
    drawn, temperature = rest.pop("do_sample", None), rest.pop("temperature", None)
    if drawn is False or temperature is None:
        temperature = 1.0 if drawn else 0.0
    passed = {name: rest.pop(name) for name in _PASSED_ON if name in rest}
    if rest:
        raise ValueError(f"generation options {', '.join(rest)}: the generator does not have them; remove them")
    length = int(lengths[0]) if lengths else 256
    return Sampling(length, float(temperature), stop=stop, stop_in_reasoning=False, **passed)
