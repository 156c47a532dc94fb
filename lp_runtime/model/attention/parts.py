"""Attention to parts of the keys, with the fastest kernels of torch, and the merge of two parts.

Each part has the log-sum-exp of its scores, with which two parts are merged (as in split-key decoding) and attention
sinks are added.

Letters: T tokens fed, L committed tokens, S = L + T keys, H key/value heads, g query heads for each, D head size.
Queries are [1, g H, T, D], keys and values [1, H, S, D], outputs [1, g H, T, D], and log-sum-exps [1, g H, T] float32.
`scale` multiplies the scores.
"""

from __future__ import annotations

import functools

import torch

FLASH_DTYPES = (torch.float16, torch.bfloat16)  # supported by torch's flash attention
MAX_FLASH_HEAD_SIZE = 256  # largest D of torch's flash attention
MIN_FLASH_CAPABILITY = (8, 0)  # torch's flash attention needs Ampere or newer
MAX_WINDOW_ERROR = 0.1  # of flash attention in half precision; a key too many or too few makes a larger one
WINDOW_BLOCK = 512  # queries that attend together in a sliding window without flash attention; bounds the scores


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all keys, or to those up to each token's own, by the fastest torch kernel for the device."""
    num_heads, num_rows, size = query.shape[1:]
    groups = num_heads // key.shape[1]
    if groups == 1 or _takes_groups(query, value):
        return _attend(query, key, value, scale, is_causal)
    if is_causal:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        return _attend(query, key, value, scale, is_causal)
    folded = query.reshape(1, key.shape[1], groups * num_rows, size)
    output, total = _attend(folded, key, value, scale, False)
    return output.reshape(1, num_heads, num_rows, -1), total.reshape(1, num_heads, num_rows)


def attend_window(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally in a sliding window: each token sees itself and `window - 1` keys before it."""
    num_tokens, num_keys = query.shape[2], key.shape[2]
    first = max(0, num_keys - num_tokens - window + 1)  # no token sees earlier keys
    if _takes_groups(query, value) and flash_has_windows(query.device, query.dtype, query.shape[3]):
        return _attend_window(query, key[:, :, first:], value[:, :, first:], scale, window)
    outputs, totals = [], []
    for start in range(0, num_tokens, WINDOW_BLOCK):
        block = query[:, :, start : start + WINDOW_BLOCK]
        end = num_keys - num_tokens + start + block.shape[2]
        keys = slice(max(0, end - block.shape[2] - window + 1), end)
        output, total = _attend_band(block, key[:, :, keys], value[:, :, keys], scale, window)
        outputs.append(output)
        totals.append(total)
    return torch.cat(outputs, 2), torch.cat(totals, 2)


@functools.cache
def flash_has_windows(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether torch's flash attention computes sliding windows for a GPU, dtype and head size; tried once."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, num_tokens, size, generator=generator).to(device, dtype)
        for heads, num_tokens in ((2, 24), (1, 40), (1, 40))
    )
    try:
        ours = _attend_window(query, key, value, size**-0.5, 5)
    except RuntimeError:  # a build without windows
        return False
    expected = _attend_band(query, key, value, size**-0.5, 5)
    errors = [(one.float() - other.float()).abs().max() for one, other in zip(ours, expected, strict=True)]
    return bool(torch.stack(errors).max() < MAX_WINDOW_ERROR)


def _attend_window(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attend_window` by flash attention, which takes tokens before heads; only if `_takes_groups`."""
    aten = torch.ops.aten
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    output, total, *_ = aten._flash_attention_forward(
        query, key, value, None, None, query.shape[1], key.shape[1], 0.0, True, False,
        scale=scale, window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return output.transpose(1, 2), total


def _attend_band(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attend_window` by a mask over all the given keys."""
    num_heads, num_tokens, size = query.shape[1:]
    if query.device.type != "cpu" or size != value.shape[3]:
        return attend_masked(
            query, key, value, _band(num_tokens, key.shape[2], window, torch.float32, query.device), scale
        )
    groups = num_heads // key.shape[1]
    folded = query.reshape(1, key.shape[1], groups * num_tokens, size)
    mask = _band(num_tokens, key.shape[2], window, query.dtype, query.device, groups)
    output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded, key, value, 0.0, False, attn_mask=mask[None, None], scale=scale
    )
    return output.reshape(1, num_heads, num_tokens, -1), total.reshape(1, num_heads, num_tokens)


@functools.lru_cache(maxsize=4)  # all layers of a pass need the same ones
def _band(
    num_tokens: int, num_keys: int, window: int, dtype: torch.dtype, device: torch.device, groups: int = 1
) -> torch.Tensor:
    """Return the additive mask, [g T, S], of the last T of S tokens in a sliding window."""
    last = num_keys - num_tokens  # key of the first token itself
    seen = torch.ones((num_tokens, num_keys), dtype=torch.bool, device=device).tril(last).triu(last - window + 1)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
    return mask.repeat(groups, 1)


def _takes_groups(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `_attend` will use flash attention on a GPU, which needs no repeated keys for grouped heads."""
    size = query.shape[3]
    fits = size == value.shape[3] and size <= MAX_FLASH_HEAD_SIZE and size % 8 == 0
    if query.device.type != "cuda" or query.dtype not in FLASH_DTYPES or not fits:
        return False
    return torch.cuda.get_device_capability(query.device) >= MIN_FLASH_CAPABILITY


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attend` for as many query heads as key heads; for grouped heads if `_takes_groups`."""
    aten = torch.ops.aten
    if query.device.type == "cpu" and query.shape[3] == value.shape[3]:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
    if _takes_groups(query, value):
        output, total, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
        return output, total
    if query.device.type == "cuda" and query.shape[3] == value.shape[3]:
        output, total, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, is_causal, scale=scale
        )
        return output, total[..., : query.shape[2]]  # the kernel pads the log-sum-exp
    assert not is_causal
    return attend_masked(query, key, value, None, scale)


def attend_masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a few keys by two matrix products in float32; `mask` is [T, S] additive.

    The query, output and log-sum-exp may be folded, [1, H, g T, D].
    """
    folded = query.reshape(1, key.shape[1], -1, query.shape[3]).float()
    scores = torch.matmul(folded, key.transpose(2, 3).float()) * scale
    if mask is not None:
        scores = (scores.unflatten(2, (-1, len(mask))) + mask).flatten(2, 3)
    total = scores.logsumexp(-1)
    output = torch.matmul(torch.exp(scores - total[..., None]), value.float())
    return output.reshape(*query.shape[:3], -1), total.reshape(query.shape[:3])


def attend_after_prefix(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_own: int, scale: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend to the committed prefix without a mask, to the last T = `num_own` keys with one, and merge.

    `mask` is [T, T] additive; None for a causal one. The query may be folded. Returns the output and the log-sum-exps
    of the two parts, float32.
    """
    num_cached = key.shape[2] - num_own
    prefix, prefix_sum = attend(query, key[:, :, :num_cached], value[:, :, :num_cached], scale)
    own = key[:, :, num_cached:], value[:, :, num_cached:]
    if mask is None:
        output, own_sum = attend(query, *own, scale, is_causal=True)
    else:
        output, own_sum = attend_masked(query, *own, mask, scale)
    prefix_weight = torch.sigmoid(prefix_sum - own_sum)[..., None]
    return torch.lerp(output.float(), prefix.float(), prefix_weight), prefix_sum, own_sum


def attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys up to each token's own, in a sliding window of `window` tokens; 0 for none."""
    num_tokens = query.shape[2]
    if window:
        return attend_window(query, key, value, scale, window)
    if num_tokens in (1, key.shape[2]):
        return attend(query, key, value, scale, is_causal=num_tokens > 1)
    output, *sums = attend_after_prefix(query, key, value, num_tokens, scale, None)
    return output, torch.logaddexp(*sums)
