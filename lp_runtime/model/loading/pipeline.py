"""Pipeline placement: which layers of a model go to which GPU of a single-process replica.

Letters: P GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from lp_runtime.config.settings import ModelConfig
from lp_runtime.errors import ConfigError, LookaheadError, ModelError, first_line
from lp_runtime.model.loading.loader import load_model, without_memory


class Part(NamedTuple):
    """Modules that stay together on one GPU."""

    names: tuple[str, ...]  # of modules, and of parameters and buffers outside of these
    num_bytes: int  # of parameters and buffers; a tensor shared between parts counts in the first only
    num_layers: int


def parts_of(model: PreTrainedModel) -> list[Part]:
    """Split a model into parts in execution order: all before the decoder layers, each layer, the rest.

    A head that shares the embedding's weights stays with the embedding. The model may be on torch's meta device.
    Raises ModelError if the decoder layers are not in one list.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = (
        name for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each) == num_layers
    )
    path = next(lists, None)
    if path is None:
        raise ModelError(
            f"model.parallelism=pipeline: {model.config.model_type}: has no list of its {num_layers} layers"
        )
    before, after = _around(model, path)
    layers = [[f"{path}.{index}"] for index in range(num_layers)]
    groups = [(before, 0), *((names, 1) for names in layers), (after, 0)]
    num_bytes = _bytes_by_name(model, {name for names, _ in groups for name in names})
    return [Part(tuple(names), sum(map(num_bytes.__getitem__, names)), number) for names, number in groups if names]


def _around(model: nn.Module, path: str) -> tuple[list[str], list[str]]:
    """Return the names of modules and tensors that a pass uses before a model's list of layers, and after.

    Items without weights, such as rotary embeddings, count as before, and so do items that share weights with an item
    registered before the list.
    """
    outside = _outside(model, path)
    weights = {name: _weights(each) for name, each in outside}
    names = list(weights)
    place = names.index(path)
    first = set[int]().union(*(weights[name] for name in names[:place]))
    later = names[place + 1 :]
    before = [name for name in later if not weights[name] or weights[name] & first]
    return names[:place] + before, [name for name in later if name not in before]


def _weights(item: nn.Module | torch.Tensor) -> set[int]:
    return {id(item)} if isinstance(item, torch.Tensor) else {id(each) for each in item.parameters()}


def _outside(model: nn.Module, path: str) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """Return (name, module or tensor) of the list of layers at `path` and of everything outside of it.

    Modules that contain the list are descended into; all others are listed whole, in registration order.
    """
    outside: list[tuple[str, nn.Module | torch.Tensor]] = []

    def walk(module: nn.Module, prefix: str) -> None:
        outside.extend((prefix + name, each) for name, each in module.named_parameters(recurse=False))
        outside.extend((prefix + name, each) for name, each in module.named_buffers(recurse=False))
        for name, child in module.named_children():
            if path.startswith(f"{prefix}{name}."):
                walk(child, f"{prefix}{name}.")
            else:
                outside.append((prefix + name, child))

    walk(model, "")
    return outside


def _bytes_by_name(model: nn.Module, names: Collection[str]) -> dict[str, int]:
    """Return the bytes of each of the named modules and tensors, which do not contain each other."""
    num_bytes = dict.fromkeys(names, 0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:  # each shared tensor once
        while name and name not in num_bytes:
            name = name.rpartition(".")[0]
        if name:
            num_bytes[name] += tensor.nbytes
    return num_bytes


def stages_of(parts: Sequence[Part], num_gpus: int) -> list[int]:
    """Return the GPU index of each part, ascending, so that the GPUs hold about the same number of bytes."""
    total, begun = sum(each.num_bytes for each in parts), 0
    stages = []
    for part in parts:
        middle = begun + part.num_bytes // 2
        stages.append(min(num_gpus - 1, middle * num_gpus // max(1, total)))
        begun += part.num_bytes
    return stages


def device_map_of(parts: Sequence[Part], devices: Sequence[torch.device]) -> dict[str, str]:
    """Return the `device_map` for `from_pretrained` that distributes the parts over P devices."""
    stages = stages_of(parts, len(devices))
    return {name: str(devices[stage]) for part, stage in zip(parts, stages, strict=True) for name in part.names}


def load_in_stages(config: ModelConfig, device: torch.device, num_gpus: int, dtype: str) -> PreTrainedModel:
    """Load a model with its layers spread over several GPUs of this process, from `device` on.

    accelerate's hooks move activations between them. On a CPU all layers are on the CPU.
    """
    devices = [device] * num_gpus
    if device.type == "cuda":
        first = device.index or 0
        if first + num_gpus > torch.cuda.device_count():
            raise ConfigError(
                f"gpus_per_replica={num_gpus}: the replica needs GPUs {first} to {first + num_gpus - 1}, but its"
                f" process sees {torch.cuda.device_count()}"
            )
        devices = [torch.device("cuda", first + number) for number in range(num_gpus)]
    try:
        parts = parts_of(without_memory(config, dtype))
    except LookaheadError:
        raise
    except Exception as error:  # configurations and transformers' many models raise anything
        raise ModelError(f"model.path={config.location}: cannot be loaded: {first_line(error)}") from error
    return load_model(dataclasses.replace(config, device_map=device_map_of(parts, devices)), device, dtype)
