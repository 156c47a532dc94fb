"""Which layers of a model lie on which GPU of a replica that one process runs: pipeline, in transformers' device maps.

Letters: P GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from lp_runtime.config.settings import ModelConfig
from lp_runtime.errors import ConfigError, LookaheadError, ModelError, first_line
from lp_runtime.model.loading.loader import load_model, without_memory


class Part(NamedTuple):
    """Modules that stay together on one GPU.

    Attributes:
        names: of modules, and of parameters that lie in none of them.
        num_bytes: of their parameters and buffers.
        num_layers: decoder layers among them.
    """

    names: tuple[str, ...]
    num_bytes: int
    num_layers: int


def parts_of(model: PreTrainedModel) -> list[Part]:
    """Return a model's parts in the order in which a pass runs them: what comes before the decoder layers, each of the
    layers, and what comes after. A head that shares the embedding's weights lies with it.

    Args:
        model: may lie on torch's meta device.

    Raises:
        ModelError: if the decoder layers are not in one list.
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
    seen: set[int] = set()
    return [Part(tuple(names), _bytes_of(model, names, seen), number) for names, number in groups if names]


def _around(model: nn.Module, path: str) -> tuple[list[str], list[str]]:
    """Return the names of what a pass runs before a model's list of layers, and after it. What has no weights, such as
    rotary embeddings, is taken to be before, and so is what shares weights with something that is."""
    beside = _beside(model, path)
    weights = {name: _weights(each) for name, each in beside}
    names = list(weights)
    place = names.index(path)
    first = set[int]().union(*(weights[name] for name in names[:place]))
    later = names[place + 1 :]
    before = [name for name in later if not weights[name] or weights[name] & first]
    return names[:place] + before, [name for name in later if name not in before]


def _weights(item: nn.Module | torch.Tensor) -> set[int]:
    """Return the ids of the parameters of a module; of a tensor, its own."""
    return {id(item)} if isinstance(item, torch.Tensor) else {id(each) for each in item.parameters()}


def _beside(model: nn.Module, path: str) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """Return (name, module or tensor) of the list of layers and of all that lies beside it and beside its ancestors, in
    the order of registration."""
    found: list[tuple[str, nn.Module | torch.Tensor]] = []

    def walk(module: nn.Module, prefix: str) -> None:
        found.extend((prefix + name, each) for name, each in module.named_parameters(recurse=False))
        found.extend((prefix + name, each) for name, each in module.named_buffers(recurse=False))
        for name, child in module.named_children():
            if path.startswith(f"{prefix}{name}."):
                walk(child, f"{prefix}{name}.")
            else:
                found.append((prefix + name, child))

    walk(model, "")
    return found


def _bytes_of(model: nn.Module, names: Sequence[str], seen: set[int]) -> int:
    """Return the bytes of tensors that were not seen before."""
    total = 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in seen and any(name == each or name.startswith(f"{each}.") for each in names):
            seen.add(id(tensor))
            total += tensor.nbytes
    return total


def stages_of(parts: Sequence[Part], num_gpus: int) -> list[int]:
    """Return the GPU of each part, ascending, such that the GPUs hold about equally many bytes.

    Args:
        parts: see `parts_of`.
        num_gpus: P.
    """
    total, begun = sum(each.num_bytes for each in parts), 0
    stages = []
    for part in parts:
        middle = begun + part.num_bytes // 2
        stages.append(min(num_gpus - 1, middle * num_gpus // max(1, total)))
        begun += part.num_bytes
    return stages


def device_map_of(parts: Sequence[Part], devices: Sequence[torch.device]) -> dict[str, str]:
    """Return the device of every part, as from_pretrained takes it.

    Args:
        parts: see `parts_of`.
        devices: [P] of the replica's process.
    """
    stages = stages_of(parts, len(devices))
    return {name: str(devices[stage]) for part, stage in zip(parts, stages, strict=True) for name in part.names}


def load_in_stages(config: ModelConfig, device: torch.device, num_gpus: int, dtype: str) -> PreTrainedModel:
    """Load a model whose layers lie on several GPUs of this process; between them, accelerate's hooks move what is
    computed. On a CPU all lie there.

    Args:
        config: where the model is, and how it is loaded.
        device: of the first layers; those that follow are on the GPUs with the next indices.
        num_gpus: P.
        dtype: see `load_model`.

    Raises:
        ConfigError: if this process sees too few GPUs.
        ModelError: if the model cannot be loaded, or divided.
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
    except Exception as error:  # what configurations and the library's many models raise
        raise ModelError(f"model.path={config.location}: cannot be loaded: {first_line(error)}") from error
    return load_model(dataclasses.replace(config, device_map=device_map_of(parts, devices)), device, dtype)
