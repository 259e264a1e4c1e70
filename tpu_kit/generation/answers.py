"""Loads a base or tuned model in every replica, completes prompts and computes the likelihood of token ids.

    from tpu_kit.generation.answers import Sampling, generate
    replies = generate(config, [[{"role": "user", "content": "What is 2 + 3?"}]], Sampling(max_new_tokens=64))

Each call loads the model anew and divides the prompts among the replicas, whose number does not change the result.
`Generator` takes a loaded model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tpu_kit.config.loader import ConfigError, TrainConfig
from tpu_kit.distributed import detection
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.progress import follow_answers
from tpu_kit.distributed.replica import runtime
from tpu_kit.generation.generator import Generator, Rating
from tpu_kit.generation.model_loading import load_here
from tpu_kit.generation.prompts import Completion, Prompt, PromptCodec, has_pictures, is_chat, text_of
from tpu_kit.generation.sampling import Sampling
from tpu_kit.machine.storage.run_folder import adapter_at_hand
from tpu_kit.model.base_model import base_model, text_config
from tpu_kit.model.rotary import max_positions
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.model.weights.base_identity import base_of_adapter

__all__ = ["Completion", "Generator", "Prompt", "Sampling", "chat", "generate", "stream"]


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts and the options for completing them.

    Attributes:
        prompts: as in `generate`.
        sampling: how tokens are chosen.
        n: samples per prompt.
        truncate: whether to cut off the beginning of a prompt that is too long; otherwise it is an error.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    n: int = 1
    truncate: bool = False


class Answers(NamedTuple):
    """The result of `answer`.

    Attributes:
        completions: a list for each `GenerationRequest`, in order, with n consecutive completions per prompt.
        ratings: a rating for each row, in order.
    """

    completions: list[list[Completion]]
    ratings: list[Rating]


def generate(
    config: TrainConfig,
    prompts: Sequence[Prompt],
    sampling: Sampling | None = None,
    n: int = 1,
    *,
    adapter_dir: str | Path | None = None,
    batch_size: int = 8,
    truncate: bool = False,
    chat: bool | None = None,
) -> list[Completion]:
    """Loads the model in every replica of `config.launch`, once for a mesh or a single prompt, and completes prompts.

    Args:
        config: the model, the reasoning tags, the system prompt and the launch.
        prompts: texts, chats (lists of messages, or {"messages", "tools", "images"}) or lists of token ids.
        sampling: None is greedy, with at most 256 new tokens.
        n: samples per prompt; at temperature 0 they are equal, and a note on stderr says so.
        adapter_dir: a run or its adapter, a folder or gs://bucket/run; None for the base model.
        batch_size: the maximum number of rows (prompts x n) in a batch of one replica; n if that is more.
        truncate: whether to cut off the beginning of a prompt that is too long; otherwise it is an error.
        chat: whether to use the chat template. True: also for texts, with the base model's if the adapter has none.
            False: never. None: for chats only; if there is no template, as after training on plain text, as False.
            Without a template, a chat of one user turn becomes its text, and other chats are errors.

    Returns:
        n consecutive completions per prompt, in the order of the prompts.

    Raises:
        ValueError: see `Generator.generate`; or the model or the adapter cannot be read, or they do not match.
        LaunchError: a replica failed.
    """
    ask = GenerationRequest(list(prompts), sampling or Sampling(), n, truncate)
    if n > 1 and not ask.sampling.temperature:
        print(f"note: n={n} samples at temperature=0 are equal; set temperature above 0", file=sys.stderr, flush=True)
    return answer(config, [ask], adapter_dir=adapter_dir, batch_size=batch_size, chat=chat).completions[0]


def stream(
    config: TrainConfig,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    adapter_dir: str | Path | None = None,
    truncate: bool = False,
    chat: bool | None = None,
) -> None:
    """Prints the completion of a prompt on stdout while one replica generates it; arguments, errors: see `generate`."""
    (prompt,) = as_asked([prompt], chat)
    config = _seeing(config, [prompt])
    arguments = {"prompt": prompt, "sampling": sampling or Sampling(), "truncate": truncate, "chat": chat}
    launch_with_adapter(_stream_here, stream, on_one_replica(config), adapter_dir, **arguments)


def _stream_here(
    config: TrainConfig, adapter: Path | None, prompt: Prompt, sampling: Sampling, truncate: bool, chat: bool | None
) -> None:
    """Loads the model in the replica and prints the completion of a prompt from `as_asked`."""
    model, tokenizer = load_here(config, adapter, runtime.current(), chat, [prompt])
    (prompt,) = _encoded(config, tokenizer, [prompt])
    generator = generator_for(model, tokenizer, config, [prompt], sampling.max_new_tokens, batch_size=1)
    _print_reply(generator, prompt, sampling, truncate)


_CHAT_TOKENS = 4096  # limit of a conversation with its next reply, or the model's positions if they are fewer
_CHAT_BLOCK = 4  # tokens printed at a time


def as_asked(prompts: Sequence[Prompt], chat: bool | None) -> list[Prompt]:
    """Returns a new list of the prompts, in the form in which they are asked.

    If `chat` is true, every text becomes a chat of one user turn. If it is False, every chat becomes its text. If it is
    None, neither changes. Chats with pictures become copies with the bytes of the pictures. Token ids do not change.

    Raises:
        ValueError: a mapping has no messages, or a picture cannot be read. Or `chat` is False, and a chat has pictures,
            tools or other messages than one user turn. The text has the number of the prompt, from 0.
    """
    made: list[Prompt] = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, Mapping) and not prompt.get("messages"):
            raise ValueError(f'prompt {number}: it has no messages; write {{"messages": [...]}}, or a text')
        if has_pictures(prompt):
            prompt = _with_bytes(prompt, number, chat)
        if chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        elif is_chat(prompt) and chat is False:
            whole: Any = prompt if isinstance(prompt, Mapping) else {"messages": prompt}
            try:
                prompt = text_of(whole["messages"], whole.get("tools"))
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
        made.append(prompt)
    return made


def _with_bytes(prompt: Prompt, number: int, chat: bool | None) -> Any:
    """Returns a chat with the bytes of its pictures.

    Raises ValueError, with the prompt's `number`, if `chat` is False or a picture cannot be read.
    """
    from tpu_kit.data.images.chats import carried

    if chat is False:
        raise ValueError(f"prompt {number}: chat=false, but pictures need a chat template; leave chat=false out")
    try:
        return carried(prompt)
    except ValueError as error:
        raise ValueError(f"prompt {number}: {error}") from error


def _seeing(config: TrainConfig, prompts: Sequence[Prompt]) -> TrainConfig:
    """Returns `config`, with `model.images` if a prompt has pictures; ValueError if the model has no vision part."""
    if config.model.images or not any(map(has_pictures, prompts)):
        return config
    from tpu_kit.data.images.chats import seeing

    return seeing(config)


def _encoded(config: TrainConfig, tokenizer: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts; with `model.images` and a chat template, chats as token ids that carry their pictures.

    Raises:
        ValueError: a prompt has pictures but there is no chat template; or see `data.images.chats.encode`.
    """
    if not config.model.images:
        return list(prompts)
    if not tokenizer.chat_template:
        if any(map(has_pictures, prompts)):
            raise ValueError(
                f"a prompt has a picture, but the tokenizer of {config.model.name} has no chat template to place it in "
                "the text; use an instruction-tuned model, such as google/gemma-4-E2B-it"
            )
        return list(prompts)
    from tpu_kit.data.images.chats import encode

    return encode(config, tokenizer, prompts)


def chat(
    config: TrainConfig, sampling: Sampling, *, adapter_dir: str | Path | None = None, template: bool | None = None
) -> None:
    """Runs a chat in the terminal of stdin, on one replica, until /exit or the end of the input.

    Arguments and errors are as in `generate`; `template` is its `chat`. Without a chat template, the model continues
    each line as text and does not see the earlier lines. Conversation and next reply have at most 4,096 tokens, or the
    model's positions; the beginning is cut off. If stdin is not a terminal, OSError is raised.
    """
    # The replica makes no progress while the user types.
    single = on_one_replica(replace(config, launch=replace(config.launch, hang_timeout=1e9)))
    arguments = {"sampling": sampling, "terminal": os.ttyname(sys.stdin.fileno()), "template": template}
    launch_with_adapter(_chat_here, chat, single, adapter_dir, **arguments)


def _chat_here(
    config: TrainConfig, adapter: Path | None, sampling: Sampling, terminal: str, template: bool | None
) -> None:
    """Loads the model in the replica and prints its replies to the lines typed in `terminal`, the path of a device.

    It ends at /exit or the end of the input. `template` is `chat` of `generate`: False asks every line as a text.
    """
    rt = runtime.current()
    model, tokenizer = load_here(config, adapter, rt, template, [[{}]])
    plain = template is False or not tokenizer.chat_template
    limit = min(_CHAT_TOKENS, max_positions(text_config(model)) or _CHAT_TOKENS)
    generator = Generator(
        model, tokenizer, rt, max_prompt=max(1, limit - sampling.max_new_tokens),
        max_new_tokens=sampling.max_new_tokens, batch_size=1, block=_CHAT_BLOCK, data=config.data,
    )  # fmt: skip
    conversation: list[dict[str, str]] = []
    print("/exit or Ctrl-D ends.", flush=True)
    # With O_NOCTTY the terminal still belongs to the command, so that Ctrl-C ends the command.
    with open(terminal, opener=lambda path, flags: os.open(path, flags | os.O_NOCTTY)) as typed:
        while True:
            print("\n> ", end="", flush=True)
            line = typed.readline()
            if not line or line.strip() == "/exit":
                print(flush=True)
                return
            if line.strip() and plain:
                _print_reply(generator, line.rstrip("\n"), sampling, truncate=True)
            elif line.strip():
                said = {"role": "user", "content": line.strip()}
                try:
                    (asked,) = _encoded(config, tokenizer, [[*conversation, said]])
                except ValueError as error:  # for example, <image> in the line: the terminal sends no pictures
                    print(error, flush=True)
                    continue
                conversation.append(said)
                text = _print_reply(generator, asked, sampling, truncate=True)
                conversation.append({"role": "assistant", "content": text})


def _print_reply(generator: Generator, prompt: Prompt, sampling: Sampling, truncate: bool) -> str:
    """Prints and returns a reply; `truncate` cuts off the beginning of a prompt that is too long, else ValueError."""
    text = ""
    for piece in generator.stream(prompt, sampling, truncate):
        print(piece, end="", flush=True)
        text += piece
    print(flush=True)
    return text


def answer(
    config: TrainConfig,
    asks: Sequence[GenerationRequest],
    rows: Sequence[Sequence[int]] = (),
    *,
    adapter_dir: str | Path | None = None,
    batch_size: int = 8,
    chat: bool | None = None,
) -> Answers:
    """Loads the model as `generate`, completes the prompts of `asks`, and rates `rows` of token ids (`Generator.rate`).

    The replicas of `config.launch` share the work; a single replica runs if no entry has more than one prompt and
    `rows` has at most one row. For more than one completion, a bar on stderr shows the progress.

    Args:
        config: the model, the reasoning tags, the system prompt and the launch.
        asks: prompts with their options; may be empty.
        rows: rows of token ids; may be empty.
        adapter_dir: a run or its adapter, a folder or gs://bucket/run; None for the base model.
        batch_size: the maximum number of rows in a batch of one replica; n if that is more.
        chat: whether to use the chat template. True: also for texts, with the base model's if the adapter has none.
            False: never. None: for chats only; without a template, as False.

    Raises:
        ValueError: an entry of `asks` has no prompts; or as in `generate` and `Generator.rate`.
        LaunchError: a replica failed.
    """
    for ask in asks:
        if not ask.prompts:
            raise ValueError("there are no prompts; give one or more")
    asks = [replace(ask, prompts=as_asked(ask.prompts, chat)) for ask in asks]
    config = _seeing(config, [prompt for ask in asks for prompt in ask.prompts])
    if max([len(rows), *(len(ask.prompts) for ask in asks)]) == 1:  # samples of a prompt share one prefill
        config = on_one_replica(config)
    count = sum(len(ask.prompts) * ask.n for ask in asks)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tpu_kit-")))
        if count > 1:
            model = "base model" if adapter_dir is None else "/".join(Path(adapter_dir).parts[-2:])  # runs/NAME/adapter
            stack.enter_context(follow_answers(folder, config.output_path, model, count))
        arguments = {"asks": asks, "rows": list(rows), "batch_size": batch_size, "folder": folder, "chat": chat}
        launch_with_adapter(_answer_share, answer, config, adapter_dir, **arguments)
        shares = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    completions = []
    for number, ask in enumerate(asks):
        answers = {
            (row, n): Completion(**{**reply, "tokens": tuple(reply["tokens"]), "logprobs": tuple(reply["logprobs"])})
            for share in shares
            for row, n, reply in share["completed"][number]
        }
        completions.append([answers[row, n] for row in range(len(ask.prompts)) for n in range(ask.n)])
    ratings = {row: Rating(*rating) for share in shares for row, rating in share["ratings"]}
    return Answers(completions, [ratings[row] for row in range(len(rows))])


def _answer_share(
    config: TrainConfig,
    adapter: Path | None,
    asks: list[GenerationRequest],
    rows: list[Sequence[int]],
    batch_size: int,
    folder: Path,
    chat: bool | None,
) -> None:
    """Writes this replica's completions and ratings to folder/rank-RANK.json; other arguments are as in `answer`.

    Meanwhile, rank-RANK.answered has the number of its finished completions.
    """
    rt = runtime.current()
    model, tokenizer = load_here(config, adapter, rt, chat, [prompt for ask in asks for prompt in ask.prompts])
    asks = [replace(ask, prompts=_encoded(config, tokenizer, ask.prompts)) for ask in asks]
    mine = max((-(-len(ask.prompts) // rt.world_size) * ask.n for ask in asks), default=1)
    batches = -(-mine // batch_size)
    generator = generator_for(
        model, tokenizer, config, [prompt for ask in asks for prompt in ask.prompts],
        max((ask.sampling.max_new_tokens for ask in asks), default=1), -(-mine // batches) if asks else batch_size,
    )  # fmt: skip
    completed: list[dict[tuple[int, int], Completion]] = []

    def tell(done: int) -> None:
        (folder / f"rank-{rt.rank}.answered").write_text(str(sum(map(len, completed)) + done))

    for ask in asks:
        completed.append(generator.share(ask.prompts, ask.sampling, ask.n, ask.truncate, tell))
    share = {
        "completed": [[(row, n, vars(reply)) for (row, n), reply in replies.items()] for replies in completed],
        "ratings": list(generator.rate(rows, share=True).items()),
    }
    (folder / f"rank-{rt.rank}.json").write_text(json.dumps(share))


def on_one_replica(config: TrainConfig) -> TrainConfig:
    """Returns `config` with one replica; unchanged if it has a mesh, because the model may not fit on one device."""
    return config if config.launch.mesh else replace(config, launch=replace(config.launch, num_replicas=1))


def launch_with_adapter(
    fn: Callable[..., Any],
    public: Callable[..., Any],
    config: TrainConfig,
    adapter_dir: str | Path | None,
    **arguments: Any,
) -> Any:
    """Launches `fn(config, adapter=FOLDER or None, **arguments)`; returns the result of the first replica.

    `fn` runs once if `launch.mesh` is set, otherwise in every replica. In its `config`, the adapter's own base is the
    model.

    Args:
        fn: the function, with a picklable result, as in `launch`.
        public: a function whose name `launch` shows instead of the name of `fn`.
        config: the run.
        adapter_dir: a run, its adapter or a checkpoint. FOLDER is the local folder of its adapter, or a temporary copy
            of an adapter in gs://. None for the base model.
        **arguments: further arguments of `fn`.

    Raises:
        ConfigError: the mesh cannot shard the model.
        ValueError: there is no adapter, it was trained on other base weights, or as in `launch`.
        LaunchError: a replica failed.
    """
    if (mesh := detection.detect(config.launch).mesh) is not None:
        shape = None
        with contextlib.suppress(ValueError):  # its shape cannot be derived
            shape = read_shape(config.model)
        if shape and (problems := shape.mesh_problems(mesh)):
            raise ConfigError(problems)
    with adapter_at_hand(adapter_dir) as adapter:
        config = replace(config, model=base_of_adapter(config.model, adapter))
        job = functools.partial(fn, adapter=adapter, **arguments)
        return launch(functools.update_wrapper(job, public), config, sharded=True)


def generator_for(
    model: torch.nn.Module,
    tokenizer: Any,
    config: TrainConfig,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    batch_size: int,
    room: int = 0,
) -> Generator:
    """Makes a generator for the runtime of the calling replica.

    Its `max_prompt` is the length of the longest prompt plus `room` tokens, or the number of the model's positions if
    that is less. `config.data`, `max_new_tokens` and `batch_size` are arguments of `Generator`. Raises ValueError as
    `Generator`, and as `PromptCodec.encode` for a prompt.
    """
    codec = PromptCodec(tokenizer, base_model(model), config.data)
    longest = max((len(codec.encode(prompt)) for prompt in prompts), default=1) + room
    positions = max_positions(text_config(model)) or longest
    return Generator(
        model, tokenizer, runtime.current(), max_prompt=min(longest, positions), max_new_tokens=max_new_tokens,
        batch_size=batch_size, data=config.data,
    )  # fmt: skip
