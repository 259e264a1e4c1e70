"""Reasoning in chats reaches the tokens that carry loss, whatever the chat template does with it, and is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_chat_encoding import TRL, TRL_TEMPLATES
from tests.support.given_rows import examples_of, prepare_rows
from tests.support.tiny_tokenizer import CHATML, tiny_tokenizer
from tpu_kit.config.loader import DataConfig
from tpu_kit.data.chat.chat_encoding import Encoder, ReasoningCounts, decoded_example
from tpu_kit.data.prepare import Prepared
from tpu_kit.data.rows.columns import answer_of, detect_layout, last_boxed, reasoning_of, split_solution, with_own_tags
from tpu_kit.data.rows.field_values import RowError

# As in Qwen3, only turns after the last question keep reasoning, from its key or from the content.
QWEN3 = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set said = m.content or '' %}{% set thought = '' %}
{%- if m.role == 'assistant' %}
  {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
  {%- elif '</think>' in said %}
    {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
    {%- set said = said.split('</think>')[-1].lstrip('\n') %}
  {%- endif %}
  {%- if loop.index0 > ns.last and (loop.last or thought) %}
    {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
  {%- endif %}
{%- endif %}
{{- said }}{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# As in DeepSeek-R1, finished turns lose their reasoning, and the prompt opens the next block.
R1 = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{{ (m.content or '').split('</think>')[-1] }}
  {%- for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
# Reasoning is taken from its key alone, and cut out of the content.
KEY = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% endif %}
{{- (m.content or '').split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKED = CHATML.replace(
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}",
)
TEMPLATES = {"ignores": CHATML, "marked": MARKED, "qwen3": QWEN3, "r1": R1, "key": KEY}
WORDS = ("Two and three.", "It is one more.", "Nothing to add.")


def chat(turns: int, where: str) -> list[dict[str, Any]]:
    """A chat with `questions` questions; the reasoning of each reply is in its content or under its own key."""
    messages: list[dict[str, Any]] = []
    for i in range(turns):
        reply = {"content": f"<think>\n{WORDS[i]}\n</think>\n\nAnswer {i}."} if where == "content" else {
            "content": f"Answer {i}.", where: WORDS[i]
        }  # fmt: skip
        messages += [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", **reply}]
    return messages


def encoder(template: str, row: dict[str, Any], **settings: Any) -> Encoder:
    config = DataConfig(**settings)
    return Encoder(tiny_tokenizer(template), config, detect_layout(list(row), config))


def documents(template: str, row: dict[str, Any], **settings: Any) -> list[tuple[str, list[str]]]:
    """The text before the first token with loss of each document, and the stretches with loss."""
    made, found = encoder(template, row, **settings), []
    for example in examples_of(made, row):
        spans = decoded_example(made.tokenizer, example)
        assert not spans[0][1]
        found.append((spans[0][0], [text for text, loss in spans if loss]))
    return found


@pytest.mark.parametrize("where", ["content", "reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_reasoning_of_a_reply_carries_loss(template: str, where: str) -> None:
    ((prompt, (learnt,)),) = documents(TEMPLATES[template], {"messages": chat(1, where)})
    whole = (prompt.partition("assistant")[2] + learnt).split()
    assert " ".join(whole) == "<think> Two and three. </think> Answer 0.<|im_end|>"
    assert "Two and three." in learnt and learnt.endswith("Answer 0.<|im_end|>")


@pytest.mark.parametrize("where", ["content", "reasoning_content"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_reply_of_a_chat_is_trained_with_its_reasoning_after_the_prompt_of_inference(
    template: str, where: str
) -> None:
    row = {"messages": chat(3, where)}
    made = encoder(TEMPLATES[template], row)
    learnt: list[str] = []
    for example in examples_of(made, row):
        given = ""
        for text, loss in decoded_example(made.tokenizer, example):
            if loss:
                before = row["messages"][: 2 * len(learnt) + 1]
                prompt = made.tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
                assert given == prompt
                learnt.append(text)
            given += text
    assert len(learnt) == 3
    for i, text in enumerate(learnt):
        assert WORDS[i] in text and text.endswith(f"Answer {i}.<|im_end|>") and text.count("Answer") == 1


@pytest.mark.parametrize("where", ["content", "reasoning_content"])
@pytest.mark.parametrize("name", TRL_TEMPLATES)
def test_templates_of_released_models(name: str, where: str) -> None:
    special = TRL_TEMPLATES[name]
    tokenizer = tiny_tokenizer((TRL / f"{name}.jinja").read_text(), special=special, eos=special[0])
    tokenizer.bos_token = special[-1]
    row = {"messages": chat(2, where)}
    made = replace(encoder(CHATML, row), tokenizer=tokenizer)
    examples = examples_of(made, row)
    kept = map(made.count_reasoning, made.documents(made.conversation(row)), examples)
    assert ReasoningCounts(*map(sum, zip(*kept, strict=True))) == ReasoningCounts(replies=2, held=2, trained=2, empty=0)
    learnt = [text for example in examples for text, loss in decoded_example(tokenizer, example) if loss]
    assert len(learnt) == 2 and all(WORDS[i] in text and f"Answer {i}." in text for i, text in enumerate(learnt))


# Templates whose prompt opens the reasoning block; replies without reasoning have no block, or an empty one.
OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
BLOCK = CHATML.partition("{% if add")[0].replace(
    "+ m['content']", "+ (BLOCK if m['role'] == 'assistant' else '') + m['content']"
)
WITHOUT = {
    "r1": R1,
    "last": BLOCK.replace("BLOCK if", "'<think>\n\n</think>\n\n' if loop.last and") + OPENS,  # as Qwen3-Thinking
    "short": BLOCK.replace("BLOCK", "'<think></think>'") + OPENS,  # as Nemotron 3
    "unclosed": BLOCK.replace("BLOCK", "'<think>\n'") + OPENS,
    "closed": BLOCK.replace("BLOCK if", "'<think>\n\n</think>\n\n' if loop.last and")
    + OPENS.replace("<think>\n'", "<think>\n\n</think>\n\n'"),  # as small Qwen3.5
}


@pytest.mark.parametrize("template", WITHOUT)
def test_a_reply_without_reasoning_is_trained_after_the_prompt_of_inference(template: str) -> None:
    row = {"messages": [m if m["role"] == "user" else {**m, "content": m["content"][-9:]} for m in chat(3, "content")]}
    found = documents(WITHOUT[template], row)
    tokenizer = tiny_tokenizer(WITHOUT[template])
    assert len(found) == 3
    for i, (prompt, (learnt,)) in enumerate(found):
        before = row["messages"][: 2 * i + 1]
        assert prompt == tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
        assert "".join(learnt.split()) == ("" if template == "closed" else "</think>") + f"Answer{i}.<|im_end|>"


def test_a_tool_call_without_reasoning_is_trained_after_the_prompt_of_inference() -> None:
    messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in calls("reasoning_content")]
    ((prompt, learnt), _) = documents(R1, {"messages": messages})
    assert prompt.endswith("assistant\n<think>\n")
    assert learnt == ['\n</think>\n<call>{"name": "add", "arguments": {"a": 2}}</call><|im_end|>']
    elsewhere = "{{ messages | length }}" + R1
    assert documents(elsewhere, {"messages": messages})[0] == ("1" + prompt, learnt)
    with pytest.raises(
        RowError, match="renders message 1, which calls tools, after another prompt than at inference: "
    ):
        documents(elsewhere.replace("'<|im_start|>assistant", "'<assistant>"), {"messages": messages})


def test_a_chat_is_one_document_where_the_template_keeps_all() -> None:
    assert len(documents(CHATML, {"messages": chat(3, "content")})) == 1
    assert len(documents(KEY, {"messages": chat(3, "reasoning_content")})) == 1
    assert len(documents(QWEN3, {"messages": chat(3, "content")})) == 3
    plain = [{**m, "content": m["content"].rpartition("\n")[2]} for m in chat(3, "content")]
    assert len(documents(QWEN3, {"messages": plain})) == 3  # the last reply has an empty block
    assert len(documents(QWEN3.replace("(loop.last or thought)", "thought"), {"messages": plain})) == 1
    long = [*calls("reasoning_content"), *chat(3, "content")[2:]]
    assert [len(texts) for _, texts in documents(QWEN3, {"messages": long})] == [2, 1, 1]


def test_the_same_words_in_two_turns_are_not_taken_for_kept() -> None:
    row = {"messages": [{**m, "content": m["content"].replace(WORDS[1], WORDS[0])} for m in chat(2, "content")]}
    assert [text.count(WORDS[0]) for _, texts in documents(QWEN3, row) for text in texts] == [1, 1]
    short = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "<think>5</think>5"}]
    assert documents(R1, {"messages": short})[0][1] == ["5</think>5<|im_end|>"]
    assert documents(KEY, {"messages": short})[0][1] == ["<think>\n5\n</think>\n5<|im_end|>"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_question_after_the_last_reply_takes_no_reasoning_away(template: str) -> None:
    row = {"messages": [*chat(1, "content"), {"role": "user", "content": "And?"}]}
    ((_, (learnt,)),) = documents(TEMPLATES[template], row)
    assert WORDS[0] in learnt and learnt.endswith("Answer 0.<|im_end|>")


def calls(where: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    thought = {"content": "", "reasoning_content": "Use the tool."} if where != "content" else {
        "content": "<think>\nUse the tool.\n</think>\n"
    }  # fmt: skip
    tail = chat(1, where)[1]
    return [
        chat(1, where)[0],
        {"role": "assistant", **thought, "tool_calls": [call]},
        {"role": "tool", "content": "five"},
        tail,
    ]


def test_the_reasoning_before_a_tool_call() -> None:
    for template in (QWEN3, KEY):
        (first, second) = [
            text for _, texts in documents(template, {"messages": calls("reasoning_content")}) for text in texts
        ]
        assert "Use the tool." in first and "<call>" in first and WORDS[0] in second
    found = [text for _, texts in documents(KEY, {"messages": calls("content")}) for text in texts]
    assert "Use the tool." in found[0] and "<call>" in found[0] and WORDS[0] in found[1]
    (called, answered) = documents(R1, {"messages": calls("reasoning_content")})
    call = '<call>{"name": "add", "arguments": {"a": 2}}</call><|im_end|>'
    assert called[0].endswith("<think>\n") and called[1] == ["Use the tool.\n</think>\n" + call]
    assert answered[0].endswith(f"assistant\n{call}<|im_start|>tool\nfive<|im_end|><|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("Close it with `</think>`.", "", "Close it with `</think>`."),
        ("Write </think> after it.", "", "Write </think> after it."),
        ("Format:\n<think>\nwhy\n</think>\nwhat", "", "Format:\n<think>\nwhy\n</think>\nwhat"),
        ("<think>\nUse `</think>`.\n</think>\nA </think> ends it.", "Use `</think>`.", "A </think> ends it."),
        ("<think> r </think> a", "r", "a"),
        ("So five.</think>5", "So five.", "5"),
    ],
)
def test_a_reply_that_mentions_a_tag_keeps_its_words(text: str, reasoning: str, answer: str) -> None:
    assert (reasoning_of(text, DataConfig()), answer_of(text, DataConfig()).strip()) == (reasoning, answer)
    assert split_solution(text, DataConfig(), boxed=False) == (reasoning, answer)
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}
    assert documents(CHATML, row)[0][1] == [f"{text}<|im_end|>"]
    ((prompt, (learnt,)),) = documents(R1, row)
    assert prompt.endswith("<think>\n")
    assert "".join(learnt.split()) == "".join(f"{reasoning}</think>{answer}<|im_end|>".split())


def test_tags_of_a_data_set_become_those_of_the_model() -> None:
    text = "<|begin_of_thought|>\n\nr\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\na\n\n<|end_of_solution|>"
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}
    assert documents(CHATML, row)[0][1] == ["<think>\nr\n</think>\na<|im_end|>"]
    custom = {"think_open": "[THINK]", "think_close": "[/THINK]"}
    assert documents(CHATML, {"messages": chat(1, "content")}, **custom)[0][1] == [
        f"[THINK]\n{WORDS[0]}\n[/THINK]\nAnswer 0.<|im_end|>"
    ]
    gemma = "<|channel>thought\nr\n<channel|>a"
    row["messages"][1] = {"role": "assistant", "content": gemma}
    assert documents(CHATML, row)[0][1] == ["<think>\nr\n</think>\na<|im_end|>"]
    own = DataConfig(think_open="<|begin_of_thought|>", think_close="<|end_of_thought|>")
    assert with_own_tags(text, own) == text and reasoning_of(text, own) == "r"


def test_what_is_kept_is_counted_in_the_tokens() -> None:
    row = {"messages": [*chat(1, "content"), *chat(2, "reasoning_content")[2:], *chat(1, "content")[:1],
                        {"role": "assistant", "content": "Five."}]}  # fmt: skip
    made = encoder(KEY.replace(".split('</think>')[-1]", ""), row)
    (part,) = made.documents(made.conversation(row))
    example = made.encode(part)
    assert made.count_reasoning(part, example) == ReasoningCounts(replies=3, held=2, trained=2, empty=0)
    end = made.tokenizer.decode(example.input_ids).index("one more")
    cut = len(made.tokenizer(made.tokenizer.decode(example.input_ids)[:end])["input_ids"])
    assert made.count_reasoning(part, type(example)(*(list(x)[:cut] for x in example))) == ReasoningCounts(3, 2, 1, 0)
    unlearnt = type(example)(example.input_ids, [False] * len(example.input_ids))
    assert made.count_reasoning(part, unlearnt) == ReasoningCounts(3, 2, 0, 0)


def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], **settings: Any) -> Prepared:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    template = settings.pop("template", QWEN3)
    config = DataConfig(**({"max_length": 256, "eval_rows": 0} | settings))
    return prepare_rows(config, tiny_tokenizer(template), rows)


def rows_of(count: int, turns: int = 2) -> list[dict[str, Any]]:
    made = [chat(turns, "content") for _ in range(count)]
    for i, messages in enumerate(made):
        messages[0]["content"] = f"What is {i}?"
    return [{"messages": messages} for messages in made]


def test_the_report_counts_replies_with_reasoning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*rows_of(5), {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    report = ready(tmp_path, monkeypatch, rows).report
    assert report.reasoning == ReasoningCounts(replies=11, held=10, trained=10, empty=1) and (
        report.rows_used,
        report.documents,
    ) == (6, 11)
    text = str(report)
    assert "\nwith reasoning   10 of 11 replies; 1 of the others with an empty reasoning block\n" in text
    assert "6 read, 6 used as 11 documents: the chat template renders earlier turns differently, so every reply" in text
    cut = ready(tmp_path, monkeypatch, rows, max_length=40, packing=False).report
    assert cut.truncated and cut.reasoning.trained < cut.reasoning.held
    lost = cut.reasoning.held - cut.reasoning.trained
    warning = f"; WARNING: the rows hold reasoning for {cut.reasoning.held}, and {lost} lose some of it: raise data."
    assert f"{warning}max_length" in str(cut)
    plain = ready(tmp_path, monkeypatch, [{"text": "one two"}, {"text": "three"}]).report
    assert "\nwith reasoning   0 of 2 replies\n" in str(plain)


# As in DeepSeek V3.1 and small Qwen3.5, the prompt closes the reasoning unless a switch is set.
SWITCHED = """
{%- if thinking is not defined %}{% set thinking = false %}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{{ '</think>' + m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>' if thinking else '</think>') }}
{%- endif %}"""


def test_a_prompt_that_closes_the_reasoning_opens_it_for_rows_with_reasoning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="and the rows have reasoning: its switches enable_thinking and"):
        made = ready(tmp_path, monkeypatch, rows_of(4), template=SWITCHED, eval_rows=1)
    assert made.encoder is not None and made.eval_prompts[0].endswith("assistant\n<think>")
    spans = decoded_example(made.encoder.tokenizer, made.example())
    assert spans[-2][0].endswith("assistant\n<think>") and "</think>" not in spans[-2][0].rpartition("assistant")[2]
    assert spans[-1][0].split("\n</think>\n\nAnswer ")[0] in WORDS
    plain = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    made = ready(tmp_path, monkeypatch, plain, template=SWITCHED)
    assert made.encoder is not None and made.encoder.tokenizer.chat_template == SWITCHED
    fixed = SWITCHED.replace("thinking else", "false else")
    with pytest.raises(ValueError, match="ends in '</think>', so the reasoning of message 1 cannot follow it"):
        ready(tmp_path, monkeypatch, rows_of(4), template=fixed)


def test_a_split_chat_is_held_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ready(tmp_path, monkeypatch, [*rows_of(12), *rows_of(3)], eval_rows=4)
    assert made.eval is not None and made.eval_report is not None
    held = {row["messages"][0]["content"] for row in made.eval_rows}
    assert len(made.eval_rows) == len(made.eval_prompts) == len(held) == 4 and made.eval_report.documents == 8
    trained = {
        rows["messages"][0]["content"] for i in made.train.documents.source_rows for rows in [rows_of(15)[i % 12]]
    }
    assert not held & trained
    assert made.report.held_out + made.report.rows_used == 15 and made.report.rows_read == 15
    for prompt in made.eval_prompts:
        assert "<think>" not in prompt and prompt.endswith("<|im_start|>assistant\n")


def test_solutions_and_boxes() -> None:
    config = DataConfig()
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}" and last_boxed(r"\boxed{1") is None
    stated = "So.\nThe answer is: 5"
    assert split_solution(stated, config, boxed=False, closings=["The answer is:"]) == ("So.", "5")
    assert split_solution(stated, config, boxed=False) == ("", stated)
    assert split_solution(r"It is \boxed{5}.", config, boxed=False) == ("", r"It is \boxed{5}.")
    assert split_solution("<think>r</think> a ", config, boxed=False) == ("r", "a")
    assert split_solution("r ####", config, boxed=True, closings=["####"]) == ("", "r ####")
    for text, words in (("<think>r</think>\n", "nothing after </think>"), ("r\n####", "nothing after ####")):
        with pytest.raises(ValueError, match=words):
            split_solution(text, config, boxed=True, closings=["####"])
