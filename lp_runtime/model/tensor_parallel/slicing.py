"""Conversion of a model that transformers loaded in slices into a shard of our own.

transformers' tensor-parallel plan of a model family says how each layer is split, and its loader reads each process's
part of every weight from the checkpoint. The result has DTensors, and wrapped forward methods that call collectives of
the default process group. This module turns them into plain parameters, and into modules that sum over the replica's
own link (layers.py). Blocks can then be fused and linear layers packed as in a whole model, and a lost shard is noticed
at once.

Letters: P shards.
"""

from __future__ import annotations

import re

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.distributed.reducers import Reducer
from lp_runtime.distributed.shards import ShardLink, ShardPlace
from lp_runtime.errors import ModelError
from lp_runtime.model.hf.config import field_of
from lp_runtime.model.tensor_parallel.layers import GatheredLinear, RowwiseLinear, SummedOutputs, VocabularyEmbedding

# Styles of transformers' plans. Modules of the local ones just compute with their slices; a later module sums.
PACKED_STYLES = ("packed_colwise", "packed_rowwise")
LOCAL_STYLES = ("colwise", *PACKED_STYLES, "local_params", "replicate", "replicated_with_grad_allreduce")
SUMMED_STYLES = ("moe_tp_experts", "all_reduce")  # of modules whose outputs are summed
ROW_STYLES = ("rowwise", "rowwise_split_input", "rowwise_rep")
GATHERED_STYLES = ("colwise_gather_output", "colwise_rep")
STYLES = (*LOCAL_STYLES, *SUMMED_STYLES, *ROW_STYLES, *GATHERED_STYLES, "embedding_rowwise")
KEYS = ("k_proj", "qkv_proj", "query_key_value")  # layers whose outputs contain keys
WHOLE_BIASES = ("down_proj_bias",)  # of experts: every shard has the full bias, and adds it to its part of a sum
# Plans for model types that have none in transformers. In gpt_oss an expert's gate and up columns alternate.
OWN_PLANS = {
    "gpt_oss": {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.sinks": "colwise",
        "model.layers.*.self_attn": "local_params",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.experts.gate_up_proj": "rowwise",
        "model.layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "model.layers.*.mlp.experts.down_proj": "colwise",
        "model.layers.*.mlp.experts": "moe_tp_experts",
    }
}
LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

Weights = dict[int, tuple[torch.Tensor, nn.Parameter]]  # by id(DTensor): (DTensor, the slice that replaces it)


def own_plan(config: PreTrainedConfig) -> dict[str, str] | None:
    """Return our tensor-parallel plan for a model type that has none in transformers; None for all others."""
    plan = OWN_PLANS.get(config.model_type)
    if plan is None:
        return None
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES  # takes seconds: imports DTensor

    return {name: style for name, style in plan.items() if style in ALL_PARALLEL_STYLES}  # fewer before 5.23


def check_shards(config: PreTrainedConfig, num_shards: int) -> None:
    """Raise ModelError, naming what cannot be divided, if a configuration rules out P shards."""
    text = config.get_text_config()
    what = f"gpus_per_replica={num_shards}: {text.model_type}"
    if is_quantized(config):
        raise ModelError(f"{what}: a quantized model cannot be sliced; only with gpus_per_replica=1")
    plan = own_plan(config) or getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise ModelError(f"{what}: transformers has no tensor-parallel plan for models of this type")
    _check_styles(what, plan)
    for name, number in _divided(text, plan).items():
        if number and number % num_shards:
            raise ModelError(f"{what}: {name}={number}: must be a multiple of gpus_per_replica")


def is_quantized(config: PreTrainedConfig) -> bool:
    parts = (config, config.get_text_config())
    return any(getattr(each, "quantization_config", None) is not None for each in parts)


def splits_keys(config: PreTrainedConfig) -> bool:
    """Whether shards divide keys and values: plans of some types (phi3, olmo2) gather them on every shard."""
    plan = own_plan(config) or getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    return any(name.rpartition(".")[2] in KEYS and style == "colwise" for name, style in plan.items())


def is_split(plan: dict[str, str], name: str, num_dimensions: int) -> int | None:
    """Return the dimension in which shards divide a parameter; None if every shard holds it whole."""
    pattern = LAYER_NUMBER.sub("*", name)
    style = plan.get(pattern)
    if style is None:
        module = plan.get(pattern.rpartition(".")[0])
        style = None if module in SUMMED_STYLES else module  # these only say that outputs are summed
    if style in ROW_STYLES or style == "packed_rowwise":  # split by input, the last dimension; a bias has no inputs
        return num_dimensions - 1 if num_dimensions > 1 else None
    if style in ("colwise", "packed_colwise", *GATHERED_STYLES):
        return max(0, num_dimensions - 2)
    return 0 if style == "embedding_rowwise" else None


def _divided(config: PreTrainedConfig, plan: dict[str, str]) -> dict[str, int]:
    """Return the fields of a (text) configuration that must be multiples of P, with their values."""
    numbers: dict[str, int] = {}
    if splits_keys(config):
        for name in ("num_attention_heads", "num_key_value_heads"):
            numbers[name] = field_of(config, name) or 0  # without key/value heads there are as many as of heads
    if config.model_type in OWN_PLANS or any(style in PACKED_STYLES for style in plan.values()):
        width = "intermediate_size" if field_of(config, "moe_intermediate_size") is None else "moe_intermediate_size"
        numbers[width] = field_of(config, width)
    return numbers


def _check_styles(what: str, plan: dict[str, str]) -> None:
    for name, style in plan.items():
        if style not in STYLES:
            raise ModelError(f"{what}: layers {name} are split as {style}, which is not supported")


def slice_model(model: PreTrainedModel, link: ShardLink) -> None:
    """Turn a model that transformers loaded in slices into a shard that reduces over `link`, in place."""
    place, plan = link.place, dict(model.tp_plan)
    _check_styles(f"gpus_per_replica={place.num_shards}: {model.config.model_type}", plan)
    weights: Weights = {}
    for module in model.modules():
        vars(module).pop("forward", None)  # transformers' wrapper, which would call its own collectives
        _keep_slices(module, weights)
    for name, module in reversed(list(model.named_modules())):  # children before the modules that contain them
        style = plan.get(LAYER_NUMBER.sub("*", name))
        if style is not None and style != "replicate":
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], _replaced(module, style, link.reducer, place))


def _keep_slices(module: nn.Module, weights: Weights) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if hasattr(parameter, "to_local"):  # a DTensor; importing its class takes seconds
            if id(parameter) not in weights:
                part = parameter.to_local().detach()
                if part.untyped_storage().nbytes() > part.numel() * part.element_size():
                    part = part.clone()  # the slice is a view into a memory-mapped checkpoint: release that
                weights[id(parameter)] = parameter, nn.Parameter(part, requires_grad=False)
            setattr(module, name, weights[id(parameter)][1])


def _replaced(module: nn.Module, style: str, reducer: Reducer, place: ShardPlace) -> nn.Module:
    """Set a module's sizes to those of its slice, and wrap it if the shards' outputs must be combined."""
    if style in SUMMED_STYLES:
        _add_biases_once(module, place)
        return SummedOutputs(module, reducer)
    if isinstance(module, nn.Embedding):
        chunk = _chunk(module.num_embeddings, place)
        module.num_embeddings, module.padding_idx = len(module.weight), None  # this slice may lack the padding index
        return VocabularyEmbedding(module, reducer, chunk * place.shard)
    if not isinstance(module, nn.Linear):
        return module
    num_inputs, num_outputs = module.in_features, module.out_features
    module.out_features, module.in_features = module.weight.shape
    if style in ROW_STYLES:
        return RowwiseLinear(module, reducer, style != "rowwise", _chunk(num_inputs, place) * place.shard)
    if style in GATHERED_STYLES:
        chunk = _chunk(num_outputs, place)
        sizes = [max(0, min(chunk, num_outputs - chunk * shard)) for shard in range(place.num_shards)]
        return GatheredLinear(module, reducer, sizes, place.shard)
    return module


def _chunk(size: int, place: ShardPlace) -> int:
    return -(-size // place.num_shards)


def _add_biases_once(module: nn.Module, place: ShardPlace) -> None:
    """Zero WHOLE_BIASES on all shards except the first, so that the sum of the outputs contains each once."""
    for name, parameter in module.named_parameters(recurse=False):
        if name in WHOLE_BIASES and not place.is_leader:
            parameter.data.zero_()
