"""Makes a shard of a model that transformers has loaded slice by slice.

transformers' tensor-parallel plan of a family says which layer is split how, and its loader reads each process's part
of every weight from the checkpoint. What it leaves are DTensors and wrapped forward methods that call collectives of
the default process group. Here they become plain parameters, and modules that sum by means of the replica's own link
(layers.py): so blocks are fused and linear layers packed as in a whole model, and a lost shard is noticed at once.

Letters: P shards.
"""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.distributed.reducers import Reducer
from lp_runtime.distributed.shards import ShardLink, ShardPlace
from lp_runtime.errors import ModelError
from lp_runtime.model.tensor_parallel.layers import GatheredLinear, RowwiseLinear, VocabularyEmbedding

# Styles of transformers' plans whose modules compute with their slices as they are: what follows them sums.
PACKED_STYLES = ("packed_colwise", "packed_rowwise")
LOCAL_STYLES = ("colwise", *PACKED_STYLES, "local_params", "replicate", "replicated_with_grad_allreduce")
SUMMED_STYLES = ("moe_tp_experts", "all_reduce")  # of modules whose outputs are summed
ROW_STYLES = ("rowwise", "rowwise_split_input", "rowwise_rep")
GATHERED_STYLES = ("colwise_gather_output", "colwise_rep")
STYLES = (*LOCAL_STYLES, *SUMMED_STYLES, *ROW_STYLES, *GATHERED_STYLES, "embedding_rowwise")
KEYS = ("k_proj", "qkv_proj", "query_key_value")  # layers whose outputs hold keys
WHOLE_BIASES = ("down_proj_bias",)  # of experts: every shard has them, and adds them to a part of a sum
# Plans of types of models for which transformers has none. In gpt_oss an expert's gate and up columns alternate.
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

Weights = dict[int, tuple[torch.Tensor, nn.Parameter]]  # DTensors and the slices that have replaced them, by id


def own_plan(config: PreTrainedConfig) -> dict[str, str] | None:
    """Return our plan for a type of model for which transformers has none; None for all others."""
    plan = OWN_PLANS.get(config.model_type)
    if plan is None:
        return None
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES  # imports DTensor, for seconds

    return {name: style for name, style in plan.items() if style in ALL_PARALLEL_STYLES}  # before 5.23 it has fewer


def check_shards(config: PreTrainedConfig, num_shards: int) -> None:
    """Refuse a model that cannot be sliced, as far as its configuration tells.

    Args:
        config: the model's.
        num_shards: P.

    Raises:
        ModelError: naming what cannot be divided.
    """
    text = config.get_text_config()
    what = f"gpus_per_replica={num_shards}: {text.model_type}"
    if any(getattr(each, "quantization_config", None) is not None for each in (config, text)):
        raise ModelError(f"{what}: a quantized model cannot be sliced; only with gpus_per_replica=1")
    plan = own_plan(config) or getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise ModelError(f"{what}: transformers has no tensor-parallel plan for models of this type")
    _check_styles(what, plan)
    for name, number in _divided(text, plan).items():
        if number and number % num_shards:
            raise ModelError(f"{what}: {name}={number}: must be a multiple of gpus_per_replica")


def splits_keys(config: PreTrainedConfig) -> bool:
    """Whether shards of a model divide its keys and values, and not only its weights, by its configuration.

    Plans of some types (phi3, olmo2) put queries, keys and values together on every shard.
    """
    plan = own_plan(config) or getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    return any(name.rpartition(".")[2] in KEYS and style == "colwise" for name, style in plan.items())


def is_split(plan: dict[str, str], name: str, num_dimensions: int) -> int | None:
    """Return the dimension by which shards divide a parameter; None if every shard has it whole.

    Args:
        plan: styles by names of modules and parameters, with * for numbers of layers.
        name: the parameter's.
        num_dimensions: of the parameter.
    """
    pattern = LAYER_NUMBER.sub("*", name)
    style = plan.get(pattern)
    if style is None:
        module = plan.get(pattern.rpartition(".")[0])
        style = None if module in SUMMED_STYLES else module  # which are of outputs; weights have styles of their own
    if style in ROW_STYLES or style == "packed_rowwise":  # of inputs: the last dimension, of which a bias has none
        return num_dimensions - 1 if num_dimensions > 1 else None
    if style in ("colwise", "packed_colwise", *GATHERED_STYLES):
        return max(0, num_dimensions - 2)
    return 0 if style == "embedding_rowwise" else None


def _divided(config: PreTrainedConfig, plan: dict[str, str]) -> dict[str, int]:
    """Return the numbers of a (text) configuration that must be multiples of P, by name."""
    numbers: dict[str, int] = {}
    if splits_keys(config):
        for name in ("num_attention_heads", "num_key_value_heads"):
            numbers[name] = getattr(config, name, None) or 0  # without the second there are as many as of the first
    if config.model_type in OWN_PLANS or any(style in PACKED_STYLES for style in plan.values()):
        width = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
        numbers[width] = getattr(config, width)
    return numbers


def _check_styles(what: str, plan: dict[str, str]) -> None:
    for name, style in plan.items():
        if style not in STYLES:
            raise ModelError(f"{what}: layers {name} are split as {style}, which is not supported")


def slice_model(model: PreTrainedModel, link: ShardLink) -> None:
    """Make a model that was loaded by transformers' tensor-parallel plan compute by means of a replica's link.

    Args:
        model: changed in place.
        link: between the shards.

    Raises:
        ModelError: if the plan has a style that is not supported.
    """
    place, plan = link.place, dict(model.tp_plan)
    _check_styles(f"gpus_per_replica={place.num_shards}: {model.config.model_type}", plan)
    weights: Weights = {}
    for module in model.modules():
        vars(module).pop("forward", None)  # the library's wrapper
        _keep_slices(module, weights)
    for name, module in list(model.named_modules()):
        style = plan.get(LAYER_NUMBER.sub("*", name))
        if style in SUMMED_STYLES:
            _add_biases_once(module, place)
            module.register_forward_hook(partial(_sum_output, link.reducer))
        elif style is not None and style != "replicate":
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], _replaced(module, style, link.reducer, place))


def _keep_slices(module: nn.Module, weights: Weights) -> None:
    """Replace the DTensors of a module by parameters that are this shard's slices; tied ones stay tied."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if hasattr(parameter, "to_local"):  # a DTensor, whose module takes seconds to import
            if id(parameter) not in weights:
                part = parameter.to_local().detach()
                if part.untyped_storage().nbytes() > part.numel() * part.element_size():
                    part = part.clone()  # the rest is a mapped checkpoint's
                weights[id(parameter)] = parameter, nn.Parameter(part, requires_grad=False)
            setattr(module, name, weights[id(parameter)][1])


def _replaced(module: nn.Module, style: str, reducer: Reducer, place: ShardPlace) -> nn.Module:
    """Return what stands for a module of a style: the module, told the sizes of its slice, or around it one that puts
    outputs together."""
    if isinstance(module, nn.Embedding):
        chunk = _chunk(module.num_embeddings, place)
        module.num_embeddings, module.padding_idx = len(module.weight), None  # an index that this part may not have
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
    """Return how much of a dimension each shard has; the last ones may have less."""
    return -(-size // place.num_shards)


def _add_biases_once(module: nn.Module, place: ShardPlace) -> None:
    """Clear the biases that every shard adds to an output that is summed, on all shards but the first."""
    for name, parameter in module.named_parameters(recurse=False):
        if name in WHOLE_BIASES and not place.is_leader:
            parameter.data.zero_()


def _sum_output(reducer: Reducer, module: nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
    """Return the sum of all shards' outputs: a forward hook."""
    return reducer.all_reduce(output)
