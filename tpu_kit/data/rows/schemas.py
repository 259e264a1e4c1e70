"""Reads the conversation of a row from the columns that `columns.py` found.

`config.named_values.FORMATS` lists the formats and their functions: `cot` (question, reasoning, answer), `messages`
(chats, with tools), `prompt_completion`, `text` and `prompt` are here; `preferences.py` has the others.
`chat_encoding.py` encodes the conversation as token ids.
"""

import contextlib
import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from tpu_kit.config.loader import DataConfig
from tpu_kit.config.named_values import FORMATS, imported
from tpu_kit.data.rows.columns import (
    SOLUTIONS,
    Layout,
    answer_of,
    is_wanted,
    reasoning_of,
    reply,
    role_of,
    split_solution,
    with_own_tags,
)
from tpu_kit.data.rows.field_values import RowError, alternatives, is_filled, options_of, parsed, text_of
from tpu_kit.data.rows.messages import (
    IMAGE,
    are_calls,
    content_text,
    learns,
    read_calls,
    read_messages,
    read_tools,
    thought_of_column,
)

_PLAIN = str.maketrans("\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}\N{LEFT DOUBLE QUOTATION MARK}"
                       "\N{RIGHT DOUBLE QUOTATION MARK}\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}", "''\"\"---")  # fmt: skip
NO_REPLY = "..."
"""Placeholder for the reply of a row that has no reply; no run trains on it."""


class Conversation(NamedTuple):
    """The content of a row.

    Attributes:
        messages: a chat of at least one turn (see `messages.py`), or plain text.
        first: index of the first message (in plain text, character) after the prompt; the prompt carries no loss.
        tools: JSON schemas for the chat template.
        added: number of messages at the start that the row lacks: 1 with the turn of `data.system_prompt`, else 0.
        begun: start of the last reply that is part of the prompt; the model continues it. Empty if there is none.
        images: images in the order of `messages.IMAGE` in the texts; later replaced by `data.images.files.Picture`.
        rejected: for a pair, the same prompt with the rejected reply.
        label: whether the reply is good, for labelled rows; else None.
    """

    messages: list[dict[str, Any]] | str
    first: int
    tools: list[Any] | None = None
    added: int = 0
    begun: str = ""
    images: tuple[Any, ...] = ()
    rejected: "Conversation | None" = None
    label: bool | None = None

    @property
    def asked(self) -> Any:
        """The prompt: the messages before the last reply, with its start `begun`, if any, as a last message.

        For plain text, the text before the completion.
        """
        if isinstance(self.messages, str):
            return self.messages[: self.first]
        last = max(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        words = [{"role": "assistant", "content": self.begun}] if self.begun else []
        return self.messages[:last] + words

    def questions(self, config: DataConfig, *, users_alone: bool = False) -> list[int]:
        """Returns int64 hashes of the prompts of all trained replies; the last hash is the question of the row.

        The hash covers everything before the reply: the row's system turn, tools, calls and earlier replies. It does
        not depend on the row's format (chat, columns or plain text), nor on template, tokenizer and settings such as
        `data.system_prompt`. Plain text has one hash: its prompt's, or its own without a prompt. Images must be
        `Picture` objects.

        Args:
            config: has the reasoning tags, which may replace other tags in `messages`.
            users_alone: whether to leave out system turns and tools.
        """
        if isinstance(self.messages, str):
            return [_hash(self.messages[: self.first] or self.messages)]
        pictures = iter(self.images)
        tools = [] if users_alone else [_json(_function(tool)) for tool in self.tools or ()]
        hashes, prompt = [], _hash(" ".join(["tools:", *sorted(tools)])) if tools else 0
        for i, message in enumerate(self.messages):
            if i >= self.first and learns(message):
                hashes.append(_hash(f"{prompt} assistant: {self.begun}") if self.begun else prompt)
            role, content = message["role"], message.get("content")
            if i < self.added or (users_alone and role in ("system", "developer")):
                continue
            said = "" if content is None else content if isinstance(content, str) else _json(content)
            while IMAGE in said:  # the same text about another picture is another question
                said = said.replace(IMAGE, f"<image {next(pictures).digest}>", 1)
            said = said.replace(config.think_open, "<think>").replace(config.think_close, "</think>")
            said += "".join(_json(_function(call)) for call in message.get("tool_calls") or ())
            prompt = _hash(f"{prompt} {role}: {said}" if prompt or role != "user" else said)
        return hashes


QUESTIONS_VERSION = 1
"""Increase it if `Conversation.questions` returns other hashes: runs store them."""


def _function(tool: Any) -> Any:
    """Returns the function of a tool or tool call without its wrapper and call id, with decoded arguments."""
    if not isinstance(tool, Mapping):
        return tool
    function = {key: value for key, value in dict(tool.get("function", tool)).items() if key not in ("id", "type")}
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):
            function["arguments"] = json.loads(function["arguments"])
    return function


def _json(value: Any) -> str:
    """Returns a value as canonical JSON: sorted keys, no keys with None, {} or [], 2.0 as 2, other types as text."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            made = {str(key): plain(item) for key, item in value.items()}
            return {key: item for key, item in made.items() if item not in (None, {}, [])}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(plain(value), sort_keys=True, ensure_ascii=False, default=str)


def _hash(text: str) -> int:
    """Returns a hash of the `normalised` text, an int64."""
    return int.from_bytes(hashlib.blake2b(normalised(text).encode(), digest_size=8).digest(), "little", signed=True)


def as_text(asked: Any) -> str:
    """Returns `Conversation.asked` for display: the text, a single message's content, or lines "role: content"."""
    if isinstance(asked, str):
        return asked
    if len(asked) == 1:
        return str(asked[0].get("content") or "").replace(IMAGE, "<image> ")
    text = "\n".join(f"{message['role']}: {message.get('content') or message.get('tool_calls')}" for message in asked)
    return text.replace(IMAGE, "<image> ")


def normalised(text: str) -> str:
    """Normalises a question: no case, extra white space, typographic quotes and dashes, or final punctuation."""
    text = unicodedata.normalize("NFC", text).translate(_PLAIN).casefold()
    return " ".join(text.split()).rstrip(" .?:;,\"'")


def conversation(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Returns the content of a row of `without_decoding`, read by the function of `layout.format`.

    A chat without a system turn gets `data.system_prompt`. `layout` is the result of `read_layout`. If its `images` is
    true, the field `images` gets the images of the messages and of their column, unopened.

    Raises:
        RowError: a cell is empty or does not fit its role, the row is marked as unwanted, or no assistant turn carries
            loss. Images and their places are not as many, or images are for plain text.
    """
    talk = _of_row(layout.plain(row), layout, config)
    if layout.images:
        talk = _with_images(talk, layout.plain(row), layout)
    if not config.system_prompt or isinstance(talk.messages, str) or talk.messages[0]["role"] == "system":
        return talk
    turn = {"role": "system", "content": config.system_prompt}
    if talk.rejected is not None:
        assert not isinstance(talk.rejected.messages, str)
        other = talk.rejected._replace(messages=[turn, *talk.rejected.messages], first=talk.rejected.first + 1, added=1)
        talk = talk._replace(rejected=other)
    return talk._replace(messages=[turn, *talk.messages], first=talk.first + 1, added=1)


def _of_row(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Reads a row (result of `layout.plain`) without `data.system_prompt` and images; RowError as `conversation`."""
    for column in layout.switches:
        if is_wanted(column, row.get(column)) is False:
            raise RowError(
                f"its {column} is {str(row[column]).lower()}, so it is not wanted; remove such rows, or set "
                f"data.columns={{{column}: ''}} to train on them"
            )
    talk: Conversation = imported(FORMATS[layout.format].read)(row, layout, config)
    return talk


def _with_images(talk: Conversation, row: Mapping[str, Any], layout: Layout) -> Conversation:
    """Moves the messages' images to `images`; images of the row's column fill the places without an image, in order.

    If messages have neither images nor places, the first user turn begins with the column's images. Raises RowError if
    places and images are not as many, or if images are for plain text or a chat without a user turn.
    """
    column = layout.columns.get("images", "")
    given = _images_of(row.get(column), column)
    if isinstance(talk.messages, str):
        if not given:
            return talk
        raise RowError("images are trained on in chats, and this row is plain text: name a question and its answer")
    messages = [{key: value for key, value in turn.items() if key != "images"} for turn in talk.messages]
    images = [image for turn in talk.messages for image in turn.get("images", ())]
    if given and not images:  # the first user turn is about them, as in TRL
        asked = next((turn for turn in messages if turn["role"] == "user"), None)
        if asked is None:
            raise RowError(f"column {column!r} holds images, and no user turn asks about them")
        asked["content"] = IMAGE * len(given) + (asked.get("content") or "")
        images = list(given)
    elif (wanted := sum(image is None for image in images)) != len(given):
        where = f"column {column!r} has {len(given)}" if column else "the row has no column of images"
        raise RowError(f"the messages have {wanted} places of images, and {where}")
    rest = iter(given)
    return talk._replace(messages=messages, images=tuple(next(rest) if one is None else one for one in images))


def _images_of(value: Any, column: str) -> list[Any]:
    """Returns the images of a cell, without empty ones: a single image, or a list of images, also as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value, column)
    values = value if isinstance(value, list) else [value]
    return [one for one in values if is_filled(one)]


def read_text(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Reads a row of plain text, which has no prompt; raises RowError as `conversation`."""
    return Conversation(_text(row, layout.columns["text"]), 0)


def read_chat(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Returns the chat of a row (result of `layout.plain`); `first` is the index of the chat's first reply with loss.

    If the column `answer` adds the last reply, `first` is the index of the first message with loss in that reply.
    Raises RowError as `conversation`, and if the chat ends in another reply than the `answer`.
    """
    columns = layout.columns
    system, tools = _system(row, layout, config), _tools(row, layout)
    turns = parsed(row.get(columns["messages"]), columns["messages"])
    last = _last_turn(turns, row, layout, config, tools) if "answer" in columns and isinstance(turns, list) else []
    turns = [*turns, *last] if isinstance(turns, list) else turns
    messages = read_messages(turns, columns["messages"], 0, system, config, layout)
    replies = [i for i, message in enumerate(messages) if learns(message)]
    added = len(messages) - len(last)
    return Conversation(messages, next(i for i in replies if i >= added) if last else replies[0], tools)


def read_prompt(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Returns the prompt, text or messages, of a row (result of `layout.plain`) as a chat, for sampled replies.

    The reply is `NO_REPLY`. If the prompt ends in a reply, `NO_REPLY` is joined to it, and it is the field `begun`.
    Raises RowError as `conversation`, and as `expected_answer`.
    """
    columns = layout.columns
    system, tools = _system(row, layout, config), _tools(row, layout)
    asked = row.get(columns["prompt"])
    asked = parsed(asked, columns["prompt"]) if columns["prompt"] in layout.chats else asked
    turns = asked if isinstance(asked, list) else [{"role": "user", "content": _cell(row, columns["prompt"])}]
    turns = [*turns, {"role": "assistant", "content": NO_REPLY}]
    messages = read_messages(turns, columns["prompt"], len(turns) - 1, system, config, layout)
    expected_answer(row, layout)
    return _continued(messages, len(messages) - 1, tools)


def read_problem(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Returns a question, its answer and any reasoning as a chat; raises RowError as `conversation`.

    `row` is a result of `layout.plain`. Replies in the row's `history` carry loss, too, so `Conversation.first` is the
    index of the chat's first reply with loss.
    """
    column, system, tools = layout.columns["question"], _system(row, layout, config), _tools(row, layout)
    question, reasoning, answer = problem(row, layout, config).values()
    earlier = history(row, layout)
    turns = [*earlier, {"role": "user", "content": question}, _reply(row, layout, config, tools, reasoning, answer)]
    messages = read_messages(turns, column, 1, system, config, layout)
    if not earlier:
        return Conversation(messages, len(messages) - 1, tools)
    return Conversation(messages, next(i for i, message in enumerate(messages) if learns(message)), tools)


def _reply(
    row: Mapping[str, Any], layout: Layout, config: DataConfig, tools: list[Any] | None, reasoning: str, answer: str
) -> dict[str, Any]:
    """Returns the message of a reply: its reasoning, if not empty, and `answer`; raises RowError as `_calls`.

    If the row's column of answers holds calls of its `tools`, they replace `answer` as tool calls.
    """
    called = _calls(row, layout.columns["answer"], tools)
    if called:
        thought = {"reasoning_content": reasoning} if reasoning else {}
        return {"role": "assistant", "content": None, "tool_calls": called} | thought
    return {"role": "assistant", "content": reply(reasoning, answer, config) if reasoning else answer}


def _calls(row: Mapping[str, Any], column: str, tools: list[Any] | None) -> list[dict[str, Any]]:
    """Returns the calls of a cell, empty without tools or calls; raises RowError for a function not in `tools`."""
    names = {tool["function"]["name"] for tool in tools or ()}
    if not names or not are_calls(row[column]):
        return []
    calls = read_calls(row[column], f"column {column!r}")
    if unknown := {call["function"]["name"] for call in calls} - names:
        raise RowError(f"its reply calls {', '.join(sorted(unknown))}, and its tools are {', '.join(sorted(names))}")
    return calls


def read_completion(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Returns the prompt and the completion of a row (result of `layout.plain`): two joined plain texts, or a chat.

    A prompt of messages may have a completion of text, which becomes a reply, or of messages. A reply at its end is the
    field `begun`, which a completion of text continues. Raises RowError as `conversation`, for a prompt of text with a
    completion of messages, and for plain text with a system turn or tools.
    """
    columns = layout.columns
    prompt, completion = (_turns(row, columns[role], layout) for role in ("prompt", "completion"))
    if isinstance(prompt, list) and prompt and all(isinstance(turn, Mapping) for turn in prompt):
        if not is_turns(completion):
            completion = [{"role": "assistant", "content": _cell(row, columns["completion"])}]
        system = _system(row, layout, config)
        messages = read_messages(prompt + completion, columns["completion"], len(prompt), system, config, layout)
        return _continued(messages, len(messages) - len(completion), _tools(row, layout))
    if is_turns(completion):
        raise RowError("prompt and completion must both be text or both be lists of messages")
    for role in ("system", "tools"):
        if is_filled(row.get(columns.get(role, ""))):
            name = columns[role]
            raise RowError(
                f"column {name!r} needs a chat, and prompt and completion are plain text: set data.columns={{question: "
                f"{columns['prompt']}, answer: {columns['completion']}}} to train on chats, or {{{name}: ''}}"
            )
    asked = _cell(row, columns["prompt"])
    return Conversation(asked + _cell(row, columns["completion"]), len(asked))


def is_turns(value: Any) -> TypeGuard[list[Any]]:
    """Whether a value is a list with at least one message, an object with a role."""
    return isinstance(value, list) and any(
        isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in value
    )


def _turns(row: Mapping[str, Any], column: str, layout: Layout) -> Any:
    """Returns the list of messages of a cell, also for a single message; returns other cells unchanged."""
    value = parsed(row.get(column), column) if column in layout.chats else row.get(column)
    is_one = isinstance(value, Mapping) and is_turns([value]) and bool({"content", "value", "tool_calls"} & {*value})
    return [value] if is_one else value


def history(row: Mapping[str, Any], layout: Layout) -> list[dict[str, Any]]:
    """Returns the turns before the question, from the cell of the role `history`; [] if it is empty or missing.

    The cell, or its JSON text, holds messages, which are returned as they are, or pairs [question, reply], which become
    messages. Raises RowError for other values.
    """
    column = layout.columns.get("history", "")
    value = row.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value, column)
    if not is_filled(value):
        return []
    if is_turns(value):
        return list(value)
    turns: list[dict[str, Any]] = []
    for pair in value if isinstance(value, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(
                f"column {column!r} holds neither messages nor pairs of a question and its reply: {str(value)[:60]}; "
                f"set data.columns={{{column}: ''}} to leave it out"
            )
        for role, said in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": text_of(said, f"column {column!r}")})
    return turns


def _continued(messages: list[dict[str, Any]], first: int, tools: list[Any] | None) -> Conversation:
    """Makes a conversation; `first` is the index of the first message after the prompt.

    If the prompt ends in a reply, the next reply is joined to it; RowError unless both are text and end the chat.
    """
    words, reply = messages[first - 1 : first + 1] if first else ({"role": ""}, messages[0])
    if words["role"] != "assistant" or reply["role"] != "assistant":
        return Conversation(messages, first, tools)
    said, rest = words.get("content"), reply.get("content")
    if not isinstance(said, str) or not isinstance(rest, str) or len(messages) > first + 1 or words.get("tool_calls"):
        raise RowError("the prompt ends in a reply, which only a single message of text can continue")
    whole = [*messages[: first - 1], {**reply, "content": said + rest}]
    return Conversation(whole, first - 1, tools, begun=said)


def problem(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> dict[str, str]:
    """Returns the texts "question", "reasoning" (empty if the row has none) and "answer" of a row.

    `row` is a result of `layout.plain`, which decodes cells and adds the fields of dotted columns. The question
    includes its context and its options. An answer that is the number of an option becomes its label.

    Raises:
        RowError: a cell is empty, or is not text, a number, an object or a list. The answer is a number or a letter
            that fits no option, or is both the text of an option and the number of an option. Reasoning is both in its
            column and in tags of the answer, or nothing follows the reasoning in the answer.
    """
    columns = layout.columns
    question = question_of(row, layout)
    options = options_of(row.get(columns["options"]), columns["options"]) if "options" in columns else {}
    if options:
        question += "\n\n" + "\n".join(f"{label}) {text}" for label, text in options.items())
    reasoning, answer = _solved(row, layout, config, options)
    return {"question": question, "reasoning": reasoning, "answer": answer}


def question_of(row: Mapping[str, Any], layout: Layout) -> str:
    """Returns the question of a row, with its context if it has any; raises RowError as `content_text`.

    `row` is a result of `layout.plain`. The text begins with the context, or with the question if the question's column
    is named "instruction".
    """
    columns = layout.columns
    question = _cell(row, columns["question"])
    if not is_filled(row.get(columns.get("context", ""))):
        return question
    context = _cell(row, columns["context"])
    # A passage comes before the question about it; an instruction comes before its input.
    first = columns["question"].strip().lower() == "instruction"
    return f"{question}\n\n{context}" if first else f"{context}\n\n{question}"


def expected_answer(row: Mapping[str, Any], layout: Layout) -> Any:
    """Returns the expected answer of a row (result of `layout.plain`): a text, or a list of alternative texts.

    Numbers become texts; an empty cell, true and false are returned unchanged. None without a column "answer".

    Raises:
        RowError: the cell holds an object, NaN, an infinite number, or a list of other values than texts and numbers.
    """
    column = layout.columns.get("answer", "")
    value = row.get(column)
    if isinstance(value, Mapping):
        raise RowError(
            f"column {column!r} holds an object, not an answer: {str(value)[:60]}; name its field, as in "
            f"data.columns={{answer: {column}.{next(iter(value), 'FIELD')}}}"
        )
    if isinstance(value, list):
        if is_filled(value) and not alternatives(value):
            raise RowError(f"column {column!r} holds a list of other values than texts and numbers: {str(value)[:60]}")
        return alternatives(value)
    return text_of(value, column) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _solved(row: Mapping[str, Any], layout: Layout, config: DataConfig, options: Mapping[str, str]) -> tuple[str, str]:
    """Returns reasoning, or "", and answer, from columns or `split_solution`; RowError if both hold reasoning.

    `options` has the texts by label. Raises RowError also as `_chosen`.
    """
    columns = layout.columns
    answer = with_own_tags(
        _chosen(_cell(row, columns["answer"]), options, columns["answer"], layout.first_option), config
    )
    reasoning = thought_of_column(row.get(columns["reasoning"]), columns["reasoning"]) if "reasoning" in columns else ""
    if not reasoning:
        boxed = columns["answer"].strip().lower() in SOLUTIONS
        try:
            return split_solution(answer, config, boxed=boxed, closings=layout.closings)
        except ValueError as error:
            raise RowError(f"column {columns['answer']!r} has {error}") from error
    reasoning = with_own_tags(reasoning, config)
    if answer_of(answer, config) != answer:
        raise RowError(
            f"columns {columns['answer']!r} (in tags) and {columns['reasoning']!r} both hold reasoning; set "
            "data.columns={reasoning: ''} to use the tags"
        )
    return reasoning_of(reasoning, config) or reasoning, answer


def _chosen(answer: str, options: Mapping[str, str], column: str, first: int) -> str:
    """Returns the answer, or the label of its option if it is the number of an option, counted from `first`.

    `options` has the texts by label; `column` is for errors. Raises RowError for a number that is neither an option nor
    a number of an option, or both; and for a letter that is no label.
    """
    said = answer.strip()
    if not options or said in options:
        return answer
    if not said.isdecimal():
        is_label = re.fullmatch("[A-Z]|-[0-9]+", said) and all(len(label) == 1 for label in options)
        if is_label and said not in options.values() and said.casefold() not in map(str.casefold, options):
            raise RowError(f"column {column!r} holds {said}, which is not among the options {', '.join(options)}")
        return answer
    number, labels = int(answer) - first, list(options)
    is_number = 0 <= number < len(labels)
    if (answer.strip() in options.values()) != is_number:
        return labels[number] if is_number else answer
    raise RowError(f"column {column!r} holds {answer}, which may be an option or the number of an option")


def final_answer(talk: Conversation, config: DataConfig) -> str:
    """Returns the last reply (also `NO_REPLY`) or completion, without reasoning in tags, stripped.

    A reply includes its start `begun`, except before `NO_REPLY`. Empty for text without a prompt, and for a reply that
    only calls tools.
    """
    if isinstance(talk.messages, str):
        said = talk.messages[talk.first :] if talk.first else ""
    else:
        said = next(turn.get("content") or "" for turn in reversed(talk.messages) if turn["role"] == "assistant")
        said = NO_REPLY if talk.begun and said == talk.begun + NO_REPLY else said
    return answer_of(str(said), config).strip()


def _system(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> str | None:
    """Returns the text of a row's column for the system turn, None if empty or missing; RowError as `content_text`."""
    column = layout.columns.get("system", "")
    value = row.get(column)
    if not is_filled(value):
        return None
    return with_own_tags(content_text(value, f"column {column!r}"), config, is_reply=False)


def _tools(row: Mapping[str, Any], layout: Layout) -> list[Any] | None:
    """Returns the tools of a row as `read_tools`; None if it has none."""
    column = layout.columns.get("tools")
    return read_tools(row.get(column), column) if column else None


def _last_turn(
    turns: list[Any], row: Mapping[str, Any], layout: Layout, config: DataConfig, tools: list[Any] | None
) -> list[dict[str, Any]]:
    """Returns the messages of a chat's last reply from other columns; [] if `turns` end in that reply.

    Also [] if `turns` end in a reply and the column is empty. Raises RowError if they end in another reply, or as
    `_solved` and `_reply`.
    """
    columns = layout.columns
    given = _turns(row, columns["answer"], layout)
    is_answered = bool(turns) and isinstance(turns[-1], Mapping) and role_of(turns[-1]) == "assistant"
    if is_answered and not is_filled(row.get(columns["answer"])):
        return []
    if is_answered:
        said = turns[-1].get("content", turns[-1].get("value"))
        if said == row[columns["answer"]] or (is_turns(given) and turns[-len(given) :] == given):
            return []
        raise RowError(f"column {columns['messages']!r} ends in a reply, and {columns['answer']!r} holds another reply")
    if is_turns(given):
        if is_filled(row.get(columns.get("reasoning", ""))):
            raise RowError(
                f"column {columns['answer']!r} holds messages, and column {columns['reasoning']!r} their reasoning; "
                "move it into the messages as reasoning_content, or set data.columns={reasoning: ''} to leave it out"
            )
        return given
    reasoning, answer = _solved(row, layout, config, {})
    return [_reply(row, layout, config, tools, reasoning, answer)]


def _text(row: Mapping[str, Any], column: str) -> str:
    """Returns the cell of plain text; a number becomes text. Raises RowError for other values and empty cells."""
    value = row.get(column)
    if isinstance(value, Mapping | list):
        raise RowError(f"column {column!r} holds a {type(value).__name__}, text is needed: {str(value)[:60]}")
    return text_of(value, f"column {column!r}")


def _cell(row: Mapping[str, Any], column: str) -> str:
    """Returns a cell of a question, a context, an answer, a prompt or a completion as text, or raises RowError."""
    return content_text(row.get(column), f"column {column!r}")
