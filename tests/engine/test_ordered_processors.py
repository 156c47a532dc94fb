"""Processors that keep a state are called as by `generate`: once per committed token, in order."""

from dataclasses import replace

import pytest
import torch
from support.engines import engine_of
from support.ranks import run_ranks
from support.small_models import random_model
from support.stateful import STATEFUL, Budget, EveryThird, GrewByOne, MovingAverage
from support.thinned import thinned
from transformers import LogitsProcessor, PreTrainedModel, SynthIDTextWatermarkingConfig

from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig, lookahead_generate
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.distributed.transport.group import Group
from lp_runtime.errors import ConfigError
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request

PROMPT = (3, 5, 7, 11, 3, 5, 7)
NUM_NEW = 24
NUM_SHARED = 10  # tokens that two replicas decode
SETTINGS = {
    "default": LookaheadConfig(),
    "5,3,5": LookaheadConfig(W=5, N=3, G=5),
    "paper": LookaheadConfig(W=7, N=5, G=7, drafter="paper"),
    "paper, guesses only": LookaheadConfig(W=7, N=5, G=7, drafter="paper", acceptance="guesses"),
}
SHARED = LookaheadConfig(W=7, N=5, G=7, prior="none")  # two replicas would ask about more of the vocabulary than one
PICKLED = {name: make for name, make in STATEFUL.items() if name != "closure"}


def make_model() -> PreTrainedModel:
    """Return a random model whose texts repeat themselves, so that guesses are right."""
    return random_model(seed=5, initializer_range=0.3)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model()


def generated(model, processor, num_tokens=NUM_NEW, **options) -> list[int]:
    """Return the new tokens of plain `generate` for PROMPT."""
    ids = model.generate(
        torch.tensor([PROMPT]), logits_processor=[processor], max_new_tokens=num_tokens, eos_token_id=None, **options
    )
    return ids[0, len(PROMPT) :].tolist()


def decode(model, request, group=None, num_outputs=None) -> tuple[list[int], Report | None]:
    """Return (new tokens, report); with `num_outputs`, only the tokens of the first outputs, and None."""
    tokens: list[int] = []
    for number, event in enumerate(engine_of(ModelRunner(model, 2048), group).run(request)):
        if isinstance(event, Report):
            return tokens, event
        if number == num_outputs:
            break
        tokens += event.token_ids
    return tokens, None


@pytest.mark.parametrize(("setting", "name"), thinned(5, SETTINGS, STATEFUL))
def test_drop_in_with_stateful_processor_matches_generate(model, name, setting):
    make = STATEFUL[name]
    expected = generated(model, make())
    ours = generated(
        model, make(), custom_generate=lookahead_generate, lookahead=replace(SETTINGS[setting], draft_tables="request")
    )
    assert ours == expected != generated(model, lambda ids, scores: scores)


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(4, PICKLED))
def test_samples_match_one_token_per_step_in_fewer_steps(model, name):
    request = Request(PROMPT, LookaheadConfig(W=7, N=5, G=7), NUM_NEW, processors=(PICKLED[name](),))
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8, top_p=0.95, seed=3)):
        request = replace(request, sampling=sampling)
        expected, report = decode(model, replace(request, lookahead=PLAIN))
        assert report.num_steps == len(expected) == NUM_NEW
        actual, report = decode(model, request)
        assert actual == expected
    greedy, report = decode(model, replace(request, sampling=SamplingConfig()))
    assert greedy == generated(model, PICKLED[name]())
    assert report.num_steps < NUM_NEW


@pytest.mark.parametrize("name", thinned(2, PICKLED))
def test_resume_restores_lost_processor_state(model, name):
    request = Request(PROMPT, LookaheadConfig(W=7, N=5, G=7), NUM_NEW, processors=(PICKLED[name](),))
    expected, _ = decode(model, request)
    for num_outputs in (1, 3, 6):
        committed, _ = decode(model, request, num_outputs=num_outputs)
        rest, report = decode(model, replace(request, committed=tuple(committed)))
        assert committed + rest == expected
        assert report is not None


class Bans(LogitsProcessor):
    """Depends on its arguments alone, and declares that by `prefix_only`."""

    prefix_only = True

    def __call__(self, input_ids, scores):
        scores[:, input_ids[0, -1]] = -torch.inf
        return scores


def on_a_rank(group: Group) -> dict[str, tuple[list[int], bool]]:
    """Return (tokens, whether rank 1 owned nodes) by processor."""
    model = make_model()
    results = {}
    for name, make in {**PICKLED, "bans": Bans}.items():
        request = Request(PROMPT, SHARED, NUM_SHARED, processors=(make(),))
        owned: set[bool] = set()
        events = engine_of(ModelRunner(model, 2048), group).run(
            request, observe=lambda nodes, step, rank, samples, owned=owned: owned.add(step.shares.num_owned[-1] > 0)
        )
        *outputs, _ = events
        results[name] = [token for each in outputs for token in each.token_ids], any(owned)
    return results


def test_replicas_agree_and_share_nodes_unless_processors_are_ordered(model):
    """If processors are ordered, one replica owns all nodes; otherwise the nodes are shared."""
    expected = {}
    for name, make in {**PICKLED, "bans": Bans}.items():
        request = Request(PROMPT, SHARED, NUM_SHARED, processors=(make(),))
        tokens, _ = decode(model, request)
        assert tokens == generated(model, make(), NUM_SHARED)
        expected[name] = tokens, name == "bans"
    assert run_ranks(on_a_rank, 2) == [expected, expected]


@pytest.mark.slow
def test_ordered_processors_keep_all_nodes_on_one_replica(demo_model_dir):
    with LookaheadRuntime(
        str(demo_model_dir), gpus=2, device="cpu", dtype="float32", lookahead=LookaheadConfig(W=7, N=5, G=7)
    ) as runtime:
        deltas = runtime.stream(list(PROMPT), 60, eos=False, processors=[EveryThird()], trace=True)
        assert {rank for delta in deltas for rank in delta.found_by} == {0}


def test_processor_is_called_once_per_token_until_eos(model):
    """A processor is called once per new token, and not after an end-of-sequence token."""
    counter = EveryThird()
    plain = generated(model, EveryThird())
    end = plain[17]
    num_expected = plain.index(end) + 1
    model.generate(
        torch.tensor([PROMPT]), custom_generate=lookahead_generate, logits_processor=[counter], max_new_tokens=NUM_NEW,
        eos_token_id=end,
    )  # fmt: skip
    assert counter.num_calls == num_expected


class Cycle(LogitsProcessor):
    """Forces each token of a cycle after the one before it; counts its calls."""

    def __init__(self, tokens: tuple[int, ...]):
        self.next = dict(zip(tokens, (*tokens[1:], tokens[0]), strict=True))
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        scores[:] = -torch.inf
        scores[:, self.next[int(input_ids[0, -1])]] = 0.0
        return scores


def test_processor_calls_end_at_eos_inside_accepted_path(model):
    """Calls end at the end-of-sequence token, although the prompt's cycle makes later guesses right, too."""
    cycle = (3, 5, 7, 11, 13, 17)
    processor = Cycle(cycle)
    prompt = torch.tensor([[*cycle, *cycle, cycle[0]]])
    ids = model.generate(
        prompt, custom_generate=lookahead_generate, logits_processor=[processor], max_new_tokens=20,
        eos_token_id=cycle[3], lookahead=LookaheadConfig(drafter="prompt_lookup"),
    )  # fmt: skip
    assert ids[0, prompt.shape[1] :].tolist() == list(cycle[1:4])
    assert processor.num_calls == 3


@pytest.mark.parametrize("make", thinned(2, [EveryThird, GrewByOne, MovingAverage, lambda: Budget(4, (9, 8))]))
def test_batch_rows_have_separate_processor_states(model, make):
    rows = torch.tensor([PROMPT, PROMPT[::-1]])
    expected = [
        model.generate(row[None], logits_processor=[make()], max_new_tokens=14, eos_token_id=None)[0].tolist()
        for row in rows
    ]
    options = {"max_new_tokens": 14, "eos_token_id": None, "custom_generate": lookahead_generate}
    assert model.generate(rows, logits_processor=[make()], **options).tolist() == expected


def test_processor_state_shared_by_rows_is_refused(model):
    options = {"max_new_tokens": 8, "eos_token_id": None, "custom_generate": lookahead_generate}
    rows = torch.tensor([PROMPT, PROMPT])
    with pytest.raises(ConfigError, match="^process: may keep a state that the rows of a batch would share"):
        model.generate(rows, logits_processor=[STATEFUL["closure"]()], **options)

    class Uncopied(EveryThird):
        def __deepcopy__(self, memo):
            raise RuntimeError("no\ncopy")

    with pytest.raises(ConfigError, match="^Uncopied: cannot be copied for each row of a batch: no$"):
        model.generate(rows, logits_processor=[Uncopied()], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[2, 4, 6]])},
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3], context_history_size=16)},
    ],
    ids=["guidance", "synthid"],
)
def test_stateful_processors_of_transformers_match_generate(model, options):
    expected = generated(model, lambda ids, scores: scores, 24, **options)
    ours = generated(model, lambda ids, scores: scores, 24, custom_generate=lookahead_generate, **options)
    assert ours == expected
