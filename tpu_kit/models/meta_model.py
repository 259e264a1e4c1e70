"""Builds models on PyTorch's "meta" device, without weights, and derives their shapes."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # transformers' models import it, and torch 2.8 cannot do that under `torch.device`
from torch.nn.modules.module import register_module_forward_hook

from tpu_kit.config.loader import ModelConfig
from tpu_kit.models import attention, experts, layer_calls, linear_attention
from tpu_kit.models.architecture import Experts, Layer, Linear, Shape, brief, locate, shipped_shape
from tpu_kit.models.loading import absent_family, leave_out_towers, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_RECORDED = "tpu_kit_recorded"
_MOST_POSITIONS = 2**30  # of a model that says none


def build(model: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Builds a base model from its config.json; call it under `torch.device("meta")`.

    Raises:
        ValueError: there is no configuration, it lacks sizes, or transformers cannot build the model.
    """
    from transformers import AutoModelForCausalLM

    settings = settings_of(model)
    try:
        built: PreTrainedModel = AutoModelForCausalLM.from_config(
            settings, dtype=dtype, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # for sizes that do not fit together a model's code may raise anything
        raise ValueError(
            f"model.name={model.name}: transformers cannot build a causal language model from its config.json: "
            f"{brief(error)}"
        ) from error
    built.tie_weights()
    return built


def settings_of(config: ModelConfig) -> Any:
    """Returns a model's configuration, that of assets/shapes.json where it has one.

    Raises:
        ValueError: there is none, or it lacks sizes.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    if (given := shipped_shape(config)) is not None:
        if given["model_type"] not in CONFIG_MAPPING:
            raise ValueError(absent_family(config, given["model_type"]))
        return CONFIG_MAPPING[given["model_type"]].from_dict(given)
    settings: Any = read_config(config, needed=True)
    if config.gguf_file:
        return settings
    given, _ = PreTrainedConfig.get_config_dict(locate(config), revision=config.revision)
    leave_out_towers(settings)
    # transformers replaces missing sizes by its defaults, which would silently plan another model.
    text, given = settings.get_text_config(), given.get("text_config", given)
    known = text.to_dict()  # not what a family computes, such as the number of layers of a list of them, or has not
    names = {name: getattr(text, "attribute_map", {}).get(name, name) for name in _SIZES}
    missing = [own for name, own in names.items() if own in known and name not in given and own not in given]
    if missing:
        raise ValueError(
            f"model.name={config.name}: its config.json lacks {', '.join(missing)}; take the whole file of the "
            "original model"
        )
    return settings


def derive(model: ModelConfig) -> Shape:
    """Derives the shape of a model.

    Raises:
        ValueError: as `build`; or its decoder does not run.
    """
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        return shape_of(build(model, torch.bfloat16), model.name)


def shape_of(model: PreTrainedModel, name: str) -> Shape:
    """Derives the shape of a model on "meta"; `name` is for messages.

    Raises:
        ValueError: its decoder does not run, or it has no list of layers.
    """
    decoder: Any = model.eval().get_decoder()
    experts.use(model)
    try:
        equal, kinds, order = _layers(decoder)
    except Exception as error:  # for sizes that do not fit together a model's code may raise anything
        raise ValueError(f"model.name={name}: {type(decoder).__name__} does not run: {brief(error)}") from error
    list_name, layers = layer_calls.layers_of(decoder)
    paths = {id(part): path for path, part in model.named_modules()}
    inside = {id(param) for param in layers.parameters()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    text, text_modules, in_layers = model.config.get_text_config(), {*decoder.modules()}, {*layers.modules()}
    return Shape(
        family=str(model.config.model_type), vocabulary=embedding.shape[0],
        hidden=int(getattr(text, "hidden_size", embedding.shape[1])), tied=head.weight is embedding,
        positions=getattr(text, "max_position_embeddings", None) or _MOST_POSITIONS,
        layers_path=".".join(filter(None, [paths[id(decoder)], list_name])),
        outside=tuple((n, tuple(p.shape)) for n, p in model.named_parameters() if id(p) not in inside),
        linears_outside=tuple(
            linear for path, part in model.named_modules()
            if part in text_modules and part not in in_layers and part is not head and (linear := _linear(path, part))
        ),
        kinds=tuple(kinds), order=tuple(order), equal=tuple(equal), sees_all=attention.sees_all(model),
    )  # fmt: skip


def _experts(path: str, part: Any, chosen: int) -> Experts:
    """Describes an experts module whose weights are as `experts.prepare` leaves them."""
    names = experts.names_of(part)
    sizes = {name: getattr(part, name).shape for name in names}
    linears = tuple(Linear(name, shape[2], shape[1], part.has_bias) for name, shape in sizes.items())
    return Experts(path, part.num_experts, chosen, linears)


def _linear(path: str, part: torch.nn.Module) -> Linear | None:
    """Describes a linear layer, also GPT-2's Conv1D, which stores its weight the other way round."""
    if isinstance(part, torch.nn.Linear):
        return Linear(path, part.in_features, part.out_features, part.bias is not None)
    if type(part).__name__ == "Conv1D":
        inputs, outputs = part.weight.shape  # type: ignore[misc]  # a matrix
        return Linear(path, inputs, outputs, True)
    return None


def _layers(decoder: Any) -> tuple[list[int], list[Layer], list[int]]:
    """Returns for each layer the number of its loop's turns, the kinds of layers, and the kind of each layer."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    attention.register()
    linear_attention.register(decoder)
    AttentionInterface.register(_RECORDED, _record_attention)
    AttentionMaskInterface.register(_RECORDED, ALL_MASK_ATTENTION_FUNCTIONS[attention.SDPA])
    name, layers = layer_calls.layers_of(decoder)
    try:
        equal, pairs = layer_calls.equal_layers(decoder, name, layers, [0] * len(layers))
    except layer_calls.CannotScanError:  # no loop: other devices run the layers one by one
        equal, pairs = list(range(len(layers))), False
    run = _FirstLayers(layers, equal, pairs)
    layer_calls.call_once(decoder, name, run, _RECORDED)
    kinds: list[Layer] = list(dict.fromkeys(run.kinds.values()))
    return equal, kinds, [kinds.index(run.kinds[number]) for number in equal]


_attention_calls: list[tuple[torch.nn.Module, int, int, int]] = []
"""(module, query heads, key-value heads, size of a head) of the calls within a layer; one thread derives at a time."""


def _record_attention(module: torch.nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    _attention_calls.append((module, query.shape[1], key.shape[1], query.shape[-1]))
    return attention.sdpa_attention(module, query, key, value, *args, **kwargs)


class _FirstLayers(layer_calls.Placeholders):
    """Runs the first of equal layers, and records what it calls."""

    def __init__(self, layers: torch.nn.ModuleList, equal: list[int], pairs: bool) -> None:
        super().__init__(layers, pairs)
        self.given, self.equal, self.kinds = list(layers), equal, dict[int, Layer]()

    def _visit(self, hidden: torch.Tensor, calls: list[layer_calls.Call]) -> torch.Tensor:
        place, call = len(calls) - 1, calls[-1]
        number = self.equal[place]
        if number in self.kinds:
            return hidden
        args, kwargs = call.arguments(call.tensors, call.mapping)
        output, self.kinds[number] = _kind(self.given[place], hidden, args, kwargs)
        return output


def _kind(layer: torch.nn.Module, hidden: torch.Tensor, args: Any, kwargs: Any) -> tuple[torch.Tensor, Layer]:
    modules, mixtures = dict(layer.named_modules()), dict(experts.modules_of(layer))
    paths = {part: path for path, part in modules.items()}
    routers, chosen = experts.routers_of(layer), dict.fromkeys(mixtures, 1)
    linears: dict[str, Linear] = {}
    results: dict[str, torch.Tensor] = {}
    inputs: list[Any] = []  # it keeps them, as the id of one that is gone may be another's

    def note(part: torch.nn.Module, given: Any, output: Any) -> None:
        if (path := paths.get(part)) is None:
            return
        if any(True for _ in part.parameters()):
            inputs.extend(given)
        if path in mixtures:
            chosen[path] = given[1].shape[-1]
        if path not in routers and (linear := _linear(path, part)):
            linears.setdefault(path, linear)
            results[path] = output

    _attention_calls.clear()
    states: list[tuple[int, int, int]] = []
    token, hook = linear_attention.sizes_of_states.set(states), register_module_forward_hook(note)
    try:
        output = layer_calls.hidden_states_of(layer(hidden, *args, **kwargs))
    finally:
        hook.remove()
        linear_attention.sizes_of_states.reset(token)
    for path, part in modules.items():  # what this input did not need
        if path not in linears and path not in routers and (linear := _linear(path, part)):
            linears[path] = linear
    owner, heads, kv_heads, size = _attention_calls[-1] if _attention_calls else (None, 0, 0, 0)
    attends = next((path for path, part in modules.items() if part is owner), None)
    sizes: dict[str, int] = {}
    for path, linear in linears.items():
        module = path.partition(".")[0]
        if "." in path and module != (attends or "").partition(".")[0]:
            sizes[module] = sizes.get(module, 0) + linear.parameters
    mlp = max(sizes, key=lambda module: sizes[module], default="")
    last = [path for path in linears if mlp and path.startswith(f"{mlp}.")][-1:]
    of_linears = {id(param) for path in (*linears, *mixtures) for param in modules[path].parameters(recurse=False)}
    others = tuple((n, tuple(p.shape)) for n, p in layer.named_parameters() if id(p) not in of_linears)
    follows = any(one is results.get(path, layer) for path in last for one in inputs)
    every = tuple(_experts(path, part, chosen[path]) for path, part in mixtures.items())
    state = sum(map(math.prod, states))
    return output, Layer(tuple(linears.values()), others, mlp, heads, kv_heads, size, follows, every, state)
