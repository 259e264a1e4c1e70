"""Chats with images for chat templates, and the tokens of images in their encodings."""

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
        processor: of the model.
        files: of the source.
    """

    def __init__(self, processor: ImageProcessor, files: PictureFiles) -> None:
        self.processor, self.files = processor, files
        self._takes_text: dict[str, bool] = {}  # by chat template

    def in_parts(self, messages: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
        """Returns messages in which contents with images are lists of parts, as templates for images take them.

        Other contents are lists too where the template takes no text (SmolVLM's).
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
        """Puts the tokens of images, which carry no loss, in place of the template's one for each.

        Args:
            ids: of a rendered chat, or of its beginning.
            mask: of the ids with loss.
            pictures: of the whole chat.

        Returns:
            Ids, mask, and for each picture of the ids the soft tokens of its slots.

        Raises:
            RowError: there are more image tokens than pictures.
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
        """Returns the ids of a prompt that carry its pictures, for each of which the chat template writes one token.

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
        """Returns the columns of a tokenised document's images.

        Args:
            pictures: those in the document.
            slots: the soft tokens of each picture's slots.
        """
        digest = hashlib.blake2b("".join(one.digest for one in pictures).encode(), digest_size=8).digest()
        files = [one for one in pictures if one.file]
        return {"slots": [count for each in slots for count in each], "pictures": len(pictures),
                "digest": int.from_bytes(digest, "little", signed=True), "files": [one.file for one in files],
                "stamps": [one.stamp for one in files]}  # fmt: skip


class DocumentImages:
    """The images of documents.

    Attributes:
        pictures: int64 (documents,), how many pictures of its row, from the first on, each document has.
        slots: int64 (documents,), image slots of each document.
        tokens: int32 (slots of all documents,), soft tokens of each slot.
        digests: int64 (documents,), a hash of the pictures of each document.
    """

    def __init__(self, pictures: np.ndarray, slots: np.ndarray, tokens: np.ndarray, digests: np.ndarray) -> None:
        self.pictures, self.slots, self.tokens, self.digests = pictures, slots, tokens, digests
        self._ends = np.cumsum(slots)

    @classmethod
    def read(cls, columns: Any) -> DocumentImages:
        """Returns those of an Arrow table of tokenised documents, of `ImageEncoding.columns`."""
        tokens = columns["slots"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        slots = pc.list_value_length(columns["slots"]).to_numpy().astype(np.int64)
        pictures, digests = (columns[name].to_numpy(zero_copy_only=False) for name in ("pictures", "digest"))
        return cls(pictures, slots, tokens, digests)

    def select(self, keep: np.ndarray) -> DocumentImages:
        """Returns those of the documents where the boolean array `keep` is true."""
        tokens = self.tokens[np.repeat(keep, self.slots)]
        return DocumentImages(self.pictures[keep], self.slots[keep], tokens, self.digests[keep])

    def joined(self, several: Sequence[DocumentImages]) -> DocumentImages:
        """Returns the images of all documents of several, of which this is the first."""
        names = ("pictures", "slots", "tokens", "digests")
        return DocumentImages(*(np.concatenate([getattr(one, name) for one in several]) for name in names))

    def of(self, document: int) -> np.ndarray:
        """Returns the soft tokens of the slots of a document."""
        return self.tokens[self._ends[document] - self.slots[document] : self._ends[document]]
