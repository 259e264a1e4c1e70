"""Trains a byte-level BPE tokenizer on the spot; every text survives encoding and decoding."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "What is 2 + 3? Two and three make five. The answer is 5.\n\n",
    "user assistant system thinking question answer the an is so then and of 0 1 2 3 4 5 6 7 8 9\n",
]


def tiny_tokenizer(
    template: str | None = CHATML,
    *,
    special: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    eos: str = "<|im_end|>",
    trim_offsets: bool = False,
    bos: str | None = None,
) -> PreTrainedTokenizerFast:
    """Make the tokenizer; its padding token is eos, as in many released models."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=list(special))
    backend.train_from_iterator(CORPUS * 3, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer
