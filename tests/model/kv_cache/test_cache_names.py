"""Names of the KV cache's keyword argument in older and newer versions of transformers."""

from types import SimpleNamespace

import pytest
from transformers import DynamicCache

from lp_runtime.dropin.callers_cache import holds_tokens
from lp_runtime.model.kv_cache.cache_names import cache_name, given_cache


def before(input_ids, past_key_values=None):
    pass


def since(input_ids, cache=None):
    pass


def of_states(input_ids, cache_params=None):
    pass


def without(input_ids):
    pass


@pytest.mark.parametrize(
    ("forward", "name"),
    [(before, "past_key_values"), (since, "cache"), (of_states, "cache_params"), (without, None)],
)
def test_cache_name_is_read_from_the_forward_signature(forward, name):
    assert cache_name(SimpleNamespace(forward=forward)) == name


def test_installed_transformers_has_a_known_cache_name(random_model):
    assert cache_name(random_model()) in ("past_key_values", "cache")


@pytest.mark.parametrize("name", ["past_key_values", "cache", "cache_params"])
def test_given_cache_is_recognized_under_any_name(name):
    cache = DynamicCache()
    assert given_cache({"use_cache": True, name: cache}) == (name, cache)
    assert given_cache({name: None})[1] is None


class OfStates(DynamicCache):
    def get_seq_length(self, *args, **kwargs):
        raise ValueError("there are no keys")


def test_cache_without_keys_holds_no_tokens():
    assert not any(map(holds_tokens, (None, DynamicCache(), OfStates())))
