"""Prepares chats with images for chat templates, and puts the tokens of images into encoded chats."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from tpu_kit.data.images.files import Picture, PictureFiles
from tpu_kit.data.images.processors import ImageProcessor
from tpu_kit.data.images.prompts import PicturedIds
from tpu_kit.data.rows.field_values import RowError
from tpu_kit.data.rows.messages import IMAGE

_PROBE = "tpukitprobe"


class ImageEncoding:
    """Encodes the images of chats for one model and one source of rows; picklable.

    Attributes:
        processor: processor of the model.
        files: opens the pictures of the source.
    """

    def __init__(self, processor: ImageProcessor, files: PictureFiles) -> None:
        self.processor, self.files = processor, files
        self._takes_text: dict[str, bool] = {}  # by chat template

    def in_parts(self, messages: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
        """Returns the messages with parts in place of texts that contain `messages.IMAGE`, as chat templates expect.

        A content becomes a list of {"type": "image"} and {"type": "text", "text": ...}. If the tokenizer's template
        does not accept plain text (SmolVLM's), all texts become lists. The list is new; no message is changed in place.
        """
        template = str(tokenizer.chat_template)
        if template not in self._takes_text:
            try:
                shown = tokenizer.apply_chat_template([{"role": "user", "content": _PROBE}], tokenize=False)
            except Exception:  # a template may raise anything
                shown = ""
            self._takes_text[template] = _PROBE in shown
        return [self._in_parts(message, self._takes_text[template]) for message in messages]

    def _in_parts(self, message: dict[str, Any], takes_text: bool) -> dict[str, Any]:
        """Returns a message with its text in parts; unchanged if it has none, or no image and `takes_text`."""
        content = message.get("content")
        if not isinstance(content, str) or (takes_text and IMAGE not in content):
            return message
        parts = list[dict[str, str]]()
        for number, text in enumerate(content.split(IMAGE)):
            parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
        return {**message, "content": parts}

    def expanded(
        self, ids: Sequence[int], mask: Sequence[bool], pictures: Sequence[Picture]
    ) -> tuple[list[int], list[bool], list[list[int]]]:
        """Replaces every `processor.place_id` by the tokens of the next picture, which have no loss.

        Args:
            ids: token ids of a rendered chat, or of its beginning.
            mask: whether an id has loss, for every id.
            pictures: pictures of the whole chat, in order; pictures after the last `place_id` are left out.

        Returns:
            New ids; their mask; and for every used picture, in order, a list with the soft tokens of its slots.

        Raises:
            RowError: there are fewer pictures than `place_id`, or as `ImageProcessor.tokens`.
        """
        image, left = self.processor.place_id, iter(pictures)
        found, loss, slots = list[int](), list[bool](), list[list[int]]()
        for token, carries in zip(ids, mask, strict=True):
            if token != image:
                found.append(token)
                loss.append(carries)
                continue
            if (picture := next(left, None)) is None:
                text = self.processor.token
                raise RowError(f"its chat has more {text} than images, {len(pictures)}; is the text {text} in it?")
            tokens, counts = self.processor.tokens(picture.height, picture.width)
            found += tokens
            loss += [False] * len(tokens)
            slots.append(counts)
        return found, loss, slots

    def prompt(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Returns a prompt's ids with the tokens of its pictures: `PicturedIds`, or a list if it has no `place_id`.

        Pictures after the last `place_id` are left out.

        Raises:
            RowError: as `expanded`.
        """
        found, _, slots = self.expanded(ids, [False] * len(ids), pictures)
        if not slots:
            return found
        counts = [count for each in slots for count in each]
        sources = [one.source for one in pictures[: len(slots)]]
        return PicturedIds(found, sources, counts, self.files, self.processor)

    def columns(self, pictures: Sequence[Picture], slots: Sequence[list[int]]) -> dict[str, Any]:
        """Returns the image columns of a tokenized document: "slots", "pictures", "digest", "files" and "stamps".

        These are a flat list of `slots`, the number of pictures, an int64 hash of their digests, and two lists for the
        pictures that are files or objects: `Picture.file` and `Picture.stamp`. `pictures` are the document's, and
        `slots` has a list for every picture, as from `expanded`.
        """
        digest = hashlib.blake2b("".join(one.digest for one in pictures).encode(), digest_size=8).digest()
        files = [one for one in pictures if one.file]
        return {"slots": [count for each in slots for count in each], "pictures": len(pictures),
                "digest": int.from_bytes(digest, "little", signed=True), "files": [one.file for one in files],
                "stamps": [one.stamp for one in files]}  # fmt: skip


class DocumentImages:
    """The images of documents.

    Attributes:
        pictures: int64 (documents,), number of pictures of a document: the first ones of its row.
        slots: int64 (documents,), image slots of a document.
        tokens: int32 (slots of all documents,), soft tokens of a slot.
        digests: int64 (documents,), hash of a document's pictures.
    """

    def __init__(self, pictures: np.ndarray, slots: np.ndarray, tokens: np.ndarray, digests: np.ndarray) -> None:
        self.pictures, self.slots, self.tokens, self.digests = pictures, slots, tokens, digests
        self._ends = np.cumsum(slots)

    @classmethod
    def read(cls, columns: Any) -> DocumentImages:
        """Returns the images of an Arrow table of tokenized documents with the columns of `ImageEncoding.columns`."""
        tokens = columns["slots"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        slots = pc.list_value_length(columns["slots"]).to_numpy().astype(np.int64)
        pictures, digests = (columns[name].to_numpy(zero_copy_only=False) for name in ("pictures", "digest"))
        return cls(pictures, slots, tokens, digests)

    def select(self, keep: np.ndarray) -> DocumentImages:
        """Returns the images of the documents that the boolean array `keep` (documents,) selects."""
        tokens = self.tokens[np.repeat(keep, self.slots)]
        return DocumentImages(self.pictures[keep], self.slots[keep], tokens, self.digests[keep])

    def joined(self, several: Sequence[DocumentImages]) -> DocumentImages:
        """Returns the images of `several`, concatenated; this object takes part only as an element of `several`."""
        names = ("pictures", "slots", "tokens", "digests")
        return DocumentImages(*(np.concatenate([getattr(one, name) for one in several]) for name in names))

    def of(self, document: int) -> np.ndarray:
        """Returns the soft tokens of the slots of document number `document`, int32 (slots,); empty without images."""
        return self.tokens[self._ends[document] - self.slots[document] : self._ends[document]]
