"""The drop-in `lookahead_generate` returns what `generate` returns, and leaves the model unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import torch
from support.faults import LacksMemory
from support.processes import PATIENCE, marked
from support.thinned import thinned
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    MistralConfig,
    StoppingCriteria,
    StopStringCriteria,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from lp_runtime import LookaheadConfig, LookaheadRuntime, ModelError, SamplingConfig, lookahead_generate
from lp_runtime.dropin.generate_call import arguments_of_generate
from lp_runtime.errors import RequestError

PROMPT = "def fib(n):\n    "


@pytest.fixture(scope="module")
def tokenizer(half_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(half_model_dir)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


@pytest.fixture(scope="module")
def inputs(tokenizer):
    return tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)


def ours(model, *args, W=5, N=4, G=5, **kwargs):
    return model.generate(*args, custom_generate=lookahead_generate, W=W, N=N, G=G, **kwargs)


class NoLineTwice(LogitsProcessor):
    """A user's processor that supports one prompt at a time."""

    def __call__(self, input_ids, scores):
        (text,) = input_ids.tolist()
        scores[:, text[-5:]] -= 3.0
        return scores


class AfterToken(StoppingCriteria):
    """Stops when the text has `count` tokens of an id."""

    def __init__(self, token: int, count: int):
        self.token, self.count = token, count

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids == self.token).sum(-1) >= self.count


class SecondEnd(EosTokenCriteria):
    """Stops at the second end-of-sequence token in a text."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids, self.eos_token_id).sum(-1) >= 2


class TenEarlier(MaxLengthCriteria):
    """Stops ten tokens below the largest length."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] + 10 >= self.max_length)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 24},
        {"max_length": 20},
        {},
        {"max_new_tokens": 14, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
        {"max_new_tokens": 12, "bad_words_ids": [[7]], "min_new_tokens": 8},
        {"max_new_tokens": 12, "logits_processor": [NoLineTwice()]},
        {"max_new_tokens": 10, "prefix_allowed_tokens_fn": lambda row, ids: range(row, 4096, 2)},
        {"max_new_tokens": 12, "encoder_repetition_penalty": 1.5},
        {"generation_config": GenerationConfig(max_new_tokens=10, repetition_penalty=1.2)},
        {"max_new_tokens": 20, "stopping_criteria": [AfterToken(7, 3)]},
        {"max_new_tokens": 8, "stopping_criteria": [MaxLengthCriteria(2)]},  # below the prompt's length: one token
        {"max_new_tokens": 4, "stopping_criteria": [MaxLengthCriteria(30)]},  # the caller's criterion counts
        {"max_new_tokens": 20, "eos_token_id": 199, "stopping_criteria": [EosTokenCriteria(2263)]},
        {"max_new_tokens": 20, "stopping_criteria": [SecondEnd(7)]},
        {"max_new_tokens": 20, "stopping_criteria": [TenEarlier(20)]},
        {"max_new_tokens": 20, "eos_token_id": torch.tensor([2263]), "pad_token_id": None},
        {"max_new_tokens": 20, "eos_token_id": [199, 2263], "min_new_tokens": 5},
        {"max_new_tokens": 12, "forced_eos_token_id": 3},
    ],
    ids=lambda options: "+".join(options),
)
def test_greedy_output_matches_generate(model, inputs, options):
    expected = model.generate(**inputs, do_sample=False, **options)
    assert torch.equal(ours(model, **inputs, do_sample=False, **options), expected)


def test_stop_string_criterion_matches_generate(model, tokenizer, inputs):
    criteria = [StopStringCriteria(tokenizer=tokenizer, stop_strings=["\n\n", "1, 1"])]
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=30, stopping_criteria=criteria)
    assert expected.shape[1] < inputs.input_ids.shape[1] + 30
    actual = ours(model, **inputs, do_sample=False, max_new_tokens=30, stopping_criteria=criteria)
    assert torch.equal(actual, expected)


def test_output_object_has_scores_and_logits_of_generate(model, inputs):
    options = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.3, "return_dict_in_generate": True}
    expected = model.generate(**inputs, output_scores=True, output_logits=True, **options)
    actual = ours(model, **inputs, output_scores=True, output_logits=True, **options)
    assert type(actual) is type(expected)
    assert torch.equal(actual.sequences, expected.sequences)
    assert (len(actual.scores), len(actual.logits)) == (12, 12)
    for ours_, theirs in zip([*actual.scores, *actual.logits], [*expected.scores, *expected.logits], strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-4, atol=1e-4)
    transitions = model.compute_transition_scores(actual.sequences, actual.scores)
    assert transitions.shape == (1, 12)
    bare = ours(model, **inputs, **options | {"max_new_tokens": 1})
    assert bare.scores is None and bare.logits is None


def test_rows_without_pad_token_are_padded_with_first_eos(model, inputs, monkeypatch):
    """Without a padding token, rows are padded with the first end-of-sequence token."""
    ends = [199, 12, 266]  # the first is neither the smallest nor the largest
    monkeypatch.setattr(model.generation_config, "pad_token_id", None)
    ids = torch.cat([inputs.input_ids, inputs.input_ids.roll(3, 1), inputs.input_ids.flip(1)])
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 10}
    expected = model.generate(**asked, eos_token_id=ends)
    assert (expected[:, -2:] == ends[0]).all(1).any()
    assert torch.equal(ours(model, **asked, eos_token_id=ends), expected)


def test_rows_of_padded_batch_match_rows_decoded_alone(model, tokenizer):
    texts = [PROMPT, "import os\nimport sys\n\n", "x"]
    options = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.1, "eos_token_id": 7}
    options["pad_token_id"] = tokenizer.pad_token_id
    alone = []
    for text in texts:
        one = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        alone.append(model.generate(**one, **options)[0, one.input_ids.shape[1] :].tolist())
    assert len(alone[0]) < len(alone[2]) == 12
    for side in ("left", "right"):
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side=side, return_token_type_ids=False)
        actual = ours(model, **batch, **options)
        length = batch.input_ids.shape[1]
        assert torch.equal(actual[:, :length], batch.input_ids)
        padded = [new + [tokenizer.pad_token_id] * (12 - len(new)) for new in alone]
        assert actual[:, length:].tolist() == padded, side


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 4, "eos_token_id": [60, 2263, 12]},
        {"forced_eos_token_id": 63},
        {"begin_suppress_tokens": [397, 60, 12]},
        {"exponential_decay_length_penalty": (2, 1.6), "eos_token_id": 5},
        {"min_length": 9, "eos_token_id": [60, 2263, 2603]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_do_not_count_padding_of_row(model, options):
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.1, **options}
    row, other = [1, 266, 9], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    batch, mask = torch.tensor([[0] * 7 + row, other]), torch.tensor([[0] * 7 + [1] * 3, [1] * 10])
    alone = model.generate(torch.tensor([row]), attention_mask=torch.ones((1, 3), dtype=torch.long), **options)
    new = alone[0, 3:].tolist()
    for num_rows in (1, 2):
        actual = ours(model, batch[:num_rows], attention_mask=mask[:num_rows], **options)
        assert actual[0, 10 : 10 + len(new)].tolist() == new, num_rows
        assert not actual[0, 10 + len(new) :].any()


@pytest.mark.parametrize(
    ("window", "is_exact"), [(None, True), (40, True), (8, False)], ids=["no window", "long window", "short window"]
)
def test_tokens_hidden_inside_a_prompt_are_left_out_or_refused(window, is_exact):
    """`generate` hides tokens equal to pad_token_id, but windows count them."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
        sliding_window=window,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(2, 200, (1, 16), generator=torch.Generator().manual_seed(0))
    ids[0, 6] = 0
    options = {"do_sample": False, "max_new_tokens": 12}
    if is_exact:
        assert torch.equal(ours(model, ids.int(), **options), model.generate(ids, **options))
    else:
        with pytest.raises(RequestError, match="hides tokens inside a prompt"):
            ours(model, ids, **options)


def test_forced_first_token_counts_padding_like_generate(model):
    """`generate` forces the token after a prompt of one token; a padded prompt is longer."""
    batch, mask = torch.tensor([[0, 0, 9], [7, 8, 9]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "forced_bos_token_id": 63}
    expected = model.generate(batch, attention_mask=mask, **options)
    assert expected[0, 3] != 63 and torch.equal(ours(model, batch, attention_mask=mask, **options), expected)
    for ids in (batch[:1, 2:], batch[:, 2:]):
        actual = ours(model, ids, attention_mask=torch.ones_like(ids), **options)
        assert (actual[:, 1] == 63).all()


def test_rows_that_end_early_are_padded_like_generate(model):
    batch = torch.tensor([[1, 266, 9], [7, 8, 9]])
    options = {"attention_mask": torch.ones_like(batch), "max_new_tokens": 8, "do_sample": False}
    first = model.generate(batch, **options)[0, 4].item()
    model_options = {"eos_token_id": first, **options}
    assert torch.equal(ours(model, batch, **model_options), model.generate(batch, **model_options))


class AtLength(StoppingCriteria):
    """Stops each row at the length that `lengths` has for its first token."""

    def __init__(self, lengths: dict[int, int]):
        self.lengths = lengths

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= self.lengths.get(row[0].item(), 1000) for row in input_ids])


@pytest.mark.parametrize(
    ("eos_token_id", "lengths"),
    thinned(2, [None, -1], [{1: 6, 7: 10, 9: 8}, {1: 6, 9: 8}]),  # all rows end, and one reaches the limit
)
def test_rows_ended_by_criterion_continue_or_are_padded_like_generate(model, monkeypatch, lengths, eos_token_id):
    monkeypatch.setattr(model.generation_config, "eos_token_id", eos_token_id)
    batch = torch.tensor([[1, 266, 9], [7, 8, 9], [9, 4, 5]])
    options = {"attention_mask": torch.ones_like(batch), "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    options |= {"stopping_criteria": [AtLength(lengths)], "repetition_penalty": 1.2}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, actual = model.generate(batch, **options), ours(model, batch, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    assert bool(actual.sequences[0, 6:].any()) == (eos_token_id is None)
    assert len(actual.scores) == len(actual.logits) == len(expected.scores)
    assert actual.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    if eos_token_id is None:
        for mine, theirs in zip([*actual.scores, *actual.logits], [*expected.scores, *expected.logits], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_sampled_rows_continue_unchanged_after_their_criterion(model):
    batch = torch.tensor([[1, 266, 9], [7, 8, 9]])
    options = {"attention_mask": torch.ones_like(batch), "do_sample": True, "seed": 3, "eos_token_id": None}
    options |= {"max_new_tokens": 12, "pad_token_id": 0}
    actual = ours(model, batch, stopping_criteria=[AtLength({1: 6, 7: 11})], **options)
    assert torch.equal(actual, ours(model, batch, **options)[:, :11])


def test_text_streamer_receives_whole_text(model, tokenizer, inputs):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=PATIENCE)
    options = {"max_new_tokens": 20, "do_sample": False}
    thread = threading.Thread(target=lambda: ours(model, **inputs, streamer=streamer, **options))
    thread.start()
    streamed = "".join(streamer)
    thread.join()
    expected = model.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :]
    assert streamed == tokenizer.decode(expected)


class Recorder(BaseStreamer):
    """Keeps the token ids that it receives."""

    def __init__(self):
        self.token_ids: list[int] = []
        self.has_ended = False

    def put(self, value):
        self.token_ids += value.flatten().tolist()

    def end(self):
        self.has_ended = True


def test_streamer_receives_same_tokens_as_in_generate_and_is_ended(model, inputs):
    options = {"max_new_tokens": 8, "do_sample": False}
    actual, expected = Recorder(), Recorder()
    ours(model, **inputs, streamer=actual, **options)
    model.generate(**inputs, streamer=expected, **options)
    assert actual.token_ids == expected.token_ids
    assert actual.has_ended and expected.has_ended


def test_generate_does_not_pass_streamer_or_assistant_to_custom_generate(model, inputs):
    """If this test fails, `arguments_of_generate` is no longer needed."""
    streamer, calls = Recorder(), []

    def custom(model, input_ids, *prepared, streamer=None, assistant_model=None, **model_kwargs):
        calls.append(((streamer, assistant_model), arguments_of_generate()))
        return input_ids

    model.generate(**inputs, custom_generate=custom, streamer=streamer, assistant_model=model, max_new_tokens=2)
    assert calls == [((None, None), (streamer, model, None))]
    assert arguments_of_generate() == (None, None, None)  # not inside a call of generate


def test_sampling_is_reproducible_and_matches_runtime(model, inputs, half_model_dir):
    options = {"do_sample": True, "temperature": 0.9, "top_k": 0, "max_new_tokens": 10, "eos_token_id": -1}
    first = ours(model, **inputs, seed=7, **options)
    assert torch.equal(first, ours(model, **inputs, seed=7, W=0, N=2, G=0, **options))
    lookahead, sampling = LookaheadConfig(3, 3, 3), SamplingConfig(temperature=0.9, seed=7)
    with LookaheadRuntime(half_model_dir, lookahead=lookahead, device="cpu", dtype="float32") as runtime:
        out = runtime.generate(PROMPT, 10, eos=False, sampling=sampling)
    assert first[0, inputs.input_ids.shape[1] :].tolist() == out.token_ids
    torch.manual_seed(3)
    sampled = ours(model, **inputs, **options)
    assert not torch.equal(sampled, ours(model, **inputs, **options))
    torch.manual_seed(3)
    assert torch.equal(sampled, ours(model, **inputs, **options))


def test_repeated_rows_get_independent_samples(model, inputs):
    options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 6, "eos_token_id": -1, "seed": 5}
    actual = ours(model, **inputs, num_return_sequences=3, **options)
    assert len({tuple(row) for row in actual.tolist()}) == 3
    different = torch.tensor([[1, 2, 3], [4, 5, 6]])
    flat = {"attention_mask": torch.ones_like(different), "temperature": 1e4, "top_k": 0, "max_new_tokens": 4}
    first, second = ours(model, different, do_sample=True, eos_token_id=-1, **flat)[:, 3:].tolist()
    assert first != second  # with a random seed all rows are independent
    assert torch.equal(actual[:1], ours(model, **inputs, **options))


def test_time_limit_ends_generation(model, inputs):
    actual = ours(model, **inputs, do_sample=False, max_new_tokens=3000, max_time=0.2, eos_token_id=-1)
    assert inputs.input_ids.shape[1] < actual.shape[1] < 3000


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise RuntimeError("as expected")


def test_model_is_left_unchanged(half_model_dir, inputs):
    model = AutoModelForCausalLM.from_pretrained(half_model_dir, dtype=torch.float32, attn_implementation="sdpa")
    model.register_forward_pre_hook(lambda module, args: None)
    model.train()
    model.model.layers[0].eval()

    def state():
        flags = [module.training for module in model.modules()]
        config = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
        generation = model.generation_config.to_dict()
        names = sorted(vars(model))
        grads = [parameter.requires_grad for parameter in model.parameters()]
        return flags, config, generation, names, grads, model.config._attn_implementation, torch.is_grad_enabled()

    ours(model, **inputs, max_new_tokens=4)  # generate itself may add to a model at its first call
    before = state()
    out = ours(model, **inputs, max_new_tokens=4, return_dict_in_generate=True, output_logits=True)
    assert not out.logits[0].is_inference()
    assert state() == before
    with pytest.raises(RuntimeError, match="as expected"):
        ours(model, **inputs, max_new_tokens=4, logits_processor=[Failing()])
    assert state() == before


def test_lack_of_memory_raises_torch_out_of_memory_error(model, inputs, tmp_path):
    lacking = LacksMemory(tmp_path, inputs.input_ids.shape[1] + 2)
    with pytest.raises(torch.OutOfMemoryError, match="^not enough memory on cpu for this request: a prompt of "):
        ours(model, **inputs, max_new_tokens=8, logits_processor=[lacking])


def test_max_new_tokens_may_be_a_float(model, inputs):
    assert torch.equal(ours(model, **inputs, max_new_tokens=5.0), ours(model, **inputs, max_new_tokens=5))


@pytest.mark.parametrize("drafter", thinned(14, ["full", "paper"]))
def test_text_may_fill_all_positions_and_a_token_more(random_model, drafter):
    """The last new token is not fed, as in `generate`. GPT-2 fails at a position beyond its context."""
    model = random_model("GPT2", max_position_embeddings=64, initializer_range=0.3)
    kwargs = {"lookahead": LookaheadConfig(W=5, N=4, G=5, drafter=drafter), "custom_generate": lookahead_generate}
    prompt = torch.randint(1, model.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    mask = torch.ones((2, 40), dtype=torch.int64)
    mask[1, :7] = 0  # padding counts for `max_new_tokens`, and not for the positions
    for ids, length, attention in ((prompt[:1], 64, None), (prompt[:1, :40], 40, None), (prompt[:, :40], 40, mask)):
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": attention}
        options["max_new_tokens"] = 65 - length
        assert torch.equal(model.generate(ids, **options, **kwargs), model.generate(ids, **options))
        options["max_new_tokens"] += 1
        what = f"max_new_tokens={66 - length}: must be at most {65 - length}: {length} tokens . {66 - length} new ones"
        with pytest.raises(RequestError, match=what):
            model.generate(ids, **options, **kwargs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 3}, "num_beams=3 asks for beam_search: lookahead_generate does greedy_search"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=2 asks for beam_sample"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 asks for assisted_generation"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True: must be left out"),
        ({"W": -1}, "lookahead.W=-1: must be an integer >= 0"),
        ({"N": 1}, "lookahead.N=1: must be an integer >= 2"),
        ({"seed": -1}, "sampling.seed=-1: must be an integer >= 0"),
        (
            {"max_new_tokens": 5000},
            r"max_new_tokens=5000: must be at most \d+: \d+ tokens . 5000 new ones",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_unsupported_options_are_refused(model, inputs, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        ours(model, **inputs, **options)
    assert len(str(caught.value).splitlines()) == 1


def test_assistant_model_is_refused(model, inputs):
    with pytest.raises(ValueError, match="assistant_model=LlamaForCausalLM asks for assisted_generation"):
        ours(model, **inputs, assistant_model=model)


def test_unsupported_model_inputs_are_refused(model, inputs):
    cache = model(**inputs).past_key_values
    length = inputs.input_ids.shape[1]
    for options, message in (
        ({"inputs_embeds": torch.zeros((1, 3, model.config.hidden_size))}, "inputs_embeds=...: must be left out"),
        ({"past_key_values": cache}, "(past_key_values|cache): must be empty"),
        ({"position_ids": torch.arange(5, 5 + inputs.input_ids.shape[1])[None]}, "position_ids: must be left out"),
        (
            {"attention_mask": torch.ones((1, length + 1))},
            f"attention_mask, position_ids: for {length + 1} tokens",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ours(model, **inputs | options, max_new_tokens=4)


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(5, 9),
        torch.arange(5, 9)[None],
        torch.stack([torch.arange(first, first + 4).expand(2, 4) for first in (0, 0, 1)]),
        torch.arange(4).expand(3, 4),
    ],
    ids=["[L]", "[1, L]", "[3, B, L]", "too many rows"],
)
def test_position_ids_that_do_not_count_from_0_are_refused(model, positions):
    with pytest.raises(ValueError, match="position_ids: must be left out, or count each row's tokens from 0"):
        ours(model, torch.tensor([[3, 5, 7, 11], [9, 8, 4, 2]]), max_new_tokens=4, position_ids=positions)


def test_position_ids_that_count_from_0_may_be_broadcast(model):
    batch = torch.tensor([[3, 5, 7, 11], [9, 8, 4, 2]])
    options = {"max_new_tokens": 2, "do_sample": False}
    expected = ours(model, batch, **options)
    for shape in ((4,), (1, 4), (2, 4), (3, 1, 4), (4, 2, 4)):
        actual = ours(model, batch, position_ids=torch.arange(4).expand(shape), **options)
        assert torch.equal(actual, expected), shape


def test_autocast_is_refused(model, inputs):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"^torch\.autocast: must be off; "):
        ours(model, **inputs, max_new_tokens=4)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert ours(model, **inputs, max_new_tokens=4).shape[1] > inputs.input_ids.shape[1]


def test_model_without_tree_and_chain_support_is_refused(random_model):
    model = random_model("Mamba", state_size=8)
    with pytest.raises(
        ModelError,
        match="mamba: cannot be fed a token tree: its layers of type linear_attention .* nor chains of guesses: ",
    ):
        ours(model, torch.tensor([[1, 2, 3]]), max_new_tokens=4, pad_token_id=0)


SCRIPT = """
import json, os, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria
from lp_runtime import lookahead_generate

class Stop(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([os.environ["RANK"] == "0" and input_ids.shape[1] > 25])

torch.set_num_threads(1)
folder, output = sys.argv[1:3]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
inputs = AutoTokenizer.from_pretrained(folder)(sys.argv[3], return_tensors="pt", return_token_type_ids=False)
call = dict(inputs, custom_generate=lookahead_generate, W=5, N=4, G=5, max_new_tokens=30)
outs = [model.generate(**call, do_sample=False), model.generate(**call, do_sample=True)]
full = model.generate(**call, do_sample=False, return_dict_in_generate=True, output_scores=True)
outs += [full.sequences, model.generate(**call, do_sample=False, stopping_criteria=[Stop()])]
top = [row.argmax().item() for row in full.scores]
with open(f"{output}/{torch.randint(2**60, ()).item()}.json", "w") as file:
    json.dump([[out.tolist() for out in outs], top], file)
"""


@pytest.mark.slow
def test_torchrun_ranks_return_same_output_as_generate(model, inputs, half_model_dir, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    with marked() as mark:
        result = subprocess.run(
            [*command, str(half_model_dir), str(tmp_path / "out"), PROMPT],
            cwd=tmp_path,
            env=mark.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert result.returncode == 0, result.stderr
        mark.assert_gone()
    first, second = (json.loads(file.read_text()) for file in (tmp_path / "out").iterdir())
    assert first == second
    (greedy, sampled, full, stopped), top = first
    assert greedy == full == model.generate(**inputs, do_sample=False, max_new_tokens=30).tolist()
    assert top == greedy[0][inputs.input_ids.shape[1] :]
    assert len(sampled[0]) <= len(greedy[0])
    assert stopped == [greedy[0][:26]]
