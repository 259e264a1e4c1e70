"""Trains the embedded model: `python -m tests.support.make_embedded` writes `tpu_kit/assets/embedded/`.

The model is a Llama of 869,504 parameters (4 layers, width 128, 2 query heads of 64 sharing 1 key/value head, tied
embeddings of 640 tokens). It is pre-trained from seed 0 on the CPU with plain PyTorch: 1,600 updates of 32 rows of 128
tokens of `documents` (6.5 million tokens), about ten minutes on one core. Its weights are stored in bf16 (1.7 MB).

The corpus has number facts, the words of the problems, and one-step sums. It omits the skills that fine-tuning teaches:
no text uses the result of one step in a second step, and every dialogue answers directly. The thinking tags occur only
in notes outside dialogues, around a single step. Long problems, from the training split only, are read and repeated
clause by clause, never answered.

Measured with the shipped weights on `cot_rows("eval", 192)`, held out, greedy: the base solves 0.026. After 120 LoRA
steps, about a minute on one core, it solves 0.990. The adapters (r 16, alpha 32, all linear layers) are fp32 over a
bf16 base. AdamW's rate warms up to 5e-3 in 10 steps, then falls as a cosine to 0; the gradient norm is clipped to 1. A
step has 16 packed rows of 256 tokens, with the loss on the completion.

Seeds fix the corpus, the batches and the initial weights. The shipped weights come from torch 2.9.0 on a processor with
AVX-512 bf16; another processor or torch version rounds differently.
"""

import argparse
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.support.embedded_answers import is_correct
from tpu_kit.assets import embedded
from tpu_kit.assets.embedded import (
    ACTIVITIES,
    DAYS,
    GAINS,
    HOLDERS,
    ITEMS,
    LIMIT,
    LOSSES,
    NAMES,
    SINGLES,
    TIMES,
    cot_rows,
)

SEED = 0
STEPS = 1600
ROWS, LENGTH = 32, 128  # packed rows per update, tokens per row
LEARNING_RATE, WARMUP, CONSTANT = 3e-3, 100, 0.4  # warm-up in steps, then this share of the steps at the full rate
VOCABULARY = 640  # a multiple of 128, as wide as a TPU register
PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MEASURED_ROWS = 192

# A word with the space before it; a number of at most two digits; punctuation with the spaces around it; white space.
# "12 + 7 = 19" thus has five tokens, and a number is the same token at every position.
WORDS = r" ?\p{L}+|\d{1,2}| ?[^\s\p{L}\d]+ ?|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
<|assistant|>{% generation %}{{ message.content }}<|end|>{% endgeneration %}
{%- elif message.role in ("system", "user") -%}
{{ "<|" + message.role + "|>" + message.content + "<|end|>" }}
{%- else -%}
{{ raise_exception("the roles are system, user and assistant, not " + message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def sum_of(rng: random.Random, signs: str = "+-*/") -> tuple[int, str, int, int]:
    """Draw `(a, sign, b, result)`, all whole numbers of 1..LIMIT, with the signs equally likely."""
    sign = rng.choice(signs)
    if sign == "+":
        result = rng.randint(2, LIMIT)
        a = rng.randint(1, result - 1)
        return a, sign, result - a, result
    if sign == "-":
        a = rng.randint(2, LIMIT)
        b = rng.randint(1, a - 1)
        return a, sign, b, a - b
    a = rng.randint(2, 9)
    b = rng.randint(1, LIMIT // a)
    if sign == "*":
        return (a, sign, b, a * b) if rng.random() < 0.5 else (b, sign, a, a * b)
    return a * b, sign, a, b


def facts(rng: random.Random) -> str:
    """Write lines of number facts."""
    lines = []
    for _ in range(rng.randint(6, 18)):
        a, sign, b, result = sum_of(rng, rng.choice(("+-", "+-*/")))
        lines.append(f"{a} {sign} {b} = {result}")
    return rng.choice(("\n", ", ")).join(lines)


def one_step(rng: random.Random) -> tuple[str, str, str, int]:
    """Draw a story with a single step: `(story, question, the step in words, result)`."""
    name, other = rng.sample(NAMES, 2)
    item, holder = rng.choice(ITEMS), rng.choice(HOLDERS)
    kind = rng.choice(("change", "change", "groups", "than", "times", "together", "pays", "share", "day"))
    if kind in ("change", "than", "day"):
        a, sign, b, result = sum_of(rng, "+-")
        if kind == "change":
            verb = rng.choice(GAINS if sign == "+" else LOSSES)
            return (
                f"{name} has {a} {item}. {name} {verb} {b}.",
                f"How many {item} does {name} have now?",
                f"{name} {verb} {b} so {a} {sign} {b} = {result}.",
                result,
            )
        word = "more" if sign == "+" else "fewer"
        if kind == "than":
            return (
                f"{name} has {a} {item}. {other} has {b} {word} {item} than {name}.",
                f"How many {item} does {other} have?",
                f"{other} has {a} {sign} {b} = {result}.",
                result,
            )
        verb, item = rng.choice(ACTIVITIES)
        first = rng.randint(0, 3)
        return (
            f"{name} {verb} {a} {item} on {DAYS[first]} and {b} {word} on {DAYS[first + 1]}.",
            f"How many {item} is that on {DAYS[first + 1]}?",
            f"On {DAYS[first + 1]} {a} {sign} {b} = {result}.",
            result,
        )
    if kind == "together":
        a, _, b, result = sum_of(rng, "+")
        return (
            f"{name} has {a} {item} and {other} has {b} {item}.",
            f"How many {item} do they have together?",
            f"Together {a} + {b} = {result}.",
            result,
        )
    if kind == "pays":
        a, _, b, result = sum_of(rng, "-")
        return (
            f"{name} buys a {rng.choice(SINGLES)} for {b} dollars. {name} pays {a} dollars.",
            f"How many dollars does {name} get back?",
            f"{name} pays {a} so {a} - {b} = {result}.",
            result,
        )
    if kind == "share":
        a, _, b, result = sum_of(rng, "/")
        return (
            f"{name} put {a} {item} into {b} {holder} equally.",
            f"How many {item} are in each of the {holder}?",
            f"{b} {holder} so {a} / {b} = {result}.",
            result,
        )
    a, _, b, result = sum_of(rng, "*")
    if kind == "times":
        a = rng.choice(tuple(TIMES))
        b = rng.randint(1, LIMIT // a)
        return (
            f"{name} has {b} {item}. {other} has {TIMES[a]} as many {item} as {name}.",
            f"How many {item} does {other} have?",
            f"{other} has {a} * {b} = {a * b}.",
            a * b,
        )
    if rng.random() < 0.5:
        return (
            f"{name} has {a} {holder} of {b} {item}.",
            f"How many {item} does {name} have?",
            f"{a} {holder} of {b} so {a} * {b} = {result}.",
            result,
        )
    return (
        f"{name} buys {a} {item} for {b} dollars each.",
        f"How many dollars does {name} pay?",
        f"{a} {item} for {b} so {a} * {b} = {result}.",
        result,
    )


def story(rng: random.Random) -> str:
    """Write one or two one-step stories as plain text."""
    parts = []
    for _ in range(rng.randint(1, 2)):
        told, _, step, _ = one_step(rng)
        parts.append(f"{told} {step}")
    return "\n".join(parts)


def note(rng: random.Random) -> str:
    """Write a problem with a single step and its solution in thinking tags, outside any dialogue."""
    told, question, step, result = one_step(rng)
    return f"{told} {question}\n{THINK_OPEN}\n{step}\n{THINK_CLOSE}\n{result}"


def dialogue(question: str, answer: str) -> str:
    """Write a dialogue in the chat template's form, with a direct answer."""
    return f"{USER}{question}{END}{ASSISTANT}{answer}"


def direct(rng: random.Random) -> str:
    """Write a dialogue that directly answers a question with a single step, or a bare sum."""
    if rng.random() < 0.3:
        a, sign, b, result = sum_of(rng)
        return dialogue(f"What is {a} {sign} {b}?", str(result))
    told, question, _, result = one_step(rng)
    return dialogue(f"{told} {question}", str(result))


def reading(rng: random.Random, question: str) -> str:
    """Write a long problem and repeat its clauses, in order or shuffled: reading without arithmetic."""
    name = question.split()[0]
    told = question[: question.rindex("How many")].rstrip(". ")
    clauses = re.split(r"\. |, | and then | and ", told)
    if rng.random() < 0.3:
        rng.shuffle(clauses)
    lines = [f"{name} {clause}." if clause.startswith(GAINS + LOSSES) else f"{clause}." for clause in clauses]
    return "\n".join([question, *lines])


def documents(rng: random.Random) -> Iterator[str]:
    """Yield the corpus, an endless stream of documents of 5 to 107 tokens."""
    makers = {"facts": facts, "story": story, "note": note, "direct": direct}
    questions: list[str] = []
    while True:
        kind = rng.choices([*makers, "reading"], (31, 22, 10, 12, 25))[0]
        if kind in makers:
            yield makers[kind](rng)
            continue
        if not questions:
            questions = [row["question"] for row in cot_rows("train", 600, seed=rng.randrange(10**9))]
        yield reading(rng, questions.pop())


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train the byte-level BPE on the corpus and the rationales; every number of 10..99 becomes one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    stream = documents(random.Random(SEED))
    texts = ["\n".join(str(number) for number in range(10, 100))] * 400
    for row in embedded.cot_rows("train", 6000, seed=SEED):
        texts += [row["question"], row["reasoning"], next(stream).replace(THINK_OPEN, "").replace(THINK_CLOSE, "")]
    for mark in (END, USER, ASSISTANT):
        texts = [text.replace(mark, "\n") for text in texts]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,  # the two thinking tags are added later
        special_tokens=[PAD, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=1024,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens([THINK_OPEN, THINK_CLOSE])  # ordinary tokens: decoding keeps them
    fast.chat_template = CHAT_TEMPLATE
    assert len(fast) == VOCABULARY, len(fast)
    return fast


def make_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Build the untrained model in fp32. Its head size is 64 because the TPU's attention kernel accepts it."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def batches(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> Iterator[dict[str, torch.Tensor]]:
    """Yield packed batches of the corpus, endlessly.

    Attention stays within a document and positions restart at each document, as in tpu_kit's packing.

    Args:
        tokenizer: Gives the token ids and the padding id.
        rng: Draws the documents.

    Yields:
        input_ids, labels and position_ids (ROWS, LENGTH) int64; attention_mask (ROWS, 1, LENGTH, LENGTH) bool.
    """
    stream = documents(rng)
    waiting: list[list[int]] = []
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    while True:
        ids = torch.full((ROWS, LENGTH), tokenizer.pad_token_id)
        segments = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        positions = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        for row in range(ROWS):
            filled, segment = 0, 0
            while True:
                if not waiting:
                    texts = [next(stream) + END for _ in range(256)]
                    waiting = tokenizer(texts, add_special_tokens=False)["input_ids"]
                fits = next((i for i, document in enumerate(waiting[:64]) if filled + len(document) <= LENGTH), None)
                if fits is None:
                    break
                document = waiting.pop(fits)
                segment += 1
                place = slice(filled, filled + len(document))
                ids[row, place] = torch.tensor(document)
                segments[row, place] = segment
                positions[row, place] = torch.arange(len(document))
                filled += len(document)
        mask = causal & (segments[:, :, None] == segments[:, None, :])
        labels = torch.where(segments > 0, ids, -100)
        labels[:, 1:][positions[:, 1:] == 0] = -100  # nothing predicts a document's first token
        yield {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": mask[:, None]}


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, steps: int) -> None:
    """Train all weights on the corpus in place: fp32 weights, bf16 autocast.

    Muon trains the matrices inside the layers, AdamW the embeddings and norms. The rate warms up, stays constant, then
    falls linearly to 0.
    """
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(inner, lr=LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    stream = batches(tokenizer, random.Random(SEED + 1))
    began = time.monotonic()
    model.train()
    for step in range(steps):
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP, (steps - step) / (steps * (1 - CONSTANT)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**next(stream), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)


@torch.no_grad()
def accuracy(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]) -> float:
    """Return the share of `rows` that the model, on the CPU, answers correctly by greedy generation."""
    model.eval()
    right = 0
    for start in range(0, len(rows), 64):
        chunk = rows[start : start + 64]
        chats = [[{"role": "user", "content": row["question"]}] for row in chunk]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, do_sample=False, max_new_tokens=128)
        replies = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(is_correct(row, reply) for row, reply in zip(chunk, replies, strict=True))
    return right / len(rows)


def main() -> None:
    """Make the tokenizer, pre-train the model, write both, and print the base's accuracy on held-out problems."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.make_embedded", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=embedded.ASSETS, help="folder to write to")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a single thread sums in a fixed order; two threads on busy cores wait for each other
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    pretrain(model, tokenizer, arguments.steps)
    model = model.to(torch.bfloat16)
    model.generation_config.do_sample = False
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    (arguments.output / "model.safetensors").chmod(0o644)  # safetensors makes it readable for its owner only
    saved = LlamaForCausalLM.from_pretrained(arguments.output, dtype="auto")
    share = accuracy(saved, AutoTokenizer.from_pretrained(arguments.output), embedded.cot_rows("eval", MEASURED_ROWS))
    print(f"held-out accuracy of the base, {MEASURED_ROWS} problems: {share:.3f}")


if __name__ == "__main__":
    main()
