"""Checks, by class, configuration and kind of weights, whether a model can be fed a token tree.

In a tree, every node gets the position and the mask that it would have in plain text, but its index in the input and
among the keys differs. A model that depends on such an index is refused: here if its type is known, otherwise by the
self-check (checks/self_check.py), which compares logits.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.errors import ModelError
from lp_runtime.model.attention.mask import KINDS
from lp_runtime.model.hf.config import differs_by_layer
from lp_runtime.model.kv_cache.cache_names import KEYS_AND_VALUES, cache_name
from lp_runtime.model.tensor_parallel.tp_plan import tp_size_of

ALIBI_MODELS = ("bloom", "mpt")  # add ALiBi whatever their configuration says
WINDOWS = ("sliding_window", "attention_chunk_size")  # fields; the masks of trees have one value of each
STATEFUL = ("linear_attention", "hybrid", "hybrid_sliding", "recurrent")  # kinds of layers that carry a state

# Words in names of fields that may count positions or keys; and words in names of fields that never do.
LENGTHS = re.compile("window|chunk|length|floor|local|extent|distance|topk|keep|position|context|block")
SIZES = re.compile(
    "hidden|vocab|intermediate|embd|embed|emb$|head|dim|layer|expert|token|_id$|rank|inner|width|ffn|mlp|moe|conv"
    "|kernel|patch|image|audio|vision|group|theta|factor|num_|codebook|quant|channel|pattern|offset|period|label|beam"
    "|batch|mamba|ssm|state|d_model|dff|feed_forward|cap$|capping|clip|limit|scalar|route|seed|sampling|ngram|_top$"
)
OTHER_MODELS = re.compile("audio|vision|image|patcher|encoder|decoder")  # sub-configurations of other models
CONTEXTS = (  # limits of the context: no position exceeds them, so they are no thresholds within it
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
    "max_length",
    "min_length",
    "model_max_length",
    "context_length",
)
# Kinds of rotary embeddings whose factors do not change with the length, and the fields that they read.
FIXED_ROPES = ("default", "linear", "llama3", "yarn", "proportional", None)
ROPE_FIELDS = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings"}
ROPE_FIELDS |= {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
ROPE_FIELDS |= {"low_freq_factor", "high_freq_factor", "max_position_embeddings"}
ROPE_FIELDS |= {"llama_4_scaling_beta"}  # scales queries by position_ids
MIN_THRESHOLD = 4  # tokens


def check_family(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be fed a token tree, and say why; its weights are not read."""
    if reason := _why_no_trees(model):
        raise ModelError(reason)


def why_chains(model: PreTrainedModel) -> str | None:
    """Return why a model must be fed single paths instead of trees; None if it can be fed trees."""
    return _why_no_trees(model) or likely_reason(model) or None


def check_chain_family(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    tp_size_of(model)  # raises if another library has split the model
    if cache_name(model) is None:
        raise ModelError(f"{config.model_type}: its forward takes no past_key_values: it has no cache to continue from")


def _why_no_trees(model: PreTrainedModel) -> str | None:
    """Return why a model cannot be fed a token tree, by its class and configuration; None if these give no reason."""
    tp_size_of(model)  # raises if another library has split the model
    config = model.config.get_text_config()
    reason = _unsupported_layers(config) or _depends_on_places(config, model)
    return f"{config.model_type}: cannot be fed a token tree: {reason}" if reason else None


def _unsupported_layers(config: PreTrainedConfig) -> str | None:
    unknown = set(getattr(config, "layer_types", None) or ()) - set(KINDS)
    if not unknown:
        return None
    kind = min(unknown)
    if kind in STATEFUL or "conv" in kind or "mamba" in kind:
        return f"its layers of type {kind} carry a state from token to token, or mix neighbours, whatever the mask says"
    return f"its layers of type {kind} are not known to depend only on positions and the mask"


def _depends_on_places(config: PreTrainedConfig, model: PreTrainedModel) -> str | None:
    kind: str = getattr(config, "model_type", "")
    if getattr(config, "alibi", False) or kind in ALIBI_MODELS:
        whatever = " (transformers adds them whatever attn_config.alibi says)" if kind == "mpt" else ""
        return f"its position biases (ALiBi) go by a token's place in the input, not by its position{whatever}"
    if name := next((name for name in WINDOWS if differs_by_layer(config, name)), None):
        return f"its layers have different values of {name}"
    if not getattr(config, "layer_types", None) and getattr(model, "_is_stateful", False):
        return "its layers carry a state from token to token, whatever the mask says"
    return _reads_places(config, kind)


def _reads_places(config: PreTrainedConfig, kind: str) -> str | None:
    """Return why a model type's attention depends on indices of tokens or keys; None if it does not."""
    if kind == "doge":
        size = config.keep_window_size
        return f"its attention keeps the best keep_window_size={size} of all keys, other branches of a tree included"
    if kind in ("llama4", "llama4_text") and config.attn_temperature_tuning and 0 in config.no_rope_layers:
        return (
            f"with attn_temperature_tuning its layers without rotary embedding scale queries by floor_scale="
            f"{config.floor_scale} and a token's place in the input, not by its position"
        )
    if blocks := getattr(config, "index_topk_blocks", None):
        return f"its attention keeps index_topk_blocks={blocks} blocks of keys by their place, whatever the mask says"
    if kind == "gpt_neo" and "local" in config.attention_layers:
        return f"layers of type local have window_size={config.window_size} by a token's place, not by its position"
    return None


def likely_reason(model: PreTrainedModel) -> str:
    """Return a likely reason why a model failed the self-check; empty if its signature gives none."""
    if cache_name(model) not in KEYS_AND_VALUES:
        return "its forward takes no past_key_values: it has no KV cache"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "its forward takes no position_ids: positions go by a token's place in the input"
    return ""


def counted_columns(model: PreTrainedModel) -> int | None:
    """Return the text length up to which tokens that `generate`'s mask hides do not count; None for any length.

    Windows and chunks count hidden tokens of the text as well, and recurrent layers take a step for them.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or kinds - set(KINDS):
        return 0
    if any(differs_by_layer(config, name) for name in WINDOWS):
        return 0
    sizes = [getattr(config, name, None) for name in WINDOWS]
    return min(filter(None, sizes), default=None)


def thresholds_of(config: PreTrainedConfig) -> dict[str, int]:
    """Return, by field, the numbers of a text configuration above which the model may attend differently.

    These are sliding windows, chunks, and any field whose name is not known to mean something else: an unknown field
    makes the self-check longer, not shorter.
    """
    thresholds: dict[str, int] = {}
    _collect(config.to_dict(), "", thresholds)
    return thresholds


def _collect(fields: dict[str, Any], before: str, thresholds: dict[str, int]) -> None:
    """Add the thresholds of these fields and of nested ones to `thresholds`, their names prefixed by `before`."""
    is_fixed_rope = fields.get("rope_type", "none") in FIXED_ROPES and fields.keys() <= ROPE_FIELDS
    for name, value in fields.items():
        if isinstance(value, dict) and not OTHER_MODELS.search(name):
            _collect(value, f"{before}{name}.", thresholds)
        elif _is_integer(value) and value >= MIN_THRESHOLD and not is_fixed_rope and _may_be_length(name):
            thresholds[before + name] = int(value)


def _is_integer(value: object) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _may_be_length(name: str) -> bool:
    if name in CONTEXTS or name.endswith("_layers"):  # counts layers, e.g. Qwen's max_window_layers
        return False
    return bool(LENGTHS.search(name)) or not SIZES.search(name)
