"""Only the reply and its end-of-turn token carry loss: the loss mask is decoded and compared."""

from __future__ import annotations

import importlib.util
import json
import pickle
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.support.given_rows import examples_of
from tests.support.tiny_tokenizer import CHATML, tiny_tokenizer
from tpu_kit.assets.embedded import model_dir
from tpu_kit.config.loader import DataConfig
from tpu_kit.data.chat.chat_encoding import Encoder, Example, decoded_example
from tpu_kit.data.chat.chat_template import ensure_chat_template, freeze_date, plain_prompt
from tpu_kit.data.prepare import prepare
from tpu_kit.data.rows.columns import detect_layout
from tpu_kit.data.rows.field_values import RowError
from tpu_kit.data.rows.sources import save_rows

COT = {"question": "What is 2 + 3?", "reasoning": "Two and three\nmake five.", "answer": "5"}
REPLY = "<think>\nTwo and three\nmake five.\n</think>\n5"
CHAT = {
    "messages": [
        {"role": "user", "content": "What is 2?"},
        {"role": "assistant", "content": "A number."},
        {"role": "user", "content": "And 3?"},
        {"role": "assistant", "content": "Another one."},
    ]
}
MARKED = CHATML.replace(
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}",
)
TRL = Path(next(iter(importlib.util.find_spec("trl").submodule_search_locations))) / "chat_templates"
TRL_TEMPLATES = {
    "llama3": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
    "qwen2_5": ("<|im_end|>", "<|im_start|>"),
    "qwen3": ("<|im_end|>", "<|im_start|>"),
    "qwen3_training": ("<|im_end|>", "<|im_start|>"),
    "gemma": ("<end_of_turn>", "<start_of_turn>", "<bos>"),
    "phi3": ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"),
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>", "<｜Assistant｜>", "<｜User｜>", "<｜begin▁of▁sentence｜>"),  # noqa: RUF001  the bars are the model's own
    "deepseekv3_training": ("<｜end▁of▁sentence｜>", "<｜Assistant｜>", "<｜User｜>", "<｜begin▁of▁sentence｜>"),  # noqa: RUF001  the bars are the model's own
    "cohere2": ("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
}


def encode(row: dict[str, Any], tokenizer: Any = None, **settings: Any) -> tuple[Any, list[Example]]:
    tokenizer = tokenizer or tiny_tokenizer()
    config = DataConfig(**settings)
    return tokenizer, examples_of(Encoder(tokenizer, config, detect_layout(list(row), config)), row)


def all_spans(row: dict[str, Any], tokenizer: Any = None, **settings: Any) -> list[list[tuple[str, bool]]]:
    tokenizer, examples = encode(row, tokenizer, **settings)
    return [decoded_example(tokenizer, example) for example in examples]


def spans(row: dict[str, Any], tokenizer: Any = None, **settings: Any) -> list[tuple[str, bool]]:
    (found,) = all_spans(row, tokenizer, **settings)
    return found


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("trim", [False, True])
def test_chain_of_thought(template: str, trim: bool) -> None:
    assert spans(COT, tiny_tokenizer(template, trim_offsets=trim)) == [
        ("<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n", False),
        (REPLY + "<|im_end|>", True),
        ("\n", False),
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_assistant_turn_of_a_chat(template: str) -> None:
    found = spans(CHAT, tiny_tokenizer(template))
    assert [text for text, loss in found if loss] == ["A number.<|im_end|>", "Another one.<|im_end|>"]
    assert "".join(text for text, _ in found) == tiny_tokenizer().apply_chat_template(CHAT["messages"], tokenize=False)


def test_loss_on_all_leaves_out_the_first_token_alone() -> None:
    _, (example,) = encode(COT, loss_on="all")
    assert example.loss_mask == [False] + [True] * (len(example.input_ids) - 1)


def test_system_prompt_comes_first_unless_there_is_one() -> None:
    assert spans(COT, system_prompt="Think.")[0][0].startswith("<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user")
    own = {"messages": [{"role": "system", "content": "Mine."}, *CHAT["messages"]]}
    assert "Think." not in spans(own, system_prompt="Think.")[0][0]


def test_messages_as_prompt_and_completion() -> None:
    row = {"prompt": CHAT["messages"][:3], "completion": CHAT["messages"][3:]}
    for template in (CHATML, MARKED):
        found = spans(row, tiny_tokenizer(template))
        assert [text for text, loss in found if loss] == ["Another one.<|im_end|>"]


def test_plain_prompt_and_completion_get_an_eos_and_no_template() -> None:
    assert spans({"prompt": "2 + 3 =", "completion": " 5"}) == [("2 + 3 =", False), (" 5<|im_end|>", True)]


def test_a_token_across_the_end_of_the_prompt_is_cut_there() -> None:
    """ "answer" is one token; generation starts from the tokens of "ans" alone."""
    tokenizer = tiny_tokenizer()
    whole = tokenizer("The answer")["input_ids"]
    _, (example,) = encode({"prompt": "The ans", "completion": "wer"}, tokenizer)
    prompt = tokenizer("The ans")["input_ids"]
    assert len(whole) < len(example.input_ids) - 1
    assert example.input_ids[: len(prompt)] == prompt
    assert decoded_example(tokenizer, example) == [("The ans", False), ("wer<|im_end|>", True)]


def test_plain_text_carries_loss_everywhere_after_the_first_token() -> None:
    tokenizer, (example,) = encode(
        {"text": "What is 2?"}, tiny_tokenizer(special=("<s>", "</s>"), eos="</s>", bos="<s>")
    )
    assert tokenizer.decode(example.input_ids) == "<s>What is 2?</s>"
    assert example.loss_mask == [False] + [True] * (len(example.input_ids) - 1)


PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
EOS = "{% if not add_generation_prompt %}{{ '</s>' }}{% endif %}"
ENDS = {
    "markers": f"{{% for m in messages %}}{{% generation %}}{TURN}{{% endgeneration %}}{{% endfor %}}{PROMPT}",
    "eos after the chat": CHATML + EOS,
    "eos beside the end": CHATML.replace(" + '\n' }}{% endfor", " }}{% endfor") + EOS,  # as Phi-4-mini
    "two tokens": CHATML.replace("'<|im_end|>'", "'<|end|><|im_end|>'"),  # as Command-A
    "a prompt after every chat": CHATML.replace("if add", "if messages[-1].role == 'assistant' or add"),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_mask_ends_with_the_turn(name: str) -> None:
    special = ("<|im_start|>", "<|im_end|>", "<|end|>", "</s>")
    eos = "<|im_end|>" if name == "two tokens" else "</s>"
    found = spans(CHAT, tiny_tokenizer(ENDS[name], special=special, eos=eos))
    end = "<|end|><|im_end|>" if name == "two tokens" else "<|im_end|>"
    assert [text for text, loss in found if loss] == [f"A number.{end}", f"Another one.{end}"]


def test_a_bos_is_not_doubled() -> None:
    tokenizer = tiny_tokenizer(special=("<s>", "</s>"), eos="</s>", bos="<s>")
    for text in ("What is 2?", "<s>What is 2?"):
        assert decoded_example(tokenizer, encode({"text": text}, tokenizer)[1][0])[0] == ("<s>", False)
        row = {"prompt": text, "completion": " 5"}
        assert spans(row, tokenizer) == [("<s>What is 2?", False), (" 5</s>", True)]
        assert tokenizer.decode(plain_prompt(tokenizer, text)) == "<s>What is 2?"


def test_every_reply_learns_an_eos_where_the_template_has_no_end_of_turn() -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    (first, second) = all_spans(CHAT, tiny_tokenizer(template))
    assert first == [("user: What is 2?\nassistant: ", False), ("A number.\n<|im_end|>", True)]
    assert second[0][0].endswith("A number.\nuser: And 3?\nassistant: ")
    assert second[1:] == [("Another one.\n<|im_end|>", True)]


def test_tools_reach_the_template() -> None:
    template = "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}" + CHATML
    tools = [{"type": "function", "function": {"name": "add", "description": None}}]
    for value in (tools, '[{"type": "function", "function": {"name": "add"}}]'):
        found = spans(CHAT | {"tools": value}, tiny_tokenizer(template))
        assert found[0][0].startswith('<|im_start|>tools\n[{"type": "function", "function": {"name": "add"}}]')


CALLS = {
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}},
        ]},
        {"role": "tool", "content": "five"},
        {"role": "assistant", "content": "The answer is 5."},
    ],
}  # fmt: skip
OTHER_CALLS = {
    "tools": [{"type": "function", "function": {"name": "negate", "parameters": {"type": "object", "z": 1}}}],
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "negate", "arguments": {"z": 2}}},
    ]}],
}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_training", "glm4moe", "deepseekv3_training"])
def test_tool_calls_and_the_system_turn_are_kept(name: str) -> None:
    special = TRL_TEMPLATES[name]
    tokenizer = tiny_tokenizer((TRL / f"{name}.jinja").read_text(), special=special, eos=special[0])
    tokenizer.bos_token = special[-1]
    row = Dataset.from_list([CALLS, OTHER_CALLS])[0]  # where Arrow puts None for the keys of the other row
    assert row["messages"][2]["tool_calls"][0]["function"]["arguments"]["z"] is None
    if name == "deepseekv3_training":  # whose template leaves the definitions out
        del row["tools"]
    layout = replace(detect_layout(list(row), DataConfig()), filled=True)
    examples = examples_of(Encoder(tokenizer, DataConfig(), layout), row)
    found = [pair for example in examples for pair in decoded_example(tokenizer, example)]
    learnt = [text for text, loss in found if loss]
    assert len(learnt) == 2 and "add" in learnt[0] and "2" in learnt[0] and "The answer is 5." in learnt[1]
    given = "".join(text for text, loss in found if not loss)
    assert "Be brief." in given and "five" in given and "None" not in given + learnt[0] and "null" not in learnt[0]


def test_a_template_that_leaves_out_calls_or_turns_is_refused() -> None:
    """Phi-3's template has neither tools nor tool answers, and renders a call as an empty turn."""
    special = TRL_TEMPLATES["phi3"]
    tokenizer = tiny_tokenizer((TRL / "phi3.jinja").read_text(), special=special, eos=special[0])
    with pytest.raises(RowError, match="the chat template leaves out the content of message 3: 'five'"):
        encode(CALLS, tokenizer)
    with pytest.raises(RowError, match="the chat template leaves out the tool calls of message 1"):
        encode(OTHER_CALLS, tokenizer)
    silent = CHATML.replace("messages %}", "messages if m['role'] != 'system' %}")
    with pytest.raises(RowError, match=r"leaves out the content of message 0: 'Be brief.'"):
        encode({"messages": CALLS["messages"][:2] + CALLS["messages"][4:]}, tiny_tokenizer(silent))


CALLING = (
    "{{ '<tools>' + (tools | tojson) + '</tools>' if tools }}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + ARGUMENTS }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ARGUMENTS = {"json": "(c.function.arguments | tojson)", "text": "c.function.arguments"}
ARGUMENTS["printed"] = "(c.function.arguments | string)"


@pytest.mark.parametrize("form", ARGUMENTS)
@pytest.mark.parametrize("arguments", [{"a": 2, "unit": None}, '{"a": 2, "unit": null}'], ids=["decoded", "as text"])
def test_arguments_are_written_once_as_json(form: str, arguments: Any) -> None:
    """The row has them decoded or as JSON; the template writes JSON or takes it."""
    messages = [*CALLS["messages"][1:2], {"role": "assistant", "content": None, "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": arguments}},
    ]}]  # fmt: skip
    found = spans({"messages": messages}, tiny_tokenizer(CALLING.replace("ARGUMENTS", ARGUMENTS[form])))
    assert found[-1] == ('add{"a": 2, "unit": null}<|im_end|>', True)


def test_null_in_arguments_stays_unless_arrow_put_it(tmp_path: Path) -> None:
    def learnt(config: DataConfig) -> list[str]:
        made = prepare(config, tokenizer)
        texts = [decoded_example(tokenizer, made.example(i))[-1][0] for i in range(2)]
        for row in prepare(replace(config, eval_rows=1), tokenizer).eval_rows:
            assert decoded_example(tokenizer, examples_of(made.encoder, row)[0])[-1][0] in texts
        return texts

    tokenizer = tiny_tokenizer(CALLING.replace("ARGUMENTS", ARGUMENTS["json"]))
    rows = [
        {"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": arguments}},
        ]}]}
        for name, arguments in (("add", {"a": 2, "unit": None}), ("negate", {"z": 3}))
    ]  # fmt: skip
    config = DataConfig(eval_rows=0, shuffle=False, source=str(tmp_path / "rows.jsonl"))
    Path(config.source).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert learnt(config) == ['add{"a": 2, "unit": null}<|im_end|>', 'negate{"z": 3}<|im_end|>']
    in_memory = replace(config, source=save_rows(Dataset.from_list(rows), tmp_path))
    assert learnt(in_memory) == ['add{"a": 2}<|im_end|>', 'negate{"z": 3}<|im_end|>']


def test_a_template_that_leaves_out_the_definition_of_a_tool_is_refused() -> None:
    template = CALLING.replace("ARGUMENTS", ARGUMENTS["json"])
    assert "<tools>" in spans(CALLS, tiny_tokenizer(template))[0][0]
    words = r"leaves out the definition of the tool 'add': set tokenizer.chat_template .* or data.columns=\{tools: ''\}"
    with pytest.raises(RowError, match=words):
        encode(CALLS, tiny_tokenizer(template.replace("if tools", "if not messages")))
    assert spans(CALLS, tiny_tokenizer(template.replace("if tools", "if not messages")), columns={"tools": ""})


@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_replies_that_the_row_excludes_carry_no_loss(template: str, key: dict[str, Any]) -> None:
    messages = [{**CHAT["messages"][1], **key} if i == 1 else m for i, m in enumerate(CHAT["messages"] * 2)]
    found = spans({"messages": messages}, tiny_tokenizer(template))
    assert [text for text, loss in found if loss] == [
        f"{m}<|im_end|>" for m in ("Another one.", "A number.", "Another one.")
    ]
    last = [*messages[:7], {**messages[7], **key}]
    found = spans({"messages": last}, tiny_tokenizer(template))
    assert [text for text, loss in found if loss] == ["Another one.<|im_end|>", "A number.<|im_end|>"]


def test_sharegpt_function_calls() -> None:
    row = {"conversations": [
        {"from": "human", "value": "What is 2 + 3?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "It is 5."},
    ]}  # fmt: skip
    found = spans(row, tiny_tokenizer(CALLING.replace("ARGUMENTS", ARGUMENTS["json"])))
    assert [text for text, loss in found if loss] == ['add{"a": 2}<|im_end|>', "It is 5.<|im_end|>"]
    row["conversations"][1]["value"] = "add 2"
    with pytest.raises(
        RowError, match="message 1 of column 'conversations' does not hold a function call as JSON: 'add 2'"
    ):
        encode(row)


def test_sharegpt_conversations() -> None:
    row = {"conversations": [{"from": "human", "value": "What is 2?"}, {"from": "gpt", "value": "A number."}]}
    assert spans(row)[:2] == [
        ("<|im_start|>user\nWhat is 2?<|im_end|>\n<|im_start|>assistant\n", False),
        ("A number.<|im_end|>", True),
    ]


@pytest.mark.parametrize("name", TRL_TEMPLATES)
def test_templates_of_released_models(name: str) -> None:
    special = TRL_TEMPLATES[name]
    tokenizer = tiny_tokenizer((TRL / f"{name}.jinja").read_text(), special=special, eos=special[0])
    tokenizer.bos_token = special[-1]
    found = spans(COT, tokenizer)
    (learnt,) = (text for text, loss in found if loss)
    assert "Two and three\nmake five." in learnt and learnt.split("</think>")[1].strip().startswith("5")
    assert "What is 2" in found[0][0] and "What is 2" not in learnt
    if name != "glm4moe":  # whose turns end where the next begins
        assert learnt.rstrip().endswith(special[0]) and learnt.count(special[0]) == 1
    chat = [text for found in all_spans(CHAT, tokenizer) for text, loss in found if loss]
    assert len(chat) == 2 and "A number." in chat[0] and "Another one." in chat[1]
    assert all(text.count(special[0]) <= 1 for text in chat)


def test_replies_are_trained_apart_where_earlier_turns_end_otherwise() -> None:
    """gpt-oss ends the last turn with another token than earlier turns."""
    special = ("<|return|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>")
    tokenizer = tiny_tokenizer((TRL / "gptoss.jinja").read_text(), special=special, eos=special[0])
    (learnt,) = (text for text, loss in spans(COT, tokenizer) if loss)
    assert learnt.endswith(REPLY + "<|return|>")
    (first, second) = all_spans(CHAT, tokenizer)
    assert first[-1] == ("<|channel|>final<|message|>A number.<|return|>", True)
    assert second[-1] == ("<|channel|>final<|message|>Another one.<|return|>", True)
    assert "A number.<|end|>" in second[0][0]


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v5"])
def test_the_reasoning_of_gemma_4_has_its_own_tags(name: str) -> None:
    """Its template removes them from earlier turns, and in some versions from the content of the last turn."""
    tags = {"think_open": "<|channel>thought", "think_close": "<channel|>"}
    special = ("<turn|>", "<|turn>", "<|channel>", "<channel|>", "<|think|>", "<bos>")
    tokenizer = tiny_tokenizer((TRL / f"{name}.jinja").read_text(), special=special, eos=special[0])
    tokenizer.bos_token = special[-1]
    for row in (COT, {"question": COT["question"], "answer": REPLY}):
        found = spans(row, tokenizer, **tags)
        assert found[0] == ("<bos><|turn>user\nWhat is 2 + 3?<turn|>\n<|turn>model\n", False)
        thought, answer = found[1][0].split("<channel|>")
        assert thought == "<|channel>thought\nTwo and three\nmake five.\n" and answer.strip() == "5<turn|>"


def test_embedded_tokenizer() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    found = spans(COT | {"question": "Tom has 2 apples."}, tokenizer)
    assert [loss for _, loss in found] == [False, True]
    assert found[0][0] == "<|user|>Tom has 2 apples.<|end|><|assistant|>"
    assert found[1][0].startswith("<think>\n") and found[1][0].endswith("</think>\n5<|end|>")

    encode(COT | {"question": "Tom " * 3000}, tokenizer)  # it is truncated later, so "indexing errors" would mislead
    assert "sequence-length-is-longer-than-the-specified-maximum" not in tokenizer.deprecation_warnings


def test_thinking_template_is_written_after_its_own_prompt() -> None:
    """As in DeepSeek-R1, the prompt opens the reasoning, and finished turns lose their reasoning."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'].split('</think>')[-1] }}"
        "{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    found = spans(COT, tiny_tokenizer(template))
    assert found[0][0].endswith("<|im_start|>assistant\n<think>\n")
    assert found[1:] == [("Two and three\nmake five.\n</think>\n5<|im_end|>", True)]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_template_that_adds_an_empty_reasoning_does_not_spoil_the_real_one(template: str) -> None:
    template = template.replace("{{ m['content'] }}", "{{ '<think>\n\n</think>\n\n' + m['content'] }}")
    template = template.replace("+ m['content'] +", "+ '<think>\n\n</think>\n\n' + m['content'] +")
    template = template.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    found = spans(COT, tiny_tokenizer(template))
    assert found[0][0].endswith("<|im_start|>assistant\n<think>\n")
    assert found[1:] == [("Two and three\nmake five.\n</think>\n5<|im_end|>", True)]


def test_an_answer_without_reasoning_is_left_as_the_template_writes_it() -> None:
    """Qwen3 marks a reply without reasoning by an empty block."""
    tokenizer = tiny_tokenizer((TRL / "qwen3.jinja").read_text())
    assert spans({"question": "q", "answer": "5"}, tokenizer)[1] == ("<think>\n\n</think>\n\n5<|im_end|>", True)


def test_replies_are_trained_apart_where_the_template_rewrites_history() -> None:
    (first, second) = all_spans(CHAT, tiny_tokenizer("{{ messages | length }}" + CHATML))
    assert first[0][0].startswith("1<|im_start|>user") and first[1:] == [("A number.<|im_end|>", True)]
    assert second[0][0].startswith("3<|im_start|>user") and second[1:] == [("Another one.<|im_end|>", True)]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_template_that_leaves_words_out_is_refused(template: str) -> None:
    template = template.replace("m['content']", "m['content'] | replace('Another', '')")
    with pytest.raises(RowError, match=r"the chat template leaves out the content of message 3: 'Another one.'"):
        encode(CHAT, tiny_tokenizer(template))


def test_a_template_that_raises_is_quoted() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowError, match=r"the chat template refuses the conversation: .*roles must alternate"):
        encode(COT, tiny_tokenizer(template))


def test_a_tokenizer_without_template_gets_chatml_and_a_warning() -> None:
    tokenizer = tiny_tokenizer(None)
    with pytest.warns(UserWarning, match="no chat template; using ChatML with '<|im_end|>'"):
        assert ensure_chat_template(tokenizer)
    assert not ensure_chat_template(tokenizer)
    assert spans(COT, tokenizer) == spans(COT)
    other = tiny_tokenizer(None, special=("</s>",), eos="</s>")
    with pytest.warns(UserWarning, match="</s>"):
        ensure_chat_template(other)
    assert spans(COT, other)[1] == (REPLY + "</s>", True)


def test_the_default_template_begins_with_the_bos_of_the_tokenizer() -> None:
    """As texts of base models such as Gemma and Llama 3 do; the tokenizer of Qwen adds none."""
    tokenizer = tiny_tokenizer(None, special=("<s>", "</s>"), eos="</s>", bos="<s>")
    with pytest.warns(UserWarning, match="no chat template"):
        ensure_chat_template(tokenizer)
    assert spans(COT, tokenizer)[0][0].startswith("<s><|im_start|>user\n")
    text = tokenizer.apply_chat_template(CHAT["messages"][:1], tokenize=False, add_generation_prompt=True)
    assert text == "<s><|im_start|>user\nWhat is 2?</s>\n<|im_start|>assistant\n"


def test_tokenizers_that_cannot_be_used() -> None:
    layout = detect_layout(["text"], DataConfig())
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos token"):
        Encoder(tokenizer, DataConfig(), layout)
    bare = tiny_tokenizer(None)
    bare.eos_token, bare.chat_template = None, None
    bare.get_vocab = dict
    with pytest.raises(ValueError, match="neither a chat template nor an eos token"):
        ensure_chat_template(bare)


def test_generation_prompt_is_how_the_example_begins() -> None:
    tokenizer = tiny_tokenizer()
    config = DataConfig()
    for row in (COT, CHAT, {"prompt": "2 + 3 =", "completion": " 5"}):
        encoder = Encoder(tokenizer, config, detect_layout(list(row), config))
        prompt, (example,) = encoder.prompt(encoder.conversation(row)), examples_of(encoder, row)
        assert tokenizer.decode(example.input_ids).startswith(prompt) and not prompt.endswith("5")


def test_encoder_is_picklable() -> None:
    config = DataConfig()
    encoder = Encoder(tiny_tokenizer(), config, detect_layout(list(COT), config))
    copy = pickle.loads(pickle.dumps(encoder))
    assert examples_of(copy, COT) == examples_of(encoder, COT)


DATED = [
    "  {{ strftime_now('%-d %B %Y, %A %H:%M') }}{{ messages }}",
    '\n{% macro day() %}{% if strftime_now is defined %}{{ strftime_now("%Y") }}{% endif %}{% endmacro %} {{ day() }}',
]
DATED += [path.read_text() for path in sorted(TRL.glob("*.jinja")) if "strftime_now" in path.read_text()]


@pytest.mark.parametrize("template", DATED)
def test_a_template_with_a_fixed_date_renders_as_on_that_day(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = staticmethod(lambda: datetime(2024, 2, 9))

    def rendered(template: str) -> str:
        return tokenizer.apply_chat_template(CHAT["messages"], chat_template=template, tokenize=False)

    tokenizer = tiny_tokenizer()
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    then = rendered(template)
    assert "2024" in then
    monkeypatch.setattr(Clock, "now", staticmethod(datetime.now))
    assert rendered(template) != then == rendered(freeze_date(template, "2024-02-09"))
    assert freeze_date(CHATML, "2024-02-09") == CHATML


def test_rows_and_prompts_have_the_date_of_the_configuration() -> None:
    tokenizer = tiny_tokenizer("{{ strftime_now('%Y-%m-%d') }}" + MARKED)
    for row in (COT, CHAT):
        (first, _), *_ = spans(row, tokenizer, date="2024-02-09")
        assert first.startswith("2024-02-09<|im_start|>user\n")
    config = DataConfig(date="2024-02-09")
    encoder = Encoder(tokenizer, config, detect_layout(list(COT), config))
    assert encoder.prompt(encoder.conversation(COT)).startswith("2024-02-09<|im_start|>user\n")
