"""Tiny image models, documents with pictures, transformers' results for them, and packed rows."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Idefics3Config,
    Lfm2VlConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.utils import is_torchvision_available
from transformers.vision_utils import get_vision_position_ids

from tpu_kit.config.loader import LoraConfig, OptimConfig, TrainConfig
from tpu_kit.data.images.processors import patches_of
from tpu_kit.distributed.replica import runtime
from tpu_kit.generation.decoder import Batch, Decoder, filled
from tpu_kit.generation.reference_check import _randomize
from tpu_kit.generation.sampling import Sampling
from tpu_kit.model import causal_lm as models
from tpu_kit.model import preparation, trainable
from tpu_kit.model.families import vision
from tpu_kit.model.families.vision_towers import TOWERS
from tpu_kit.model.loop.layer_calls import stacked_names, unstacked
from tpu_kit.training.objectives import SupervisedObjective
from tpu_kit.training.step import prepare_model, train_step

LOCAL, GLOBAL = "sliding_attention", "full_attention"
VOCABULARY, IMAGE, BEGIN, END = 300, 290, 291, 292
TOKENS = 70  # the most soft tokens of an image of Gemma 4
TEXT: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": [LOCAL, GLOBAL] * 2, "hidden_size": 32, "head_dim": 8,
    "global_head_dim": 16, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "sliding_window": 24, "final_logit_softcapping": 30.0, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
IDS: dict[str, int] = {
    "boi_token_id": BEGIN, "eoi_token_id": END, "image_token_id": IMAGE, "video_token_id": 293,
    "audio_token_id": 294, "boa_token_id": 295, "eoa_token_index": 296,
}  # fmt: skip
SIZES = [(90, 90), (140, 60), (40, 200), (64, 48), (30, 30)]


def unified(window: int = 24) -> Any:
    """Gemma 4 without a tower: a projector maps patches to the decoder; an image's tokens attend to each other."""
    return Gemma4UnifiedConfig(
        text_config=TEXT | {"sliding_window": window, "use_bidirectional_attention": "vision"},
        vision_config={
            "patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 24, "mm_posemb_size": 80, "output_proj_dims": 24,
        },
        audio_config=None, **IDS,
    )  # fmt: skip


def gemma4() -> Any:
    """Gemma 4 with a tower, per-layer embeddings and shared keys, like E2B and E4B."""
    text = TEXT | {
        "num_hidden_layers": 6, "layer_types": [LOCAL, GLOBAL] * 3, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
        "use_bidirectional_attention": None,
    }  # fmt: skip
    return Gemma4Config(
        text_config=text,
        vision_config={
            "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3,
            "num_key_value_heads": 3, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 3,
            "position_embedding_size": 300, "standardize": True, "use_clipped_linears": True,
        },
        audio_config=None, **IDS,
    )  # fmt: skip


def gemma3() -> Any:
    """Gemma 3: every image is one square, and its tokens attend to each other in all layers."""
    text = {name: TEXT[name] for name in TEXT if name not in ("global_head_dim", "final_logit_softcapping")}
    return Gemma3Config(
        text_config=text | {"query_pre_attn_scalar": 8},
        vision_config={
            "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": 48, "patch_size": 4, "vision_use_head": False,
        },
        mm_tokens_per_image=36, boi_token_index=BEGIN, eoi_token_index=END, image_token_index=IMAGE,
    )  # fmt: skip


GRIDS = ("qwen2_5_vl", "qwen3_5", "qwen3_vl")
_PLACES = {"image_token_id": IMAGE, "vision_start_token_id": BEGIN, "vision_end_token_id": END, "video_token_id": 293}
_OF_GRIDS: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 32, "num_heads": 3, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
_OF_AXES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


def qwen2_5_vl() -> Any:
    """Qwen2.5-VL: most layers of its tower attend within windows of patches."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    return Qwen2_5_VLConfig(
        text_config=_OF_AXES | {"rope_parameters": rope},
        vision_config=_OF_GRIDS | {"depth": 4, "fullatt_block_indexes": [1, 3], "window_size": 16},
        **_PLACES,
    )


def qwen3_5() -> Any:
    """Qwen3.5: linear attention, and a tower with a table of positions."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    text = {"rope_parameters": rope, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8}  # fmt: skip
    return Qwen3_5Config(
        text_config=_OF_AXES | text, vision_config=_OF_GRIDS | {"depth": 2, "num_position_embeddings": 64}, **_PLACES
    )


def qwen3_vl() -> Any:
    """Qwen3-VL: states of tower layers are added to the outputs of the text model's first layers."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
    return Qwen3VLConfig(
        text_config=_OF_AXES | {"rope_parameters": rope, "head_dim": 8}, vision_config=_OF_GRIDS | vision, **_PLACES
    )


def lfm2_vl() -> Any:
    """LFM2-VL: short convolutions, and a tower whose table of positions is resized to the patches of each image."""
    text = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
    return Lfm2VlConfig(
        text_config=_OF_AXES | text,
        vision_config={
            "model_type": "siglip2_vision_model", "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 3, "num_patches": 64, "patch_size": 4, "vision_use_head": False,
        },
        projector_hidden_size=40, image_token_id=IMAGE, tie_word_embeddings=False,
    )  # fmt: skip


OF_LFM2: dict[str, Any] = {"encoder_patch_size": 4, "tile_size": 64, "min_image_tokens": 16, "max_image_tokens": TOKENS,
                           "max_pixels_tolerance": 1.9, "max_tiles": 4}  # fmt: skip
"""Of its image processor: of `SIZES`, one is cut into tiles."""


def smolvlm(kind: Any = SmolVLMConfig) -> Any:
    """SmolVLM: each tile of an image fills an image slot of the row."""
    return kind(
        text_config={
            "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
            "max_position_embeddings": 1024,
        },
        vision_config={
            "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": 32, "patch_size": 8,
        },
        scale_factor=2, image_token_id=IMAGE, pad_token_id=0,
    )  # fmt: skip


_generator = threading.Lock()  # replicas of XLA:CPU are threads, and share torch's generator
CONFIGS = {"gemma4_unified": unified, "gemma4": gemma4, "smolvlm": smolvlm, "gemma3": gemma3, "qwen2_5_vl": qwen2_5_vl,
           "qwen3_5": qwen3_5, "qwen3_vl": qwen3_vl, "lfm2_vl": lfm2_vl}  # fmt: skip
ALSO = {"idefics3": lambda: smolvlm(Idefics3Config)}  # like SmolVLM except for the processor's class


def build(config: Any) -> Any:
    """Makes a model with random weights, large enough for sharp attention."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    _randomize(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                any(part in name for part in ("vision_tower", "vision_model", "visual", "linear_attn"))
                and parameter.dim() > 1
            ):
                parameter.mul_(0.4)  # sharp attention amplifies rounding, in transformers too
            if "language_model" in name and name.endswith(("self_attn.out_proj.weight", "q_layernorm.weight")):
                parameter.mul_(4)  # or the convolutions of LFM2 decide nearly alone
        for name, buffer in model.named_buffers():
            if name.endswith("std_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
            elif name.endswith("std_scale"):
                buffer.copy_(1 + 0.1 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith(("input_min", "output_min", "input_max", "output_max")):
                buffer.fill_(2.0 if name.endswith("max") else -2.0)
    return model


def adapted(model: Any, vision: bool = False) -> torch.nn.Module:
    """Returns a copy with adapters that change the output; `vision`: also on the projector."""
    ours = trainable.adapt(copy.deepcopy(model), LoraConfig(r=4, vision=vision), "fp32")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return ours.eval()


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """Returns smooth noise of (width, height) pixels."""
    small = np.random.default_rng(seed).integers(
        0, 256, (max(2, size[1] // 6), max(2, size[0] // 6), 3), dtype=np.uint8
    )
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def image_processor(config: Any) -> Any:
    """Returns transformers' image processor for a model of `CONFIGS`, the version that uses PIL.

    The unified model's processor needs torchvision. Gemma 4's gives the same numbers if its patches are the unified
    model's whole patches.
    """
    if config.model_type in ("smolvlm", "idefics3"):
        side = config.vision_config.image_size
        return (SmolVLMImageProcessorPil if config.model_type == "smolvlm" else Idefics3ImageProcessorPil)(
            size={"longest_edge": 2 * side}, max_image_size={"longest_edge": side}, do_image_splitting=True
        )
    if config.model_type == "gemma3":
        side = config.vision_config.image_size
        return Gemma3ImageProcessorPil(size={"height": side, "width": side})
    if config.model_type == "lfm2_vl":
        return lfm2_processor()(**OF_LFM2)
    if config.model_type in GRIDS:
        vision, kind = config.vision_config, TOWERS[config.model_type]
        side = vision.patch_size * vision.spatial_merge_size
        return Qwen2VLImageProcessorPil(
            size={"shortest_edge": 4 * side**2, "longest_edge": TOKENS * side**2}, patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size, image_mean=kind.mean, image_std=kind.std,
        )  # fmt: skip
    patch, pool = (12, 1) if config.model_type == "gemma4_unified" else (4, 3)
    return Gemma4ImageProcessorPil(patch_size=patch, pooling_kernel_size=pool, max_soft_tokens=TOKENS)


@cache
def lfm2_processor() -> Any:
    """Returns transformers' class for LFM2-VL, which is written for torchvision, with PIL in the place of that."""
    names = [".".join(("torchvision", "transforms", "v2", "functional")[:count]) for count in range(1, 5)]
    absent = {} if is_torchvision_available() else {name: ModuleType(name) for name in names}
    for name, module in absent.items():
        vars(module)["functional"] = absent[names[-1]] if name == names[2] else None
    sys.modules.update(absent)  # mock.patch.dict would empty sys.modules for a moment, in which other threads import
    try:
        from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
    finally:
        for name in absent:
            del sys.modules[name]

    class ByPil(TorchvisionBackend):
        def resize(self, image: torch.Tensor, size: Any, resample: Any = None, **_: Any) -> torch.Tensor:
            pictures = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in image]
            resized = [np.array(one.resize((size.width, size.height), resample)) for one in pictures]
            return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)

        def normalize(self, image: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
            return (image - mean[:, None, None]) / std[:, None, None]

    return type("Lfm2VlByPil", (Lfm2VlImageProcessor, ByPil), {})


class Lfm2Text:
    """The text that transformers' processor of LFM2-VL writes in place of an image."""

    @staticmethod
    def replace_image_token(own: Any, made: Any, number: int) -> str:
        """Returns it for an image that `own.image_processor` has made."""
        processor = object.__new__(Lfm2VlProcessor)
        names = {"start": "<|image_start|>", "end": "<|image_end|>", "thumbnail": "<|img_thumbnail|>"}
        vars(processor).update({f"image_{name}_token": token for name, token in names.items()})
        processor.image_processor, processor.image_token = own.image_processor, "<image>"
        return str(processor.replace_image_token(made, number, use_image_special_tokens=True))


@dataclass
class Document:
    """A document: ids, labels, the image arguments of transformers' forward, and the kit's slots.

    Attributes:
        slots: By image or tile: its pixels uint8 (patches, numbers), its positions or None, and its soft tokens.
    """

    ids: list[int]
    labels: list[int]
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    slots: list[tuple[torch.Tensor, torch.Tensor | None, int]] = field(default_factory=list)


def _processed(config: Any, image: Image.Image) -> tuple[dict[str, torch.Tensor], list[Any]]:
    processor = image_processor(config)
    if config.model_type in ("smolvlm", "idefics3"):
        made = processor(images=[[image]], return_tensors="pt")
        plain = processor(images=[[image]], return_tensors="pt", do_rescale=False, do_normalize=False)
        size = config.vision_config.patch_size
        side = config.vision_config.image_size // size
        pixels = plain["pixel_values"][0].reshape(-1, 3, side, size, side, size).permute(0, 2, 4, 3, 5, 1)
        pixels = pixels.reshape(len(pixels), side**2, 3 * size**2).round().to(torch.uint8)
        tokens = side**2 // config.scale_factor**2
        given = {name: made[name][0] for name in ("pixel_values", "pixel_attention_mask")}
        return given, [(tile, None, tokens) for tile in pixels]
    if config.model_type == "gemma3":
        made = processor(images=[image], return_tensors="pt")
        plain = processor(images=[image], return_tensors="np", do_rescale=False, do_normalize=False)["pixel_values"]
        pixels = torch.from_numpy(patches_of(plain, config.vision_config.patch_size)[0])
        return {"pixel_values": made["pixel_values"]}, [(pixels, None, config.mm_tokens_per_image)]
    if config.model_type == "lfm2_vl":
        made = processor(images=[image], return_tensors="pt")
        slots, length = list[Any](), made["pixel_values"].shape[1]
        for values, (rows, columns) in zip(made["pixel_values"], made["spatial_shapes"].tolist(), strict=True):
            order = torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2).transpose(1, 2).flatten()
            places = torch.stack([order % columns, order // columns], 1).to(torch.int32)
            numbers = ((values[order] * 0.5 + 0.5) * 255).round().to(torch.uint8)
            room = length - len(order)
            pixels = torch.nn.functional.pad(numbers, (0, 0, 0, room))
            slots.append((pixels, torch.nn.functional.pad(places, (0, 0, 0, room), value=-1), len(order) // 4))
        return dict(made), slots
    if config.model_type in GRIDS:
        sides, merge = config.vision_config.patch_size, config.vision_config.spatial_merge_size
        made = processor(images=[image], return_tensors="pt")
        plain = processor(images=[image], return_tensors="pt", do_rescale=False, do_normalize=False)["pixel_values"]
        numbers = plain.unflatten(1, (3, -1, sides**2))[:, :, 0].flatten(1).round().to(torch.uint8)
        places = get_vision_position_ids(made["image_grid_thw"], merge).flip(1).to(torch.int32)
        room = TOKENS * merge**2 - len(numbers)
        slot = (
            torch.nn.functional.pad(numbers, (0, 0, 0, room)),
            torch.nn.functional.pad(places, (0, 0, 0, room), value=-1),
        )
        given = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
        return given, [(*slot, len(numbers) // merge**2)]
    made = processor(images=[image], return_tensors="pt")
    pixels, positions = made["pixel_values"][0], made["image_position_ids"][0]
    numbers = (pixels * 255).round().to(torch.uint8)
    scaled = numbers.float() * (1 / 255)
    assert torch.allclose(scaled, pixels, rtol=2e-7, atol=0), "numpy scales in fp64, torchvision exactly so"
    given = {"pixel_values": scaled[None], "image_position_ids": positions[None]}
    return given, [(numbers, positions.to(torch.int32), int(made["num_soft_tokens_per_image"][0]))]


def document(config: Any, images: Sequence[Image.Image], seed: int, before: int = 5, after: int = 7) -> Document:
    """Makes a document of random text around images."""
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(3, 280, (count,), generator=generator).tolist()

    ids, made, parts = [2, *text(before)], Document([], []), list[dict[str, torch.Tensor]]()
    for image in images:
        given, slots = _processed(config, image)
        for *_, tokens in slots:
            ids += [BEGIN] + [IMAGE] * tokens + [END]
        parts.append(given)
        made.slots += slots
        ids += text(3)
    ids += text(after)
    made.given = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    made.ids, made.labels = ids, [-100] * (len(ids) - after) + ids[len(ids) - after :]
    return made


def documents(config: Any) -> list[list[Document]]:
    """Returns three rows of documents that have 0, 1 or 2 images."""
    one, other, wide = (document(config, [picture(i, SIZES[i])], i) for i in range(3))
    two = document(config, [picture(10, SIZES[3]), picture(11, SIZES[4])], 20)
    text = document(config, [], 30, 12, 9)
    return [[one, text, other], [two, wide], [text]]


def pack(config: Any, rows: Sequence[Sequence[Document]], images: int, length: int) -> dict[str, torch.Tensor]:
    """Packs documents into rows that have space for `images`."""
    count = len(rows)
    batch = {
        "input_ids": torch.zeros(count, length, dtype=torch.int64), "labels": torch.full((count, length), -100),
        "position_ids": torch.zeros(count, length, dtype=torch.int64),
        "segment_ids": torch.zeros(count, length, dtype=torch.int32),
    }  # fmt: skip
    for name, (shape, dtype) in vision.columns(config, images, length, TOKENS).items():
        batch[name] = torch.zeros(count, *shape, dtype=dtype)
    batch["image_index"].fill_(-1)
    most = vision.sizes_of(config, TOKENS).tokens
    for row, held in enumerate(rows):
        end = slot = 0
        for segment, one in enumerate(held, 1):
            here = slice(end, end + len(one.ids))
            batch["input_ids"][row, here], batch["labels"][row, here] = torch.tensor(one.ids), torch.tensor(one.labels)
            batch["position_ids"][row, here], batch["segment_ids"][row, here] = torch.arange(len(one.ids)), segment
            places = [end + place for place, token in enumerate(one.ids) if token == IMAGE]
            for pixels, positions, tokens in one.slots:
                batch["pixels"][row, slot] = pixels
                if positions is not None:
                    batch["patch_positions"][row, slot] = positions
                batch["image_index"][row, places[:tokens]] = torch.arange(tokens, dtype=torch.int32) + slot * most
                places, slot = places[tokens:], slot + 1
            assert not places
            if "axis_positions" in batch:
                batch["axis_positions"][row, :, here] = torch.from_numpy(axes_of(config, one))
            end += len(one.ids)
    return batch


def axes_of(config: Any, one: Document) -> np.ndarray:
    """Returns the positions of a document in three axes."""
    if not one.slots:
        return np.arange(len(one.ids), dtype=np.int32)[None].repeat(3, 0)
    positions = np.stack([places.numpy() for _, places, _ in one.slots if places is not None])
    counts, merge = [count for *_, count in one.slots], config.vision_config.spatial_merge_size
    return vision.axis_positions(np.array(one.ids) == IMAGE, counts, positions, merge)


def room_of(rows: Sequence[Sequence[Document]]) -> tuple[int, int]:
    """Returns the most images of a row, and the row length that fits the longest row."""
    images = max(sum(len(one.slots) for one in row) for row in rows)
    return images, max(sum(len(one.ids) for one in row) for row in rows) + 3


def reference(model: Any, one: Document, served: bool = True) -> torch.Tensor:
    """Computes a document's logits by transformers; `served`: with the masks of its `generate`."""
    base, ids = models.base_model(model), torch.tensor(one.ids)[None]
    given = dict(one.given)
    if base.config.model_type in ("smolvlm", "idefics3"):
        given = {name: value[None] for name, value in given.items()}
    elif base.config.model_type != "lfm2_vl":
        types = {types_of(base.config): (ids == IMAGE).long()}
        given |= types
        if base.config.model_type in GRIDS and not one.slots:
            given = {}
        if served and base.config.model_type not in GRIDS:
            given["attention_mask"] = type(base).create_masks_for_generate(
                config=base.config, inputs_embeds=torch.zeros(*ids.shape, 4), attention_mask=torch.ones_like(ids),
                past_key_values=None, position_ids=torch.arange(ids.shape[1])[None], **types,
            )  # fmt: skip
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **given).logits[0]
    return logits


def types_of(config: Any) -> str:
    """Returns the name of the argument of transformers' `forward` that marks image tokens."""
    return "token_type_ids" if config.model_type == "gemma3" else "mm_token_type_ids"


@dataclass
class Result:
    """Logits of the documents in order, and gradients by name."""

    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]

    def differs_from(self, other: Result) -> tuple[float, float]:
        """Returns the largest differences of logits, by the largest logit, and of gradients, by their norm."""
        logits = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(self.logits, other.logits, strict=True))
        most = max(float(gradient.norm()) for gradient in other.gradients.values())
        pairs = [(self.gradients[name], own) for name, own in other.gradients.items() if own.norm() > 1e-3 * most]
        return logits, max(float((a - b).norm() / b.norm()) for a, b in pairs)


def of_transformers(
    model: Any, rows: Sequence[Sequence[Document]], attention: str = "eager", vision: bool = False
) -> Result:
    """Computes the documents separately, by transformers' own code."""
    ours = adapted(model, vision)
    models.base_model(ours).set_attn_implementation(attention)
    found, total = list[torch.Tensor](), torch.zeros(())
    for one in (one for row in rows for one in row):
        found.append(logits := reference(ours, one))
        total = total + torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(one.labels)[1:], reduction="sum")
    total.backward()
    gradients = {name: param.grad for name, param in ours.named_parameters() if param.grad is not None}
    return Result([logits.detach() for logits in found], gradients)


def rounding(
    model: Any, rows: Sequence[Sequence[Document]], wanted: Result, vision: bool = False
) -> tuple[float, float]:
    """Returns how much transformers' own results vary: sdpa against eager attention, or fp32 against fp64."""
    own = [of_transformers(model, rows, "sdpa", vision).differs_from(wanted)]
    if "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        exact = copy.deepcopy([[*row] for row in rows])
        for one in (one for row in exact for one in row):
            one.given = {
                name: value.double() if value.is_floating_point() else value for name, value in one.given.items()
            }
        own.append(wanted.differs_from(of_transformers(copy.deepcopy(model).double(), exact, vision=vision)))
    logits, gradients = zip(*own, strict=True)
    return max(logits), max(gradients)


def of_kit(
    model: Any, rows: Sequence[Sequence[Document]], rt: Any, remat: str = "full", vision: bool = False
) -> Result:
    """Computes packed rows by the kit, on a replica's device."""
    ours, config = adapted(model, vision), models.base_model(model).config
    batch = pack(config, rows, *room_of(rows))
    optim = OptimConfig(remat=remat, loss_chunk=32)  # type: ignore[arg-type]
    preparation.prepare_layers(ours, replace(TrainConfig(), optim=optim), rt.device_type)
    ours = models.to_device(ours, rt.local_device)
    (sent,) = rt.to_device([batch])
    with torch.no_grad():
        logits = models.logits(ours, sent)
    SupervisedObjective(optim)(ours, sent).loss.backward()
    rt.sync()
    named = {name: param.grad for name, param in ours.named_parameters() if param.grad is not None}
    values = rt.to_host([logits, *named.values()])
    found, whole = list[torch.Tensor](), values[0]
    for row, held in enumerate(rows):
        end = 0
        for one in held:
            found.append(whole[row, end : end + len(one.ids)])
            end += len(one.ids)
    return Result(found, unstacked(stacked_names(ours), dict(zip(named, values[1:], strict=True))))


# ------------------------------------------------------------------------------------------------------- in replicas


def compared(config: TrainConfig) -> dict[str, Any]:
    """Compares the model `run_name` with transformers, and counts the compiles and reads of its updates."""
    rt, shape = runtime.current(), CONFIGS[config.run_name]()
    rt.sync()  # torch_xla must start before the first backward pass on the CPU
    model = build(shape)
    rows = documents(shape)
    wanted = of_transformers(model, rows)
    found: dict[str, Any] = {"difference": of_kit(model, rows, rt).differs_from(wanted)}
    found["own"] = rounding(model, rows, wanted)
    return found | {"counts": _updates(config, model, rt)[1]}


def updated(config: TrainConfig) -> tuple[dict[str, list[float]], list[dict[str, int]]]:
    """Makes updates of the model `run_name`; returns its weights, and the compiles and reads of each update."""
    rt, shape = runtime.current(), CONFIGS[config.run_name]()
    with _generator:
        model = build(shape)
    return _updates(config, model, rt)


def _updates(config: TrainConfig, model: Any, rt: Any) -> tuple[dict[str, list[float]], list[dict[str, int]]]:
    shape = model.config
    with _generator:
        ours = adapted(model, config.lora.vision).train()
    held = documents(shape)
    images, length = room_of(held)
    # At ten times this rate, rounding grows a thousandfold in 30 updates, on a single device too. With a small eps
    # AdamW would turn each gradient that is only rounding into a step of the full rate.
    optim = OptimConfig(learning_rate=1e-4, loss_chunk=32, max_grad_norm=1.0, eps=1e-3)
    state = prepare_model(ours, replace(config, optim=optim), rt)
    objective, counts = SupervisedObjective(optim), list[dict[str, int]]()
    rt.sync()
    for step in range(1, 1 + (config.optim.max_steps or 0)):
        every = [[document(shape, [picture(4 * step + row, SIZES[(step + row) % 4])], step + row)] for row in range(4)]
        batch = pack(shape, every, images, length)
        rows = len(every) // rt.data_size
        mine = {name: torch.cat([value[rows * shard : rows * (shard + 1)] for shard in rt.data_shards])
                for name, value in batch.items()}  # fmt: skip
        before = rt.counters()
        *batches, sent = rt.to_device([mine, {"control": torch.tensor([1e-4, 0.0, float(step)])}])
        train_step(ours, state, batches, sent["control"], objective, optim, rt)
        rt.sync()
        after = rt.counters()
        counts.append({name: after[name] - before[name] for name in ("compiles", "host_syncs") if name in after})
    values = rt.to_host(list(state.params.values()))
    named = unstacked(state.stacks, dict(zip(state.params, values, strict=True)))
    return {name: value.flatten().tolist() for name, value in named.items()}, counts


def greedy(config: TrainConfig) -> tuple[list[list[int]], list[list[int]]]:
    """Decodes prompts with 0, 1 and 2 images in one batch; returns the kit's tokens and transformers' tokens."""
    rt, shape, new = runtime.current(), CONFIGS[config.run_name](), 8
    with _generator:
        model = build(shape)
    prompts = [one for row in documents(shape)[:2] for one in row]
    theirs = []
    plain = adapted(model)
    for one in prompts:
        ids = torch.tensor(one.ids)[None]
        given = {name: value[None] for name, value in one.given.items()} if shape.model_type == "smolvlm" else one.given
        if shape.model_type != "smolvlm" and (one.slots or shape.model_type not in GRIDS):
            given = given | {types_of(shape): (ids == IMAGE).long()}
        models.base_model(plain).set_attn_implementation("eager")
        with torch.no_grad():
            out = plain.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                eos_token_id=None, pad_token_id=0, cache_implementation="static", disable_compile=True, **given,
            )  # fmt: skip
        theirs.append(out[0, ids.shape[1] :].tolist())
    ours = models.to_device(adapted(model), rt.local_device)
    width = 192
    batch = pack(shape, [[one] for one in prompts], room_of([[one] for one in prompts])[0], width + 1)
    ids, lengths = filled([one.ids[:-1] for one in prompts], width, len(prompts))
    images = {name: batch[name] for name in vision.columns(shape, 1, width, TOKENS)}
    for name in {"image_index", "axis_positions"} & images.keys():
        images[name] = images[name][..., :width].contiguous()
    asked = Batch(ids, lengths, torch.tensor([one.ids[-1] for one in prompts]), images)
    decoder = Decoder(ours, rt, 16, width + new)
    with decoder.ready():
        cache, sampling = decoder.prefill(asked, 1, new), Sampling(new, temperature=0.0)
        state = decoder.begin(asked, 1, [False] * len(prompts), torch.zeros(new, len(prompts)), sampling)
        report = decoder.decode(state, cache, new)
    return report[0].long().T[:, :new].tolist(), theirs
