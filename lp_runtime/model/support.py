"""Which models cannot be fed a token tree, as far as their class, configuration and kind of weights tell.

A tree gives every node the position and the mask that plain text would give it. The node's place in the input, and its
place among the keys, are other ones. A model that reads a place is refused: here by name, or by the self-check
(self_check.py), which compares.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from lp_runtime.errors import ModelError
from lp_runtime.model.attention.mask import layer_kinds
from lp_runtime.model.kv_cache.cache_names import KEYS_AND_VALUES, cache_name
from lp_runtime.model.tensor_parallel.tp_plan import tp_size_of

ALIBI_MODELS = ("bloom", "mpt")  # add ALiBi whatever their configuration says

# Words in names of fields that may count positions or keys, and in names of fields that otherwise never do.
LENGTHS = re.compile("window|chunk|length|floor|local|extent|distance|topk|keep|position|context|block")
SIZES = re.compile(
    "hidden|vocab|intermediate|embd|embed|emb$|head|dim|layer|expert|token|_id$|rank|inner|width|ffn|mlp|moe|conv"
    "|kernel|patch|image|audio|vision|group|theta|factor|num_|codebook|quant|channel|pattern|offset|period|label|beam"
    "|batch|mamba|ssm|state|d_model|dff|feed_forward|cap$|capping|clip|limit|scalar|route|seed|sampling|ngram|_top$"
)
OTHER_MODELS = re.compile("audio|vision|image|patcher|encoder|decoder")  # whose fields are not the text model's
CONTEXTS = (  # limits of the context, which nothing goes beyond
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
# Kinds of rotary embeddings whose factors are computed once, and all that those read.
FIXED_ROPES = ("default", "linear", "llama3", "yarn", "proportional", None)
ROPE_FIELDS = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings"}
ROPE_FIELDS |= {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
ROPE_FIELDS |= {"low_freq_factor", "high_freq_factor", "max_position_embeddings"}
ROPE_FIELDS |= {"llama_4_scaling_beta"}  # scales queries by position_ids
MIN_THRESHOLD = 4  # tokens


def check_family(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be fed a token tree.

    Args:
        model: a causal LM; its weights are not looked at.

    Raises:
        ModelError: naming the field or the layers that are the reason.
    """
    config = model.config.get_text_config()
    tp_size_of(model)  # refuses a model that is split in another way
    layer_kinds(config)
    if reason := _reason(config, model):
        raise ModelError(f"{config.model_type}: cannot be fed a token tree: {reason}")


def why_chains(model: PreTrainedModel) -> str | None:
    """Return why a model is fed one path of a tree at a time, and no tree; None for a model that can be fed trees.

    Args:
        model: its weights are not looked at.

    Raises:
        ModelError: if its weights are split over ranks.
    """
    tp_size_of(model)  # refuses a model that is split in another way
    try:
        check_family(model)
    except ModelError as error:
        return str(error)
    return likely_reason(model) or None


def check_chain_family(model: PreTrainedModel) -> None:
    """Refuse a model that cannot go on from a cache of transformers' own layers.

    Args:
        model: a causal LM; its weights are not looked at.

    Raises:
        ModelError: naming what is missing.
    """
    config = model.config.get_text_config()
    tp_size_of(model)  # refuses a model that is split in another way
    if cache_name(model) is None:
        raise ModelError(f"{config.model_type}: its forward takes no past_key_values: there is no cache to go on from")


def _reason(config: PreTrainedConfig, model: PreTrainedModel) -> str | None:
    """Return why a model cannot be fed a token tree; None if nothing speaks against it."""
    kind: str = getattr(config, "model_type", "")
    if getattr(config, "alibi", False) or kind in ALIBI_MODELS:
        whatever = " (transformers adds them whatever attn_config.alibi says)" if kind == "mpt" else ""
        return f"its position biases (ALiBi) go by a token's place in the input, not by its position{whatever}"
    if not getattr(config, "layer_types", None) and getattr(model, "_is_stateful", False):
        return "its layers carry a state from token to token, whatever the mask says"
    return _reads_places(config, kind)


def _reads_places(config: PreTrainedConfig, kind: str) -> str | None:
    """Return which attention of a type of model reads places in the input or among the keys; None if none does."""
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


def _takes(model: PreTrainedModel, name: str) -> bool:
    """Whether a model's forward has a parameter."""
    return name in inspect.signature(type(model).forward).parameters


def likely_reason(model: PreTrainedModel) -> str:
    """Return what may be why a model failed the self-check; empty if its signature does not tell."""
    if cache_name(model) not in KEYS_AND_VALUES:
        return "its forward takes no past_key_values: it has no KV cache"
    if not _takes(model, "position_ids"):
        return "its forward takes no position_ids: positions go by a token's place in the input"
    return ""


def thresholds_of(config: PreTrainedConfig) -> dict[str, int]:
    """Return every number of a configuration beyond which the model may attend otherwise, by field.

    Sliding windows and chunks are among them, and any field whose name is not known to be something else: a field that
    nobody has heard of makes the self-check longer, not shorter.

    Args:
        config: the model's (text) configuration.
    """
    found: dict[str, int] = {}
    _collect(config.to_dict(), "", found)
    return found


def _collect(fields: dict[str, Any], before: str, found: dict[str, int]) -> None:
    """Add the thresholds among some fields, and among those nested in them.

    Args:
        fields: by name.
        before: of the names, where they are nested.
        found: gets the thresholds by name.
    """
    is_fixed_rope = fields.get("rope_type", "none") in FIXED_ROPES and fields.keys() <= ROPE_FIELDS
    for name, value in fields.items():
        if isinstance(value, dict) and not OTHER_MODELS.search(name):
            _collect(value, f"{before}{name}.", found)
        elif _is_integer(value) and value >= MIN_THRESHOLD and not is_fixed_rope and _may_be_length(name):
            found[before + name] = int(value)


def _is_integer(value: object) -> bool:
    """Whether a value of a configuration is an integer, or a float that is one."""
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _may_be_length(name: str) -> bool:
    """Whether a field with this name may count positions or keys."""
    if name in CONTEXTS or name.endswith("_layers"):  # a count of layers, as Qwen's max_window_layers
        return False
    return bool(LENGTHS.search(name)) or not SIZES.search(name)
