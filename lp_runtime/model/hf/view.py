"""View: a second set of module objects that share one model's weights.

Decoding a token tree needs eval mode and an attention that accepts a tree's mask; plain `generate` must see neither.
Setting them on the caller's model would change the results of other threads, and an interrupt would leave them set. A
view has separate modules and a separate configuration, and shares the caller's parameters and buffers. What is set on a
view affects the view alone; the model is only read.
"""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.model.hf.config import attention_settings, of_text_model

# Dictionaries of a module that a forward pass or `nn.Module` itself may write to: each view gets a copy.
OWN_DICTS = ("_parameters", "_buffers")
COMPILED = "_torchdynamo_orig_callable"  # torch.compile's attribute that holds the uncompiled callable


def view_of(model: PreTrainedModel, attention: str | None = None) -> PreTrainedModel:
    """Return a view of a model, in eval mode, with `attention` as its text attention unless that is None.

    A view is a snapshot: weights changed in place later change in the view, too; adapters, hooks and flags set later do
    not. It takes a few microseconds per module, and no memory for weights.
    """
    modules = dict(model.named_modules())
    views = {id(module): object.__new__(type(module)) for module in modules.values()}
    configs: dict[int, Any] = {}  # copies by id, as copy.deepcopy keeps them: sub-configurations stay shared
    for module in modules.values():
        attributes = {name: _viewed(value, views, configs) for name, value in vars(module).items()}
        for name in OWN_DICTS:
            attributes[name] = copy.copy(attributes[name])
        attributes["_modules"] = {
            name: child if child is None else views[id(child)] for name, child in vars(module)["_modules"].items()
        }
        attributes["training"] = False
        vars(views[id(module)]).update(attributes)
    view: PreTrainedModel = views[id(model)]
    if attention is not None and (settings := of_text_model(view, attention)) != attention_settings(view):
        view.set_attn_implementation(settings)
    return view


def _viewed(value: Any, views: dict[int, nn.Module], configs: dict[int, Any]) -> Any:
    """Return a module's attribute as the module's view has it; `views` are by `id` of the module."""
    value = getattr(value, COMPILED, value)
    if isinstance(value, nn.Module):
        return views.get(id(value), value)
    if isinstance(value, PreTrainedConfig):
        return copy.deepcopy(value, configs)
    if isinstance(value, MethodType):  # a method replaced on the instance, e.g. by accelerate
        return MethodType(value.__func__, _viewed(value.__self__, views, configs))
    if isinstance(value, functools.partial):
        arguments = [_viewed(each, views, configs) for each in value.args]
        partial = functools.partial(_viewed(value.func, views, configs), *arguments, **value.keywords)
        vars(partial).update(vars(value))
        return partial
    if type(value) in (list, tuple) and any(isinstance(each, nn.Module) for each in value):
        return type(value)(_viewed(each, views, configs) for each in value)
    return value
