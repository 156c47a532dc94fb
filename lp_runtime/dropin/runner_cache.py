"""Runners of callers' models; those with captured passes are kept between calls of the drop-in.

A captured graph is bound to the weights' addresses and the modules at capture time. So a runner is only reused if the
model has not changed since, and by one call at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.config.settings import ModelConfig
from lp_runtime.errors import ConfigError, ModelError
from lp_runtime.kernels.dispatch import kernels_for
from lp_runtime.model.attention.choice import ATTENTIONS
from lp_runtime.model.checks.make_runner import make_runner
from lp_runtime.model.forward.cuda_graph import why_uncapturable
from lp_runtime.model.hf.config import attention_of
from lp_runtime.model.hf.view import view_of
from lp_runtime.model.runner import ModelRunner
from lp_runtime.model.tensor_parallel.tp_plan import tp_size_of

PLAIN = (bool, int, float, str, type(None))  # compared by value
UNREAD = ("training",)  # attributes that do not matter: a view is always in eval mode


def state_of(model: PreTrainedModel) -> tuple:
    """Return a comparable summary of all that a view of a model depends on.

    It covers modules, attributes, hooks and the addresses of weights, but not the weights' values, which a view shares.
    """
    configs: dict[int, str] = {}
    return tuple(
        (id(module), *((name, _state(value, configs)) for name, value in vars(module).items() if name not in UNREAD))
        for module in model.modules()
    )


def _state(value: Any, configs: dict[int, str]) -> Any:
    """Return a comparable summary of a module's attribute; `configs` caches the text of configs by id."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.dtype, value.device, tuple(value.shape)
    if isinstance(value, dict):
        return tuple((str(key), _state(each, configs)) for key, each in value.items())
    if isinstance(value, list | tuple | set):
        return tuple(_state(each, configs) for each in value)
    if isinstance(value, PreTrainedConfig):
        if id(value) not in configs:
            configs[id(value)] = repr(value.to_dict())
        return configs[id(value)]
    return id(value), type(value) if isinstance(value, nn.Module) else None


def runner_of(model: PreTrainedModel, strict_tokens: int | None) -> ModelRunner:
    """Return a runner of a view of a model; on a GPU its passes are captured if possible."""
    attention = attention_of(model.config.get_text_config())
    view = view_of(model, None if attention in ATTENTIONS else "sdpa")
    is_split = tp_size_of(model) > 1
    on_gpu = kernels_for(model.device) is not None and not is_split
    runner = make_runner(view, ModelConfig.prefill_chunk, strict_tokens, own_attention=on_gpu)
    if is_split and runner.feeds_chains:
        raise ModelError(
            f"{model.config.model_type}: must not be split over ranks (tp_plan): the model is fed chains of guesses"
        )
    if on_gpu and not runner.feeds_chains and why_uncapturable(runner.tree_model) is None:
        runner.enable_graphs(capture=True, refuses_waits=False)  # other threads may wait for the GPU
    runner.refuses_batches = True  # rows are decoded one after the other
    return runner


class RunnerKeeper:
    """Cache of the last runner with captured passes of each model, for the lifetime of the model."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple, ModelRunner]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def runner(self, model: PreTrainedModel, kind: tuple, make: Callable[[], ModelRunner]) -> Iterator[ModelRunner]:
        """Yield a runner in a `with` block: the kept one if the model has not changed, else one from `make`.

        Afterwards it is kept, without its KV caches, unless the block failed. `kind` holds the settings of the runner,
        which must be equal too. A call inside autocast is refused, because a pass has other dtypes there than the
        model.
        """
        if torch.is_autocast_enabled(model.device.type):
            raise ConfigError("torch.autocast: must be off; load the model in the dtype to compute in")
        if model.device.type != "cuda":  # nothing is captured
            yield make()
            return
        state = kind, state_of(model)
        with self._lock:
            before, runner = self._kept.pop(model, (None, None))
        if runner is None or before != state:
            runner = make()
        yield runner
        runner.slots.clear()
        if runner.graphs is not None:
            with self._lock:
                self._kept[model] = state, runner
