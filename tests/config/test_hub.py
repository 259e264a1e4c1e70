"""Section `hub`: names that the hub would refuse, and runs that cannot push, are refused when the file is read."""

from __future__ import annotations

from typing import Any

import pytest

from tpu_kit.config.hub import read_hub_address
from tpu_kit.config.loader import ConfigError, load_config
from tpu_kit.config.named_values import EXPORT_FORMATS
from tpu_kit.exporting.options import format_named

NAME = "ann/tuned"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model_id": "tuned"}, "hub.model_id: 'tuned' has no owner; write owner/name, as in your-name/tuned"),
        *(({"model_id": name}, " is no repository name; write owner/name, both of letters, digits and single - . _")
          for name in ("ann/a b", "ann/-a", "ann/a..b", "ann/a--b", "ann/a.git", "a/b/c", "ann/" + 97 * "a", "/a")),
        ({"hub.revision": "a..b"}, "hub.revision: 'a..b' is no branch; name one, such as main"),
        ({"hub.revision": "a" * 40}, "is no branch; name one, such as main"),
        ({"hub.format": "words"}, f"'words' has 'words'; the formats are {', '.join(EXPORT_FORMATS)}"),
        ({"hub.format": ["merged", "merged"]}, "names a format twice; remove one"),
        ({"checkpoint.source": "ann/tuned"}, "is no address on the hub; write hf://owner/name or hf://owner/name@com"),
        ({"checkpoint.source": "hf://tuned"}, "has no owner; write owner/name, as in your-name/tuned"),
        ({"output_dir": "hf://ann/tuned"},
         "output_dir: 'hf://ann/tuned' is on the hub, whose file system cannot exclude a second writer; set a "
         "folder or gs://, and hub.model_id=owner/name with hub.strategy=checkpoint to push checkpoints"),
        ({"output_dir": "hf://ann/tuned", "model_id": NAME, "strategy": "checkpoint", "checkpoint.source": "hf://a/b"},
         "output_dir: 'hf://ann/tuned' is on the hub"),
        ({"private": False}, "has no effect without a repository; remove it or set hub.model_id=owner/name"),
        ({"model_id": NAME, "strategy": "checkpoint", "output_dir": "gs://bucket/run"},
         "is for checkpoints on a local disk, but output_dir outlives the machine; set hub.strategy=end"),
        ({"checkpoint.source": "hf://a/b", "output_dir": "gs://bucket/run"}, "is fetched to a local folder; set out"),
        ({"checkpoint.source": "hf://a/b", "resume": "never"}, "continues an earlier run, but checkpoint.resume="),
        ({"model_id": NAME, "lora.r": 0, "hub.format": ["adapter"]},
         "has adapter, but lora.r=0 trains the whole model; set hub.format=[merged]"),
        ({"model_id": NAME, "objective": "error-correction", "hub.format": "merged"},
         "cannot hold the error-correction head; set hub.format=[adapter]"),
        ({"model_id": NAME, "objective": "error-correction-alone"}, "no format holds the head that this obj"),
        (
            {"model_id": NAME, "model.images": True, "lora.vision": True, "hub.format": "gguf-lora"},
            "has gguf-lora, which holds no weights of the vision part; set hub.format=[adapter] or [gguf-f16]",
        ),
    ],
)  # fmt: skip
def test_what_could_not_be_pushed_is_one_line(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, values)
    (line,) = error.value.problems
    assert problem in line and "\n" not in line


def test_the_format_that_is_pushed() -> None:
    assert load_config(None, {"model_id": NAME}).hub_formats == ("adapter",)
    assert load_config(None, {"model_id": NAME, "lora.r": 0}).hub_formats == ("merged",)
    assert load_config(None, {"model_id": NAME, "hub.format": "gguf-f16"}).hub_formats == ("gguf-f16",)


def test_each_format_says_what_it_is_to_the_base() -> None:
    relations = {name: format_named(name).relation for name in EXPORT_FORMATS}
    assert relations == {
        "adapter": "adapter", "merged": "finetune", "vllm": "finetune", "gguf-f16": "finetune",
        "gguf-bf16": "finetune", "gguf-q8_0": "quantized", "gguf-lora": "adapter",
    }  # fmt: skip


def test_addresses_of_the_hub() -> None:
    assert read_hub_address("hf://ann/tuned") == (NAME, None)
    assert read_hub_address(f"hf://ann/tuned@{'a' * 40}") == (NAME, "a" * 40)
