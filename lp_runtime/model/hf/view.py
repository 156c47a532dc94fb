"""A second set of module objects over one model's weights.

Decoding a token tree needs what plain `generate` must not see: eval mode, and an attention that takes a tree's mask.
Setting either on the caller's model would change what other threads compute, and an interrupt would leave it behind.
A view has modules and a configuration of its own, and the caller's parameters and buffers. What is set on a view stays
there; the model is only read.
"""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.model.hf.config import attention_settings, of_text_model

# Dictionaries of a module that a forward pass or `nn.Module` itself may write to: a view has its own.
OWN_DICTS = ("_parameters", "_buffers")
COMPILED = "_torchdynamo_orig_callable"  # attribute in which torch.compile keeps what it has compiled


def view_of(model: PreTrainedModel, attention: str | None = None) -> PreTrainedModel:
    """Return a view of a model, in eval mode.

    A view shows the model as it is now: weights that are changed in place are the view's, too; adapters, hooks and
    flags that are set later are not. It takes some microseconds a module and no memory for weights.

    Args:
        model: only read.
        attention: name of the view's text attention; None for the model's.
    """
    modules = dict(model.named_modules())
    views = {id(module): object.__new__(type(module)) for module in modules.values()}
    configs: dict[int, Any] = {}  # copies by id, as copy.deepcopy keeps them: sub-configurations stay shared
    for module in modules.values():
        attributes = {name: _seen(value, views, configs) for name, value in vars(module).items()}
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


def _seen(value: Any, views: dict[int, nn.Module], configs: dict[int, Any]) -> Any:
    """Return what stands for an attribute of a module in the module's view.

    Args:
        value: the attribute.
        views: views of all modules, by the module's id.
        configs: copies of configurations made so far.
    """
    value = getattr(value, COMPILED, value)
    if isinstance(value, nn.Module):
        return views.get(id(value), value)
    if isinstance(value, PreTrainedConfig):
        return copy.deepcopy(value, configs)
    if isinstance(value, MethodType):  # a method that was replaced on the instance, as accelerate does
        return MethodType(value.__func__, _seen(value.__self__, views, configs))
    if isinstance(value, functools.partial):
        arguments = [_seen(each, views, configs) for each in value.args]
        partial = functools.partial(_seen(value.func, views, configs), *arguments, **value.keywords)
        vars(partial).update(vars(value))
        return partial
    if type(value) in (list, tuple) and any(isinstance(each, nn.Module) for each in value):
        return type(value)(_seen(each, views, configs) for each in value)
    return value
