"""Makes units of packed rows from pairs of replies: the prompt once, then the chosen and the rejected reply.

A unit is a document of `batching.Documents`, so packing never splits it. A reply in it is a segment that begins with
the last token of the prompt, which predicts the reply's first token. The tokens before are a prefix that both replies
attend to (`layer_inputs.Visibility`). For models that cannot share a prefix, a segment contains its own prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tpu_kit.data.batching import Documents, PackedDataset, permutation
from tpu_kit.data.rows.field_values import RowError
from tpu_kit.data.rows.preferences import common_length

if TYPE_CHECKING:
    from tpu_kit.config.loader import TrainConfig
    from tpu_kit.data.chat.chat_documents import Document
    from tpu_kit.data.chat.chat_encoding import Encoder, Example
    from tpu_kit.data.rows.schemas import Conversation
    from tpu_kit.data.tokenizing import Tokenized


class PairTokens(NamedTuple):
    """Numbers of tokens in a pair of tokenised texts, which are a prompt with a reply. A labelled row has one text.

    Attributes:
        prompt: tokens at the start that are equal in both and carry no loss.
        chosen: tokens of the prompt with the chosen reply.
        same: tokens at the start that are equal in both.
        moved: 1 if `prompt` ends before the loss of one of the texts begins, else 0.
        label: 1 if the chosen reply is good, as in all pairs; 0 for a bad reply of a labelled row.
    """

    prompt: int
    chosen: int
    same: int
    moved: int
    label: int = 1


class Unit(NamedTuple):
    """Numbers of tokens in the segments of a unit; the rest is the rejected reply.

    Attributes:
        prefix: tokens of the shared prefix; 0 if the replies have their own prompts.
        chosen: tokens of the segment with the chosen reply.
        label: as in `PairTokens`.
    """

    prefix: int
    chosen: int
    label: int = 1


class PairLayout(NamedTuple):
    """Settings that control how pairs become units.

    Attributes:
        shares: whether both replies share a copy of the prompt.
        learns_prompt: whether the chosen reply's prompt has labels too, which requires its own copy.
        ld_alpha: weight of the longer reply's tokens beyond the length of the shorter reply.
        label_weights: weights of good and of bad replies, for labelled rows; None for pairs.
    """

    shares: bool
    learns_prompt: bool = False
    ld_alpha: float = 1.0
    label_weights: tuple[float, float] | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> PairLayout | None:
        """Returns the layout of a run on pairs or labelled replies; None for other runs (`TrainConfig.on_pairs`).

        `shares` depends on the model's shape, except with the loss orpo: raises ValueError as `read_shape`.
        """
        if not config.on_pairs:
            return None
        from tpu_kit.model.shape_cache import read_shape

        learns_prompt = "orpo" in config.preference.losses  # as in TRL, whose likelihood includes the prompt
        preference = config.preference
        alpha = 1.0 if preference.ld_alpha is None else preference.ld_alpha
        weights = (preference.desirable_weight, preference.undesirable_weight) if preference.labelled else None
        return cls(not learns_prompt and read_shape(config.model).sees_all, learns_prompt, alpha, weights)


class PairCounts(NamedTuple):
    """Counts of pairs for the report.

    Attributes:
        pairs: usable pairs.
        equal: pairs left out because both replies are the same.
        cut_equal: pairs left out because both replies are the same after truncation.
        no_room: pairs left out because the prompt leaves no room for a token of both replies.
        moved: usable pairs in which the loss of a reply begins after the end of the common prompt.
        tokens: tokens of the units.
        apart: tokens of the units if every reply had its own copy of the prompt.
        good: rows labelled as good; None for pairs.
    """

    pairs: int
    equal: int
    cut_equal: int
    no_room: int
    moved: int
    tokens: int
    apart: int
    good: int | None = None

    def lines(self) -> list[str]:
        """Returns a line about pairs, or about labelled replies if `good` is not None; a second line if `moved` > 0."""
        reasons = {
            "have the same reply twice": self.equal, "have the same reply twice after truncation": self.cut_equal,
            "have a prompt that fills data.max_length": self.no_room,
        }  # fmt: skip
        left_out = "".join(f"; left out: {count:,} {reason}" for reason, count in reasons.items() if count)
        shared = f", {1 - self.tokens / self.apart:.0%} fewer than as two documents" if self.tokens < self.apart else ""
        each = f"{self.tokens / self.pairs:.0f} tokens each"
        lines = [f"pairs            {self.pairs:,}, {each}{shared}{left_out}"]
        if self.good is not None:
            text = f"{self.pairs:,}, {self.good:,} of them good; with another row's reply {each}{shared}{left_out}"
            lines = [f"labelled replies {text}"]
        if self.moved:
            lines.append(
                f"prompts          {self.moved:,} end before the loss of a reply begins: the chat template renders the "
                "two differently from there on"
            )
        return lines


def columns_of_pair(
    chosen: Conversation, documents: Sequence[Document], example: Example, encoder: Encoder
) -> dict[str, Any]:
    """Returns the columns of a tokenised pair: both texts, the chosen first; `as_units` truncates the replies.

    They are input_ids, loss_mask, full_length and whole_length (both are the length of input_ids), pair (`PairTokens`),
    special (first text of a special token in either text, or "") and reasoning (`ReasoningCounts` of the chosen
    text).

    Args:
        chosen: the conversation with the chosen reply; its `rejected` has the other reply.
        documents: `encoder.documents(chosen)`.
        example: `encoder.encode(documents[0])`.
        encoder: encoder of the rows.

    Raises:
        RowError: a reply has several turns that the chat template renders as separate documents, or the rejected
            conversation cannot be encoded.
    """
    assert chosen.rejected is not None
    others = encoder.documents(chosen.rejected)
    for name, rendered in (("chosen", documents), ("rejected", others)):
        if len(rendered) > 1:
            raise RowError(
                f"the {name} reply has several turns, which the chat template renders differently in one chat; give "
                "a single turn"
            )
    (ids, mask), (other, other_mask) = example, encoder.encode(others[0])
    same, begins = common_length(ids, other), (mask.index(True), other_mask.index(True))
    prompt = min(same, *begins)
    tokens = [*ids, *other]
    return {
        "input_ids": tokens, "loss_mask": [*mask, *other_mask], "full_length": len(tokens),
        "whole_length": len(tokens), "pair": PairTokens(prompt, len(ids), same, int(prompt < max(begins))),
        "special": encoder.special_text(chosen) or encoder.special_text(chosen.rejected),
        "reasoning": encoder.count_reasoning(documents[0], example),
    }  # fmt: skip


def columns_of_label(talk: Conversation, document: Document, example: Example, encoder: Encoder) -> dict[str, Any]:
    """Returns the columns of a tokenised prompt with a labelled reply; `as_units` adds another reply and truncates."""
    ids, mask = example
    tokens = PairTokens(mask.index(True), len(ids), 0, 0, int(bool(talk.label)))
    return {"input_ids": ids, "loss_mask": mask, "full_length": len(ids), "whole_length": len(ids), "pair": tokens,
            "reasoning": encoder.count_reasoning(document, example)}  # fmt: skip


def _with_partners(tokens: Tokenized) -> Tokenized:
    """Pairs every labelled reply with the reply of another row as the rejected reply to the same prompt.

    KTO estimates its divergence on such mismatched pairs, without a gradient. The other row depends on the seed and the
    number of rows; a training row may get the reply of a held-out row. Raises ValueError for a single row.
    """
    documents = tokens.documents
    assert documents.pairs is not None
    count = len(documents)
    if count < 2:
        raise ValueError(f"{tokens.source}: kto compares a row with the reply of another row; give at least two rows")
    order = permutation(count, tokens.encoder.config.seed, 0)
    partner = np.empty(count, dtype=np.int64)
    partner[order] = np.roll(order, 1)
    flat, masks = _flat(documents)
    ends = np.cumsum(documents.lengths)
    starts, prompts = ends - documents.lengths, documents.pairs[:, 0]
    ids, learned = list[np.ndarray](), list[np.ndarray]()
    for number in range(count):
        begin, other = starts[number], partner[number]
        own, reply = slice(begin, ends[number]), slice(starts[other] + prompts[other], ends[other])
        prompt = flat[begin : begin + prompts[number]]
        ids += [flat[own], prompt, flat[reply]]
        learned += [masks[own], np.zeros(len(prompt), dtype=bool), np.ones(reply.stop - reply.start, dtype=bool)]
    lengths = documents.lengths + prompts + documents.lengths[partner] - prompts[partner]
    made = replace(
        documents, input_ids=np.concatenate(ids), loss_mask=np.concatenate(learned), lengths=lengths, places=None
    )
    return replace(tokens, documents=made)


def _flat(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """Concatenates the token ids and the loss masks of documents."""
    runs = [run for _, run in documents.runs()]
    ids, masks = (np.concatenate([flat[run] for run in runs]) for flat in (documents.input_ids, documents.loss_mask))
    return ids, masks


def as_units(tokens: Tokenized, shares: bool) -> tuple[Tokenized, PairCounts]:
    """Makes units of at most `data.max_length` tokens from tokenised pairs; leaves out pairs with nothing to learn.

    Truncates the end of the longer reply first, and never the prompt. There is nothing to learn if both replies are the
    same, also after truncation, or if no token of one of them is left. With `shares`, they share a prompt; without,
    they have their own copies. A labelled reply gets the reply of another row as its rejected reply.
    Returns the units, whose `documents.pairs` has the fields of `Unit`, and counts of all pairs.

    Raises:
        ValueError: no pair is left, or there is a single labelled row.
    """
    labelled = tokens.encoder.layout.format == "unpaired"
    tokens = _with_partners(tokens) if labelled else tokens
    documents, length = tokens.documents, tokens.encoder.config.max_length
    assert documents.pairs is not None and not len(tokens.earlier)
    ids, mask = _flat(documents)
    prompt, chosen, same, moved, label = documents.pairs.astype(np.int64).T
    prefix = np.maximum(prompt - 1, 0) * shares
    whole = np.stack([chosen, documents.lengths - chosen]) - prefix
    room, shorter = length - prefix, whole.min(0)
    most = np.where(2 * shorter <= room, room - shorter, room // 2)
    kept = np.minimum(whole, np.maximum(most, 0))

    # The position of each token in its text, prompt included.
    starts = np.repeat(np.cumsum(documents.lengths) - documents.lengths, documents.lengths)
    place = np.arange(len(ids)) - starts
    of_chosen, of_prefix, *of_kept = (np.repeat(one, documents.lengths) for one in (chosen, prefix, *(prefix + kept)))
    is_rejected = place >= of_chosen
    place = np.where(is_rejected, place - of_chosen, place)
    taken = (place < np.where(is_rejected, of_kept[1], of_kept[0])) & ~(is_rejected & (place < of_prefix))
    learned = [
        np.add.reduceat((mask & taken & side).astype(np.int64), np.unique(starts))
        for side in (~is_rejected, is_rejected)
    ]
    equal = (same == chosen) & (whole[0] == whole[1])
    no_room = (np.minimum(*learned) == 0) & ~equal
    cut_equal = (kept[0] == kept[1]) & (same >= prefix + kept[0]) & ~equal & ~no_room
    usable = ~(equal | cut_equal | no_room)
    if not usable.any():
        raise ValueError(
            f"{tokens.source}: no pair is left of {len(usable):,}: {equal.sum():,} have the same reply twice, "
            f"{cut_equal.sum():,} after truncation to data.max_length={length}, and {no_room.sum():,} have prompts "
            "that fill it; raise it, or give other rows"
        )
    chosen_tokens = np.repeat(usable, documents.lengths) & taken
    lengths = (prefix + kept.sum(0))[usable]
    made = replace(
        documents, input_ids=ids[chosen_tokens], loss_mask=mask[chosen_tokens], lengths=lengths, places=None,
        source_rows=documents.source_rows[usable],
        pairs=np.stack([prefix, kept[0], label], 1)[usable].astype(np.int32),
    )  # fmt: skip
    counts = PairCounts(
        int(usable.sum()), int(equal.sum()), int(cut_equal.sum()), int(no_room.sum()), int(moved[usable].sum()),
        int(lengths.sum()), int((kept.sum(0) + 2 * prefix)[usable].sum()),
        int(label[usable].sum()) if labelled else None,
    )  # fmt: skip
    full = prefix + whole.sum(0)
    return tokens.selected(usable, made, full[usable]), counts


def as_chosen(tokens: Tokenized) -> Tokenized:
    """Makes documents from the chosen replies with their prompts, cut to `data.max_length` tokens.

    Leaves out rejected replies and replies labelled as bad, and says so in `encoder.layout.notes` of the result. Its
    `documents.pairs` is None. Raises ValueError if all replies are bad.
    """
    documents, encoder = tokens.documents, tokens.encoder
    assert documents.pairs is not None
    whole = documents.pairs[:, PairTokens._fields.index("chosen")].astype(np.int64)
    lengths = np.minimum(whole, encoder.config.max_length)
    starts = np.repeat(np.cumsum(documents.lengths) - documents.lengths, documents.lengths)
    ids, mask = _flat(documents)
    kept = np.arange(len(ids)) - starts < np.repeat(lengths, documents.lengths)
    made = replace(documents, input_ids=ids[kept], loss_mask=mask[kept], lengths=lengths, places=None, pairs=None)
    good = documents.pairs[:, PairTokens._fields.index("label")] > 0
    if not good.any():
        raise ValueError(
            f"{tokens.source}: all replies are labelled as bad, so there is nothing to imitate; dpo with losses=[kto] "
            "learns from labels, or give good replies"
        )
    which, compares = ("good", "all") if encoder.layout.format == "unpaired" else ("chosen", "both")
    note = f"only the {which} replies are used; dpo compares {compares}"
    encoder = replace(encoder, layout=replace(encoder.layout, notes=(*encoder.layout.notes, note)))
    return replace(tokens.selected(good, made.select(good), whole[good]), encoder=encoder)


def with_pairs(tokens: Tokenized, layout: PairLayout | None) -> tuple[Tokenized, PairCounts | None]:
    """Returns units and their counts for a run on pairs (`as_units`), whose `layout` is not None.

    For other runs, returns documents of the chosen replies (unchanged if the rows are no pairs) and None; raises
    ValueError as `as_chosen`.
    """
    if layout is not None:
        return as_units(tokens, layout.shares)
    return (tokens if tokens.documents.pairs is None else as_chosen(tokens)), None


def with_reply(dataset: PackedDataset, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids (int32) and loss mask (bool) of document `number`; for a pair, prompt and chosen reply only."""
    ids, mask = dataset.document(number)
    if dataset.documents.pairs is None:
        return ids, mask
    unit = Unit(*dataset.documents.pairs[number].tolist())
    end = unit.prefix + unit.chosen
    return ids[:end], mask[:end]


class PairColumns:
    """Adds the tensors of pairs to batches of packed rows; a picklable `PackedDataset.further`.

    Replaces position_ids and segment_ids, and adds labels of the prompt if it is learned. Adds, all (B, S):

        prefix_ids: int32, n in the shared prompt of pair n, -n in its replies, 0 in empty slots; only with `shares`.

        pairs: int32, number of the token's pair in its row, from 1; 0 in empty slots.
        sign: fp32, at positions that predict tokens with loss: 1 in the chosen and -1 in the rejected reply, times
            `ld_alpha` beyond the shorter reply's length; 0 elsewhere.
        reference: fp32, the reference's log-probability of a reply, at the first such position; 0 elsewhere.
        desirable: fp32, weight of the unit's own reply, negative for a bad reply; only with `label_weights`.
        kl: fp32, estimated divergence of all compared replies; only with `label_weights`.
        token_share: fp32, `scale` at positions whose negative log-likelihood counts for sft and orpo (they predict the
            chosen reply, with orpo its prompt too); 0 elsewhere.

    Args:
        dataset: dataset of units.
        layout: the units' layout.

    Attributes:
        units: int32 (documents, 3), the fields of `Unit`.
        kl: value of the tensor kl; the trainer sets it.
        reference: fp32 (documents, 2), log-probabilities of the chosen and the rejected reply; NaN until known.
        scale: value of token_share; 1, or the `share` of the rows that are summed if a caller sets it.
    """

    def __init__(self, dataset: PackedDataset, layout: PairLayout) -> None:
        assert dataset.documents.pairs is not None
        self.units, self.layout, self.scale = dataset.documents.pairs, layout, 1.0
        self.kl = 0.0
        self.reference = np.full((len(self.units), 2), np.nan, dtype=np.float32)
        learned = [int(with_reply(dataset, number)[1].sum()) for number in range(len(self.units))]
        self._counted = self.units[:, 1] - 1 if layout.learns_prompt else np.array(learned)

    def share(self, dataset: PackedDataset, rows: np.ndarray) -> float:
        """Returns pairs / tokens over some packed rows, counting tokens with a token_share."""
        numbers = np.concatenate([dataset.documents_of(row) for row in rows.tolist()])
        return len(numbers) / float(self._counted[numbers].sum())

    def fingerprint(self) -> bytes:
        """Returns bytes that identify the units and their layout."""
        return self.units.tobytes() + repr(self.layout).encode()

    def add(self, dataset: PackedDataset, rows: np.ndarray, tensors: dict[str, torch.Tensor]) -> None:
        """Replaces and adds tensors, in place, in the result of `dataset.tensors` for row numbers (-1 is empty)."""
        shape = tensors["input_ids"].shape
        kinds = {"pairs": torch.int32, "sign": torch.float32, "reference": torch.float32, "token_share": torch.float32}
        kinds |= {"prefix_ids": torch.int32} if self.layout.shares else {}
        kinds |= {"desirable": torch.float32, "kl": torch.float32} if self.layout.label_weights else {}
        tensors |= {name: torch.zeros(shape, dtype=dtype) for name, dtype in kinds.items()}
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        for i, row in enumerate(rows):
            segment = start = 0
            for pair, number in enumerate(dataset.documents_of(row) if row >= 0 else (), 1):
                ids, mask = dataset.document(number)
                here = {name: array[i, start : start + len(ids)] for name, array in arrays.items()}
                segment = self._fill(here, int(number), pair, segment, ids, mask)
                start += len(ids)
        tensors["token_share"] *= self.scale
        if self.layout.label_weights:
            tensors["kl"].fill_(self.kl)

    def _fill(
        self, here: dict[str, np.ndarray], number: int, pair: int, segment: int, ids: np.ndarray, mask: np.ndarray
    ) -> int:
        """Writes unit `number`, pair `pair` of its row, to its slots `here`; counts on from `segment`, returns its end.

        `ids` and `mask` are the unit's tokens and loss mask.
        """
        unit = Unit(*self.units[number].tolist())
        first, second = unit.prefix, unit.prefix + unit.chosen
        here["pairs"][:] = pair
        if by_label := self.layout.label_weights:
            here["desirable"][:] = by_label[0] if unit.label else -by_label[1]
        if unit.prefix:
            segment += 1
            here["segment_ids"][:first], here["position_ids"][:first] = segment, np.arange(first)
        if self.layout.shares:
            here["prefix_ids"][:first], here["prefix_ids"][first:] = pair, -pair
        sides = (slice(first, second), slice(second, len(ids)))
        lengths = [int(mask[side].sum()) for side in sides]
        for side, sign in zip(sides, (1.0, -1.0), strict=True):
            segment += 1
            tokens = np.arange(side.stop - side.start)
            here["segment_ids"][side], here["position_ids"][side] = segment, unit.prefix + tokens
            predicts = side.start + np.flatnonzero(mask[side]) - 1
            weights = np.where(np.arange(len(predicts)) < min(lengths), 1.0, self.layout.ld_alpha)
            here["sign"][predicts] = sign * weights
            here["reference"][predicts[0]] = self.reference[number, int(sign < 0)]
            if sign > 0:
                here["token_share"][predicts] = 1.0
                if self.layout.learns_prompt:
                    here["labels"][first + 1 : second] = ids[first + 1 : second]
                    here["token_share"][first : second - 1] = 1.0
        return segment
