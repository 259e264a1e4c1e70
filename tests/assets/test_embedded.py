import json
import random
import re
from collections import Counter

import pytest

from tests.support.embedded_answers import is_correct
from tests.support.make_embedded import documents
from tpu_kit.assets import embedded
from tpu_kit.assets.embedded import cot_rows, model_dir

HELD_OUT = cot_rows("eval", 600)
TRAIN = cot_rows("train", 3000)


def render(row):
    reply = f"<think>\n{row['reasoning']}\n</think>\n{row['answer']}"
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": reply}]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir())


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir(), dtype="auto")


def solve(question):
    """Solves a problem from its text, independently of the code that made the problem."""
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    if "equally" in question:
        first, second, holders = numbers
        assert (first + second) % holders == 0
        return (first + second) // holders
    if "dollars" in question:
        count, price, other, paid = numbers
        return paid - (count * price + other)
    if question.endswith("are left?"):
        return numbers[0] * numbers[1] + sum(numbers[2:-1]) - numbers[-1]
    if question.endswith("have now?"):
        change = {verb: 1 for verb in ("buys", "finds", "wins", "gets", "makes")}
        change |= {verb: -1 for verb in ("sells", "loses", "breaks", "uses", "gives away")}
        events = re.findall(rf"({'|'.join(change)}) (\d+)", question)
        assert len(events) == len(numbers) - 1
        return numbers[0] + sum(change[verb] * int(amount) for verb, amount in events)
    told = r"twice|three times|\d+ (?:more|fewer)"
    amounts = [numbers[0]]
    for phrase in re.findall(told, question):
        number = int(phrase.split()[0]) if phrase[0].isdigit() else 0
        amounts.append(
            {"twice": amounts[-1] * 2, "three times": amounts[-1] * 3}.get(phrase)
            or amounts[-1] + (number if phrase.endswith("more") else -number)
        )
    return sum(amounts)


def test_the_files_are_small_and_whole():
    from safetensors import safe_open

    sizes = {name: (model_dir() / name).stat().st_size for name in embedded.FILES}
    assert sum(file.stat().st_size for file in model_dir().iterdir()) < 8e6
    with safe_open(model_dir() / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "lm_head.weight" not in names, "tied weights are stored once"
    assert sizes["tokenizer.json"] > 10_000


def test_a_package_without_its_data_says_so(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(embedded, "ASSETS", tmp_path)
    with pytest.raises(ValueError, match=r"lacks generation_config\.json, model\.safetensors.*Install it again"):
        model_dir()


def test_the_model_is_a_small_tied_llama_with_grouped_queries(model, tokenizer):
    config = model.config
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert config.num_key_value_heads < config.num_attention_heads
    assert sum(parameter.numel() for parameter in model.parameters()) < 3e6
    assert str(model.dtype) == "torch.bfloat16"
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_numbers_and_tags_are_single_tokens_and_any_text_survives(tokenizer):
    for text in [str(number) for number in range(100)] + [
        "<think>",
        "</think>",
        "<|user|>",
        "<|assistant|>",
        "<|end|>",
    ]:
        assert len(tokenizer(text)["input_ids"]) == 1, text
    assert len(tokenizer("12 + 7 = 19")["input_ids"]) == 5
    for text in ("Größe  1234\n\n\tx = y[3]; // 見て 👍", "<think>\n1 + 2 = 3\n</think>\n3"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_chat_template_marks_what_the_assistant_says(tokenizer):
    chat = render(TRAIN[0])
    made = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mask in zip(made["input_ids"], made["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(said) == chat[1]["content"] + "<|end|>"
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert made["input_ids"] == prompt + said
    assert tokenizer.decode(prompt) == f"<|user|>{TRAIN[0]['question']}<|end|><|assistant|>"
    twice = [{"role": "system", "content": "Be brief."}, *chat, *render(TRAIN[1])]
    made = tokenizer.apply_chat_template(twice, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mask in zip(made["input_ids"], made["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(said) == f"{chat[1]['content']}<|end|>{twice[-1]['content']}<|end|>"
    with pytest.raises(Exception, match="the roles are system, user and assistant, not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


def test_examples_are_short(tokenizer):
    lengths = [len(tokenizer.apply_chat_template(render(row), return_dict=True)["input_ids"]) for row in HELD_OUT]
    assert min(lengths) >= 40
    assert max(lengths) <= 110


def test_rows_are_the_same_each_time_and_differ_by_seed():
    assert cot_rows("train", 3000) == TRAIN
    assert cot_rows("train", 20) == TRAIN[:20]
    assert json.dumps(cot_rows("train", 1)[0]) == (
        '{"question": "Uma has 3 rings. Uma gets 18, makes 6 and then sells 18. How many rings does Uma have now?", '
        '"reasoning": "Uma gets 18 so 3 + 18 = 21.\\nUma makes 6 so 21 + 6 = 27.\\nUma sells 18 so 27 - 18 = 9.", '
        '"answer": "9"}'
    )
    assert cot_rows("train", 20, seed=1) != TRAIN[:20]
    assert cot_rows("eval", 0) == []


def test_no_question_is_in_both_splits_nor_twice_in_one():
    train = {row["question"] for seed in range(3) for row in cot_rows("train", 2000, seed=seed)}
    assert not train & {row["question"] for seed in range(3) for row in cot_rows("eval", 600, seed=seed)}
    assert len({row["question"] for row in TRAIN}) == len(TRAIN)


def test_answers_and_steps_are_right():
    for row in HELD_OUT + TRAIN:
        assert solve(row["question"]) == int(row["answer"]), row
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", row["reasoning"])
        assert 2 <= len(steps) == row["reasoning"].count("\n") + 1
        assert steps[-1][3] == row["answer"]
        known = {int(number) for number in re.findall(r"\d+", row["question"])} | {2, 3}  # twice, three times
        for left, sign, right, result in steps:
            a, b = int(left), int(right)
            assert {a, b} <= known, "a step uses what is told or was worked out before"
            assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == int(result) <= embedded.LIMIT
            known.add(int(result))


def test_no_answer_can_be_guessed_well():
    for rows in (HELD_OUT, TRAIN):
        assert max(Counter(row["answer"] for row in rows).values()) < 0.1 * len(rows)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>\n3 + 4 = 7.\n</think>\n7", True),
        ("<think>\n3 + 4 = 8.\n</think>\n7<|end|>", True),
        ("7", True),
        (" 7.\n<|end|><|pad|><|pad|>", True),
        ("7<|end|>8", True),
        ("<think>7", False),
        ("<think>7<|end|></think>7", False),
        ("<think>\n3 + 4 = 7.\n</think>\n", False),
        ("<think>\n3 + 4 = 7.\n</think>\n17", False),
        ("<think></think>7<think>", False),
        ("<think></think>8</think>7", True),
        ("7 apples", False),
        ("07", False),
        ("", False),
    ],
)
def test_is_correct(text, right):
    assert is_correct({"question": "?", "reasoning": "3 + 4 = 7.", "answer": "7"}, text) is right


def test_is_correct_takes_other_tags():
    row = {"answer": "7"}
    assert is_correct(row, "[work] 8 [done] 7", "[work]", "[done]")
    assert not is_correct(row, "[work] 7", "[work]", "[done]")


def test_arguments_are_checked():
    with pytest.raises(ValueError, match='split must be "train" or "eval", got \'test\''):
        cot_rows("test", 1)
    with pytest.raises(ValueError, match="n must be 0 or more, got -1"):
        cot_rows("train", -1)


def test_running_out_of_problems_is_said(monkeypatch):
    monkeypatch.setattr(embedded, "FAMILIES", {"one": lambda rng: ("How many?", ["1 + 1 = 2"], 2)})
    split = embedded.split_of("How many?")
    with pytest.raises(ValueError, match="found no new problem after 1 rows; ask for fewer than n=2"):
        cot_rows(split, 2)


def test_the_corpus_holds_no_held_out_question_and_no_second_step():
    stream = documents(random.Random(0))
    texts = [next(stream) for _ in range(3000)]
    dialogues = [text for text in texts if text.startswith("<|user|>")]
    assert len(dialogues) > 200
    for text in dialogues:
        question, answer = text.removeprefix("<|user|>").split("<|end|><|assistant|>")
        assert len(re.findall(r"\d+", question)) <= 2, "one step, answered at once"
        assert answer.isdigit()
    retold = [text.split("\n")[0] for text in texts if re.search(r"\?\n(?!<think>)", text)]
    assert len(retold) > 500
    assert {embedded.split_of(question) for question in retold} == {"train"}
    for text in texts:
        if "\n<think>\n" in text or text.split("\n")[0] in retold:
            assert text.count(" = ") == (1 if "<think>" in text else 0), text


def test_the_base_answers_at_once_and_mostly_wrongly(model, tokenizer):
    import torch

    chats = [[{"role": "user", "content": row["question"]}] for row in HELD_OUT[:64]]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    replies = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum(reply.isdigit() for reply in replies) >= 0.9 * 64, "the base has learnt the form of an answer"
    assert not any("<think>" in reply for reply in replies)
    right = sum(is_correct(row, reply) for row, reply in zip(HELD_OUT, replies, strict=False))
    assert right <= 0.2 * 64
