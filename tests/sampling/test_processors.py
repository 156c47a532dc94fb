"""transformers' logits processors give each node of a tree the same scores as its text alone."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as library

from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.errors import ConfigError, RequestError
from lp_runtime.lookahead.tree import TokenTree
from lp_runtime.sampling.hf_settings import build_processors
from lp_runtime.sampling.processors import TreeProcessors, moved, of_row

CPU = torch.device("cpu")
TEXT = [1, 2, 3, 4, 1, 2, 3]


class NoSuccessorOfItself(LogitsProcessor):
    """A user's processor that supports only one prompt at a time."""

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(scores) == 1
        scores[:, input_ids[0, -1]] = float("-inf")
        return scores


PROCESSORS = [
    library.RepetitionPenaltyLogitsProcessor(1.7),
    library.NoRepeatNGramLogitsProcessor(2),
    library.NoBadWordsLogitsProcessor([[5], [1, 2], [3, 4, 5]], torch.tensor([0])),
    library.SequenceBiasLogitsProcessor([[[7], 3.0], [[2, 3], -4.0]]),
    library.MinNewTokensLengthLogitsProcessor(7, 2, torch.tensor([0])),
    library.MinLengthLogitsProcessor(9, torch.tensor([0])),
    library.ForcedEOSTokenLogitsProcessor(9, 0),
    library.ExponentialDecayLengthPenalty((1, 1.5), torch.tensor([0]), 7),
    library.SuppressTokensLogitsProcessor([3, 4]),
    library.SuppressTokensAtBeginLogitsProcessor([3, 4], 8),
    library.EncoderRepetitionPenaltyLogitsProcessor(2.0, torch.tensor([TEXT])),
    library.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([TEXT])),
    library.PrefixConstrainedLogitsProcessor(lambda row, ids: [row, int(ids[-1]), len(ids)], 1),
    NoSuccessorOfItself(),
    library.TemperatureLogitsWarper(0.7),
    library.TopKLogitsWarper(5),
    library.TopPLogitsWarper(0.8),
    library.MinPLogitsWarper(0.1),
    library.TypicalLogitsWarper(0.8),
    library.EpsilonLogitsWarper(0.05),
    library.EtaLogitsWarper(0.05),
    library.LogitNormalization(),
]


def make_tree() -> TokenTree:
    tree = TokenTree([2, 3], max_depth=9)
    for branch in ([4, 1, 2], [4, 5], [1, 2, 3], [9]):
        tree.add_branch(branch)
    return tree


def alone(processors, logits, tree, node) -> torch.Tensor:
    ids = torch.tensor([TEXT + tree.path(node)])
    return LogitsProcessorList(processors)(ids, logits[None].clone())[0]


@pytest.mark.parametrize(
    "processors",
    [[processor] for processor in PROCESSORS] + [PROCESSORS[i : i + 18 : 5] for i in range(4)],
    ids=lambda processors: "+".join(type(processor).__name__ for processor in processors),
)
def test_node_scores_match_those_of_its_text_alone(processors):
    tree = make_tree()
    nodes = [node for node in range(tree.root, len(tree)) if node != 3]  # a share may own only some nodes
    logits = torch.randn((len(nodes), 16), generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    scores = TreeProcessors(processors, CPU)(logits, tree, nodes, TEXT)
    assert torch.equal(logits, before)
    changed = False
    for row, node in enumerate(nodes):
        expected = alone(processors, logits[row], tree, node)
        torch.testing.assert_close(scores[row], expected, rtol=1e-6, atol=1e-6)
        changed |= not torch.equal(expected, logits[row])
    assert changed


def test_processors_see_committed_tokens():
    processors = TreeProcessors([NoSuccessorOfItself()], CPU)
    for text in (TEXT, [*TEXT, 8], [*TEXT, 8, 2, 5]):
        scores = processors(torch.zeros((1, 16)), TokenTree(text[-1:], max_depth=0), [0], text)
        assert scores[0].isinf().nonzero().flatten().tolist() == [text[-1]]


def test_share_without_nodes_returns_empty_scores():
    processors = TreeProcessors(PROCESSORS, CPU)
    assert processors(torch.empty((0, 16)), make_tree(), [], TEXT).shape == (0, 16)


@pytest.mark.parametrize(
    "processor",
    [
        library.NoBadWordsLogitsProcessor([[99]]),
        library.SequenceBiasLogitsProcessor([[[99], 1.0]]),
        library.ForcedEOSTokenLogitsProcessor(9, 99),
        library.ForcedBOSTokenLogitsProcessor(99),
        library.ExponentialDecayLengthPenalty((1, 1.5), torch.tensor([99]), 2),
    ],
    ids=lambda processor: type(processor).__name__,
)
def test_failing_processor_raises_request_error(processor):
    """Token 99 is not in the vocabulary of 16 tokens; the error ends only that request."""
    text = TEXT[:1] if isinstance(processor, library.ForcedBOSTokenLogitsProcessor) else [*TEXT, 3]
    processors = TreeProcessors([processor], CPU, reports=True)
    with pytest.raises(RequestError, match=f"{type(processor).__name__} failed: "):
        processors(torch.zeros((1, 16)), TokenTree(text[-1:], max_depth=0), [0], text)


def test_classifier_free_guidance_is_refused():
    processor = library.ClassifierFreeGuidanceLogitsProcessor(1.5)
    with pytest.raises(ConfigError, match="ClassifierFreeGuidanceLogitsProcessor: must be left out"):
        TreeProcessors([processor], CPU)


def ignoring(length: int | torch.Tensor) -> library.RepetitionPenaltyLogitsProcessor:
    """Return a penalty that ignores the first tokens; the constructor of older versions takes no tensor."""
    processor = library.RepetitionPenaltyLogitsProcessor(1.5)
    processor.prompt_ignore_length = length
    return processor


def test_batch_processors_are_reduced_to_one_row():
    padded = ignoring(torch.tensor([0, 2]))  # as newer versions of transformers set it for a padded batch
    batch = LogitsProcessorList(
        [
            padded,
            library.PrefixConstrainedLogitsProcessor(lambda row, ids: [row], 1),
            library.TopKLogitsWarper(5),
        ]
    )
    penalty, constrained, top_k = of_row(batch, 1, 2, False)
    assert penalty.prompt_ignore_length is None and penalty.penalty == 1.5
    scores = constrained(torch.tensor([TEXT]), torch.zeros((1, 16)))
    assert (scores[0] == 0).nonzero().flatten().tolist() == [1]
    assert top_k is batch[2]
    with pytest.raises(ConfigError, match="EncoderRepetitionPenaltyLogitsProcessor: is for one prompt without padding"):
        of_row([PROCESSORS[10]], 0, 0, False)


@pytest.mark.parametrize(
    ("ignored", "rest"), [(5, 3), (1, None), (torch.tensor([0, 6]), 4), (torch.tensor([0, 2]), None)]
)
def test_ignored_prompt_of_repetition_penalty_does_not_count_padding(ignored, rest):
    """`ignored` counts from the start of the row, which has two tokens of padding here."""
    (penalty,) = of_row([ignoring(ignored)], 1, 2, False)
    assert (penalty.penalty, penalty.prompt_ignore_length) == (1.5, rest)


def test_ignored_prompt_may_be_a_tensor_of_one_length():
    tree = TokenTree([TEXT[-1]], max_depth=1)
    for token in (3, 4):
        tree.add_branch([token])
    logits = torch.arange(48, dtype=torch.float32).view(3, 16)
    expected, actual = (
        TreeProcessors([ignoring(each)], CPU)(logits, tree, [0, 1, 2], TEXT) for each in (2, torch.tensor([2]))
    )
    assert torch.equal(actual, expected) and not torch.equal(actual, logits)


def test_processor_is_moved_to_the_device_of_the_model():
    processor = library.MinLengthLogitsProcessor(9, 2, device="cpu")
    copied = moved(processor, torch.device("meta"))
    assert copied.eos_token_id.device.type == "meta" and processor.eos_token_id.device.type == "cpu"


@pytest.mark.parametrize("result", [None, np.zeros((1, 16))], ids=["nothing", "array"])
def test_processor_must_return_a_tensor(result):
    processors = TreeProcessors([lambda ids, scores: result], CPU)
    with pytest.raises(ConfigError, match=f"returned {type(result).__name__}; it must return the scores, a tensor"):
        processors.process_next(torch.zeros((1, 16)), TEXT)


class ForABatch(LogitsProcessor):
    """A user's processor that assumes a batch of two prompts."""

    def __call__(self, input_ids, scores):
        return scores + torch.ones((2, 16))


def test_processor_that_needs_a_batch_is_refused():
    processors = TreeProcessors([ForABatch()], CPU)
    with pytest.raises(
        ConfigError, match=r"ForABatch: returned shape \(2, 16\) for scores of shape \(1, 16\); it must work on one"
    ):
        processors(torch.zeros((1, 16)), TokenTree([1], max_depth=0), [0], TEXT)


# A value for each field that a generation_config.json may have and that a decoder accepts there.
FIELDS = {
    "max_length": 40,
    "max_new_tokens": 7,
    "min_length": 3,
    "min_new_tokens": 2,
    "early_stopping": True,
    "max_time": 3.0,
    "stop_strings": ["a"],
    "do_sample": True,
    "num_beams": 4,
    "num_beam_groups": 2,
    "use_cache": False,
    "cache_implementation": "static",
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "repetition_penalty": 1.1,
    "encoder_repetition_penalty": 1.1,
    "length_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[3]],
    "renormalize_logits": True,
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 2,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": [3, 1.5],
    "suppress_tokens": [4],
    "begin_suppress_tokens": [5],
    "sequence_bias": [[[3], 1.0]],
    "token_healing": True,
    "watermarking_config": {"bias": 2.5},
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "return_dict_in_generate": True,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "encoder_no_repeat_ngram_size": 2,
    "decoder_start_token_id": 1,
    "is_assistant": True,
    "num_assistant_tokens": 5,
    "prompt_lookup_num_tokens": 4,
    "assistant_early_exit": 1,
    "low_memory": True,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "diversity_penalty": 0.5,
    "constraints": [1],
    "force_words_ids": [[3]],
    "prefill_chunk_size": 8,
}


@pytest.mark.parametrize("eos_token_ids", [(), (2,)])
def test_every_generation_config_field_is_accepted_as_default(random_model, eos_token_ids):
    model = random_model()
    for name, value in FIELDS.items():
        model.generation_config = GenerationConfig(**{name: value})
        try:
            build_processors(model, [1, 2, 3], SamplingConfig(), 8, eos_token_ids)
        except ConfigError as error:
            pytest.fail(f"{name}: {error}")
