"""Replacement of transformers' blocks by fused ones (fused_*.py) with equal results.

For the few tokens of a step an operation costs more to launch than to compute: a layer of transformers' Llama launches
about forty, most of them for norms and rotary embeddings. A block instance is replaced if its class runs exactly the
code of one of the known transformers blocks, and if both give equal output for random input. All other blocks stay;
no class is changed.

Letters: E hidden size, D head size.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations import moe
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from lp_runtime.errors import first_line
from lp_runtime.kernels.dispatch import kernels_for, on
from lp_runtime.kernels.types import Rotation, Routing
from lp_runtime.model.hf.config import attention_of
from lp_runtime.model.modules.fused_attention import FusedAttention
from lp_runtime.model.modules.fused_blocks import Block, FusedLayer, FusedMLP, FusedNorm, norms_of
from lp_runtime.model.modules.fused_experts import CLAMPED, FusedExperts, FusedRouter, activation_of
from lp_runtime.model.modules.packed_linear import is_hooked, is_plain, places_of

log = logging.getLogger(__name__)


ATTENTIONS = (
    llama.LlamaAttention,
    mistral.MistralAttention,
    qwen2.Qwen2Attention,
    qwen3.Qwen3Attention,
    gemma3.Gemma3Attention,
    phi3.Phi3Attention,
    gpt_oss.GptOssAttention,
)
NORMS = (llama.LlamaRMSNorm, gpt_oss.GptOssRMSNorm)  # they round before and after the weight's product; we do after
# (model type, name) of further ones; imported only if a block runs no other known code, because importing takes time.
MORE_ATTENTIONS = (("glm4_moe", "Glm4MoeAttention"),)
MORE_LAYERS = (("glm4", "Glm4DecoderLayer"),)
LAYERS = (
    llama.LlamaDecoderLayer,
    mixtral.MixtralDecoderLayer,
    gemma2.Gemma2DecoderLayer,
    gemma3.Gemma3DecoderLayer,
    phi3.Phi3DecoderLayer,
    gpt_oss.GptOssDecoderLayer,
)
EXPERTS = (mixtral.MixtralExperts, gpt_oss.GptOssExperts)
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
CHILDREN = ({*PROJECTIONS, "o_proj"}, {*PROJECTIONS, "o_proj", "q_norm", "k_norm"}, {"qkv_proj", "o_proj"})
NUM_TOKENS = 3  # of the random input that a block and its replacement are compared on
NUM_EXPERT_TOKENS = 512  # of the input of experts: some get more tokens than a program of the kernel computes at a time
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of outputs, relative to their norm


def fuse_blocks(model: nn.Module) -> int:
    """Replace a model's known blocks in place, one by one to free their weights; return how many."""
    kinds: tuple[tuple[Callable, Callable, Callable], ...] = (  # (is it one, its replacement, its input)
        (_is_attention, _fused_attention, _attention_input),
        (_is_mlp, FusedMLP, _mlp_input),
        (
            _is_norm,
            lambda norm: FusedNorm(norm, _adds_one(norm)),
            lambda norm: ((_random(norm.weight, len(norm.weight)),), {}),
        ),
        (_is_experts, FusedExperts, _experts_input),
        (_is_router, _fused_router, lambda router: ((_random(router.weight, router.weight.shape[1])[0],), {})),
        (_is_layer, FusedLayer, lambda layer: _attention_input(layer.self_attn)),
    )
    count = 0
    for is_kind, fused, make_input in kinds:
        for parent, name in places_of(model, is_kind):
            block = getattr(parent, name)
            try:
                replacement = fused(block)
                args, kwargs = make_input(block)
                if not _agree(block, replacement, *args, **kwargs):
                    log.info("%s is not fused: the outputs differ", type(block).__name__)
                    continue
            except Exception as error:  # the block only looks like a known one, or too little memory for both
                log.info("%s is not fused: %s", type(block).__name__, first_line(error))
                continue
            setattr(parent, name, replacement)
            count += 1
    _chain_layers(model)
    return count


def _chain_layers(model: nn.Module) -> None:
    """Register with each fused layer the norm after it: the next layer's first, or the model's final one.

    If the model passes another tensor than the layer's output to that norm, the norm computes its result itself.
    """
    for parent in model.modules():
        layers = getattr(parent, "layers", None)
        if not isinstance(layers, nn.ModuleList) or not all(type(layer) is FusedLayer for layer in layers):
            continue
        fused: list[FusedLayer] = list(layers)  # type: ignore[arg-type]  # checked above
        norms = [*(layer.input_layernorm for layer in fused[1:]), getattr(parent, "norm", None)]
        for layer, norm in zip(fused, norms, strict=True):
            if type(norm) is FusedNorm:
                layer.precede(norm)


def _is_attention(module: Block) -> bool:
    names = {name for name, _ in module.named_children()}
    return (
        names in CHILDREN
        and _runs_known_code(module, ATTENTIONS, MORE_ATTENTIONS)
        and rotation_of(module) is not None
        and attention_of(module.config) in ALL_ATTENTION_FUNCTIONS
        and getattr(module, "attn_logit_softcapping", None) is None
        and _can_merge(*(getattr(module, name) for name in (PROJECTIONS if "q_proj" in names else ("qkv_proj",))))
    )


def _fused_attention(attention: Block) -> FusedAttention:
    rotation = rotation_of(attention)
    assert rotation is not None
    return FusedAttention(attention, rotation)


def rotation_of(attention: Block) -> Rotation | None:
    """Return how an attention block rotates queries and keys; None if its code is not known."""
    apply, half = _global(attention, "apply_rotary_pos_emb"), _global(attention, "rotate_half")
    if _same_code(half, llama.rotate_half):
        is_known = _same_code(apply, llama.apply_rotary_pos_emb) or _same_code(apply, phi3.apply_rotary_pos_emb)
        others = (_transformers(each, "apply_rotary_pos_emb") for each in ("glm4_moe", "nemotron"))
        return Rotation() if is_known or any(_same_code(apply, each) for each in others) else None
    if _same_code(apply, gpt_oss.apply_rotary_pos_emb):
        is_known = _same_code(_global(attention, "_apply_rotary_emb"), gpt_oss._apply_rotary_emb)
        return Rotation(is_halved=True) if is_known else None
    for model_type, step in (("glm4", 1), ("ernie4_5", 1), ("cohere", 2)):
        known = (_transformers(model_type, name) for name in ("apply_rotary_pos_emb", "rotate_half"))
        if all(map(_same_code, (apply, half), known)):
            return Rotation(are_neighbors=True, angle_step=step)
    return None


def _is_mlp(module: Block) -> bool:
    if _runs_code_of(module, phi3.Phi3MLP):
        return is_plain(module.gate_up_proj)
    return _runs_code_of(module, llama.LlamaMLP) and _can_merge(module.gate_proj, module.up_proj)


def _mlp_input(mlp: Block) -> tuple[tuple, dict]:
    first = mlp.gate_up_proj if hasattr(mlp, "gate_up_proj") else mlp.gate_proj
    return (_random(first.weight, first.in_features),), {}


def _is_experts(module: Block) -> bool:
    """Whether a module is the experts of a layer, as transformers stores them, on a GPU with the Triton kernels."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return (
        all(type(each) is nn.Parameter and each.dim() == 3 and each.is_contiguous() for each in weights)
        and any(_runs_code_of(module, known) for known in EXPERTS)
        and not getattr(module, "_is_expert_parallel", False)
        and _has_known_gate(module)
        and kernels_for(module.down_proj.device) is not None
    )


def _has_known_gate(experts: Block) -> bool:
    activation = activation_of(experts)
    known = gpt_oss.GptOssExperts._apply_gate if activation == CLAMPED else moe._default_apply_gate
    return activation is not None and _same_code(getattr(type(experts), "_apply_gate", None), known)


def _experts_input(experts: Block) -> tuple[tuple, dict]:
    """Return tokens that choose two experts each, the first ones more often."""
    weight = experts.down_proj
    size, num_experts = weight.shape[2 if experts.is_transposed else 1], len(weight)
    states = _random(weight, size, NUM_EXPERT_TOKENS)[0]
    first = torch.arange(NUM_EXPERT_TOKENS, device=weight.device) % 7 % num_experts
    second = (first + 1 + torch.arange(NUM_EXPERT_TOKENS, device=weight.device) % max(1, num_experts - 1)) % num_experts
    return (states, torch.stack((first, second), 1), _random(weight, 2, NUM_EXPERT_TOKENS)[0].abs()), {}


def _is_router(module: Block) -> bool:
    """Whether a module is a known router of a mixture of experts, on a GPU with the Triton kernels."""
    if not hasattr(module, "top_k") or type(getattr(module, "weight", None)) is not nn.Parameter:
        return False
    kernels = kernels_for(module.weight.device)
    routing = None if kernels is None else routing_of(module)
    return kernels is not None and routing is not None and kernels.can_choose(len(module.weight), routing)


def routing_of(router: Block) -> Routing | None:
    """Return how a router chooses experts; None if its code is not known."""
    if _runs_code_of(router, mixtral.MixtralTopKRouter):
        return Routing(router.top_k)
    if _runs_code_of(router, gpt_oss.GptOssTopKRouter):
        return Routing(router.top_k, scores="softmax of chosen")
    if _runs_code_of(router, _transformers("qwen3_moe", "Qwen3MoeTopKRouter")):
        return Routing(router.top_k, normalizes=router.norm_topk_prob)
    if _runs_code_of(router, _transformers("glm4_moe", "Glm4MoeTopkRouter")) and hasattr(router, "num_group"):
        scale, groups = router.routed_scaling_factor, (router.num_group, router.topk_group)  # DeepSeek V3's code, too
        return Routing(router.top_k, "sigmoid", router.norm_topk_prob, scale, *groups)
    return None


def _fused_router(router: Block) -> FusedRouter:
    routing = routing_of(router)
    assert routing is not None
    return FusedRouter(router, routing, is_float32=_runs_code_of(router, mixtral.MixtralTopKRouter))


def _is_layer(module: Block) -> bool:
    """Whether a module is a decoder layer, with its blocks already fused, that FusedLayer can replace.

    Its MLP may be any module. Dropout does nothing when a model is not trained.
    """
    norms = norms_of(module)
    if norms is None:
        return False
    blocks = {name: type(child) for name, child in module.named_children() if type(child) is not nn.Dropout}
    blocks.pop("mlp", None)
    return (
        blocks == {"self_attn": FusedAttention} | dict.fromkeys(("input_layernorm", *norms.names), FusedNorm)
        and _runs_known_code(module, LAYERS, MORE_LAYERS)
        and not any(map(is_hooked, module.children()))
        # On a GPU without the Triton kernels nothing is captured, and FusedLayer gains nothing.
        and (module.input_layernorm.weight.is_cpu or kernels_for(module.input_layernorm.weight.device) is not None)
    )


def _is_norm(module: nn.Module) -> bool:
    is_known = any(_runs_code_of(module, known) for known in NORMS) or _adds_one(module)
    return is_known and type(module.weight) is nn.Parameter


def _adds_one(module: nn.Module) -> bool:
    """Whether a module runs the code of Gemma's norms, which multiply by 1 + weight."""
    known = gemma.GemmaRMSNorm
    names = ("forward", "_norm")
    return not is_hooked(module) and all(
        _same_code(getattr(type(module), name, None), getattr(known, name)) for name in names
    )


def _can_merge(*linears: Block) -> bool:
    """Whether modules are plain linear layers of one dtype and device, all with biases or all without."""
    return (
        all(map(is_plain, linears)) and len({(x.weight.dtype, x.weight.device, x.bias is None) for x in linears}) == 1
    )


@functools.cache
def _transformers(model_type: str, name: str) -> Any:
    """Import a class or function of transformers' code for a model type; return None if this version has none."""
    try:
        return getattr(importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}"), name, None)
    except ImportError:
        return None


def _runs_known_code(module: nn.Module, known: Sequence[type[nn.Module]], more: Sequence[tuple[str, str]] = ()) -> bool:
    """Whether a module runs the code of a known class, or of one that has yet to be imported."""
    return any(_runs_code_of(module, each) for each in known) or any(
        _runs_code_of(module, _transformers(*each)) for each in more
    )


def _runs_code_of(module: nn.Module, known: type[nn.Module] | None) -> bool:
    return known is not None and not is_hooked(module) and _same_code(type(module).forward, known.forward)


def _same_code(left: Callable | None, right: Callable | None) -> bool:
    """Whether two functions differ at most in annotations, docstring and name; False if one is None."""
    if left is None or right is None:
        return False
    one, other = inspect.unwrap(left).__code__, inspect.unwrap(right).__code__
    names = ("co_code", "co_names", "co_varnames", "co_freevars")
    # Skip the first constant: it is the docstring, if there is one.
    return one.co_consts[1:] == other.co_consts[1:] and all(getattr(one, x) == getattr(other, x) for x in names)


def _global(module: nn.Module, name: str) -> Callable | None:
    return inspect.unwrap(type(module).forward).__globals__.get(name)


def _attention_input(attention: Block) -> tuple[tuple, dict[str, object]]:
    weight, config = next(attention.parameters()), attention.config
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    shares = [each.get("partial_rotary_factor") for each in kinds] + [getattr(config, "partial_rotary_factor", None)]
    num_rotated = int(attention.head_dim * next((each for each in shares if each is not None), 1.0))
    rotation = attention.rotation if isinstance(attention, FusedAttention) else rotation_of(attention)
    assert rotation is not None
    cos, sin = (_random(weight, rotation.num_columns(num_rotated)) for _ in range(2))
    return (), {
        "hidden_states": _random(weight, attention.o_proj.out_features),
        "position_embeddings": (cos, sin),
        "attention_mask": None,
    }


def _random(like: torch.Tensor, size: int, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(1, num_tokens, size, generator=generator).to(like)


def _result_of(output: Any) -> torch.Tensor:
    """Return what a block computed: of attention without weights, of a router the scores in the experts' places."""
    if not isinstance(output, tuple):
        return output
    if len(output) == len(("logits", "scores", "experts")):
        logits, scores, experts = output
        return torch.zeros_like(logits, dtype=scores.dtype).scatter(1, experts, scores)
    return output[0]


@torch.inference_mode()
def _agree(block: nn.Module, replacement: nn.Module, *args: Any, **kwargs: Any) -> bool:
    with on(next(block.parameters()).device):
        outputs = [each(*args, **kwargs) for each in (block, replacement)]
    expected, actual = map(_result_of, outputs)
    tolerance = TOLERANCES.get(expected.dtype, 0.0)
    difference = (actual.float() - expected.float()).norm()
    return actual.dtype == expected.dtype and bool(difference <= tolerance * expected.float().norm())
