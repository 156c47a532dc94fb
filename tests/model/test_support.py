"""Model families: each is decoded exactly as by transformers, or refused with a reason."""

import pytest
import torch
from support.engines import engine_of
from support.small_models import FAMILIES, REFUSED, random_model
from support.thinned import slow, thinned

from lp_runtime.config.lookahead import PLAIN, LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.errors import ModelError
from lp_runtime.model.checks.self_check import check_model
from lp_runtime.model.hf.differences import TOLERANCES
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request

CPU = torch.device("cpu")
LENGTH, NEW = 12, 12
ALWAYS = ("llama", "mixtral", "gemma3", "gpt2", "gptj", "gpt_oss", "falcon", "stablelm")  # the most different ones
ALSO_SLOW = ("mpt", "rwkv", "jamba", "qwen3_next")  # refused for the same reasons as others


def decode(model: ModelRunner, request: Request) -> list[int]:
    *runs, report = engine_of(model).run(request)
    return [token for run in runs for token in run.token_ids]


# tests/model/modules/test_fusing.py always runs more families, and tests/model/hf/test_types.py has all of them.
@pytest.mark.parametrize(("family", "attention"), thinned(8, slow(FAMILIES, FAMILIES.keys() - ALWAYS), [None, "eager"]))
def test_greedy_and_sampling_are_exact(family, attention):
    name, settings = FAMILIES[family]
    model = random_model(name, seed=1, attention=attention, initializer_range=0.3, **settings)
    tree_model = ModelRunner(model, prefill_chunk=5)
    assert check_model(tree_model) < 0.1 * TOLERANCES[torch.float32]
    prompt = torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    ids = tuple(prompt[0].tolist())
    lookahead = LookaheadConfig(W=5, N=4, G=5)
    assert decode(tree_model, Request(ids, lookahead, NEW)) == expected[0, LENGTH:].tolist()
    sampling = SamplingConfig(temperature=0.8, seed=3)
    sampled = decode(tree_model, Request(ids, lookahead, NEW, sampling=sampling))
    assert sampled == decode(tree_model, Request(ids, PLAIN, NEW, sampling=sampling))


@pytest.mark.parametrize("family", slow(REFUSED, ALSO_SLOW))
def test_unsupported_family_is_refused_with_a_reason(family):
    name, settings, reason = REFUSED[family]
    with pytest.raises(ModelError, match=reason) as caught:
        check_model(ModelRunner(random_model(name, seed=1, **settings), prefill_chunk=2048))
    assert len(str(caught.value).splitlines()) == 1
