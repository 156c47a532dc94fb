"""Runs transformers' generation tests with `generate` routed to `lookahead_generate`.

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers FOLDER
    python benchmarks/correctness.py transformers_tests --tests FOLDER

FOLDER is a checkout of transformers that matches the installed version (`pip show transformers`); its tests/, utils/
and src/ are used. The tests need the packages httpx, parameterized and pytest. With RUN_SLOW=1 in the environment the
slow ones run, too.

The tests are those of `GenerationTesterMixin` for the given model families. Each runs twice: unchanged, and with model
classes whose `generate` uses `custom_generate=lookahead_generate` if the call asks for greedy search or sampling. The
tests compare as they always do. In addition, every greedy call is repeated without lookahead_generate, and the token
ids, scores and logits of the two outputs are compared. By design, each row of a batch padded on the right is decoded as
if alone: such a call is compared with its mask reversed. Attentions and hidden states are those of a tree, and
therefore refused: a call that asks for them is made without, and the test then gets transformers' output.

A sampled call is only checked by the test itself: lookahead_generate samples from the same distribution with separate
noise, so samples never equal those that transformers draws from torch's generator.

Outcomes: passed; refused (with the one-line reason of lookahead_generate); left out (NO_SENSE gives the reason, the
test is skipped by transformers, it makes no greedy or sampled call, or it also fails without lookahead_generate);
FAILED. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import sys
import unittest
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Results
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.utils import logging

from lp_runtime.dropin.lookahead_generate import lookahead_generate
from lp_runtime.errors import LookaheadError, first_line

FAMILIES = ("llama", "qwen3", "mistral", "gemma3", "mixtral", "gpt2")
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
STATES = ("output_attentions", "output_hidden_states")  # refused: those of a tree are not those of the text
ATOL = {torch.float32: 1e-4}  # between scores of two outputs; narrower types: only token ids are compared

NO_CALL = "calls the model or a helper, not generate"
# Reasons why tests make no sense with lookahead_generate, and prefixes of the tests' names.
REASONS = {
    "assisted decoding: lookahead_generate is a way of speculative decoding itself": (
        "assisted_decoding prompt_lookup_decoding generate_with_mtp"
    ),
    "beam search: lookahead_generate does greedy search and sampling": "beam_ model_parallel_beam_search",
    "the prompt is given as embeddings: lookahead_generate drafts from token ids, and refuses them": (
        "generate_from_inputs_embeds generate_from_random_inputs_embeds generate_continue_from_inputs_embeds"
    ),
    "about how generate compiles forward: lookahead_generate calls the model by itself": (
        "generate_compilation_all_outputs generate_compile_model_forward static_cache_no_recompile"
    ),
    "about the class of the cache: lookahead_generate has a cache of its own": (
        "generate_with_static_cache generate_with_quant_cache"
    ),
    "exports the model, with a decoding loop of its own": "executorch_export onnx_export torch_export",
    "needs a flash-attention kernel": "eager_matches_fa flash_attention",
    NO_CALL: (
        "custom_4d_attention_mask forward_with_logits_to_keep left_padding_compatibility past_key_values_format"
        " prepare_inputs_for_generation recurrent_layers_mask_padding inherits_generation_mixin"
        " eager_padding_matches_padding_free sdpa_padding_matches_padding_free"
    ),
}
NO_SENSE = {f"test_{name}": reason for reason, names in REASONS.items() for name in names.split()}


@dataclass
class Calls:
    """Calls of `generate` that a test made.

    Attributes:
        greedy: greedy calls that lookahead_generate served.
        sampled: sampled calls that lookahead_generate served.
        differences: a line for each greedy call whose output differed from transformers' own.
        setting: keywords for lookahead_generate.
    """

    greedy: int = 0
    sampled: int = 0
    differences: list[str] = field(default_factory=list)
    setting: dict[str, int] = field(default_factory=dict)

    def compare(self, ours: Any, theirs: Any) -> None:
        """Note the difference between two outputs of `generate`, if there is one.

        Args:
            ours: [B, L] token ids, or an output object, of lookahead_generate.
            theirs: output of transformers for equal arguments.
        """
        text = difference(ours, theirs)
        self.differences += [text] if text else []


class Outcome(NamedTuple):
    """Outcome of a test: passed, refused, left out or FAILED, with a line that explains it."""

    kind: str
    reason: str


class Recorder(unittest.TestResult):
    """Keeps the last problem of a test.

    Attributes:
        error: exception that the test raised, in a subtest or outside; None if it raised none.
        skipped_because: the reason why the test was skipped; None if it was not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.skipped_because: str | None = None

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        """Keep an exception."""
        self.error = err[1]

    addFailure = addError

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        """Keep the exception of a subtest; `err` is None if the subtest passed."""
        if err is not None:
            self.error = err[1]

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """Keep the reason why the test was skipped."""
        self.skipped_because = reason


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--tests", type=Path, required=True, metavar="FOLDER", help="a checkout of transformers")
    parser.add_argument("--families", nargs="+", default=FAMILIES, help="folders of tests/models")
    parser.add_argument("--only", default="", help="run the tests whose names contain this")
    parser.add_argument("--all", action="store_true", help="also run the tests of NO_SENSE, to see what happens")
    parser.add_argument("--setting", default="7,5,7", metavar="W,N,G")
    parser.add_argument("--max-new-tokens", type=int, default=12, help="for tests that leave it to the mixin (3)")


def mode_of(model: PreTrainedModel, given: Mapping[str, Any]) -> GenerationMode:
    """Return the generation mode of a call of the model's `generate` with these keywords."""
    config = given.get("generation_config") or model.generation_config
    assert isinstance(config, GenerationConfig)
    config = copy.deepcopy(config)
    config.update(**{name: value for name, value in given.items() if name != "generation_config"})
    return config.get_generation_mode(given.get("assistant_model"))


def difference(ours: Any, theirs: Any) -> str | None:
    """Return a line that describes how two outputs of `generate` differ, or None if they do not.

    Args:
        ours: [B, L] token ids, or an output object.
        theirs: output of transformers for equal arguments.
    """
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        return None if type(ours) is type(theirs) and torch.equal(ours, theirs) else "token ids differ"
    if not torch.equal(ours.sequences, theirs.sequences):
        return "token ids differ"
    for name in ("scores", "logits"):
        mine, their = getattr(ours, name), getattr(theirs, name)
        if (mine is None) != (their is None) or len(mine or ()) != len(their or ()):
            return f"{name}: {mine and len(mine)} steps, and {their and len(their)} of transformers'"
        for step, (a, b) in enumerate(zip(mine or (), their or (), strict=True)):
            atol = ATOL.get(b.dtype)
            if atol is not None and not torch.allclose(a, b.to(a.dtype), atol=atol, rtol=1e-3):
                return f"{name} of step {step} differ"
    return None


def turned_round(mask: Any) -> torch.Tensor | None:
    """Return an attention mask, [B, L], with right padding moved to the left; None if it has none."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not (mask[:, 1:] < mask[:, :-1]).any():
        return None
    return mask.flip(-1)


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of `generate` with copies of all values that it may change: caches, configs, processors."""
    return {
        name: value if callable(value) or isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in given.items()
    }


@cache
def routed(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of the same name whose greedy and sampled `generate` calls use lookahead_generate.

    Args:
        model_class: model class of a test. The subclass gets an attribute `calls`, set before a test, which counts
            the calls.
    """

    class Routed(model_class):  # type: ignore[misc, valid-type]
        calls = Calls()

        def generate(self, *args: Any, **given: Any) -> Any:
            """Generate like the parent class, with lookahead_generate if the call allows it."""
            calls = Routed.calls
            mode = mode_of(self, given)
            if mode not in MODES or "custom_generate" in given:
                return super().generate(*args, **given)
            ours_given = {name: value for name, value in given.items() if name not in STATES}
            ours_given |= {"custom_generate": lookahead_generate, **calls.setting}
            if mode is GenerationMode.SAMPLE:
                calls.sampled += 1
                ours = super().generate(*args, **ours_given)
                return super().generate(*args, **given) if any(map(given.get, STATES)) else ours
            calls.greedy += 1
            turned = turned_round(given.get("attention_mask"))
            if turned is not None and "position_ids" not in given:
                left = {"attention_mask": turned}
                pair = [super(Routed, self).generate(*args, **copied(each | left)) for each in (ours_given, given)]
                calls.compare(*pair)
            kept = copied(given)
            ours = super().generate(*args, **ours_given)
            theirs = super().generate(*args, **kept)
            if turned is None:
                calls.compare(ours, theirs)
            return theirs if any(map(given.get, STATES)) else ours

    Routed.__name__, Routed.__qualname__ = model_class.__name__, model_class.__qualname__
    Routed.__module__ = model_class.__module__
    return Routed


def with_routed_models(case: type[Any], calls: Calls, max_new_tokens: int) -> type[Any]:
    """Return a subclass of a test case whose generative models are routed.

    Args:
        case: a subclass of GenerationTesterMixin.
        calls: gets the calls of `generate` that the test makes.
        max_new_tokens: number of new tokens that the mixin's helpers request.
    """

    class WithRoutedModels(case):  # type: ignore[misc]
        @property
        def all_generative_model_classes(self) -> tuple[type[PreTrainedModel], ...]:
            """The parent's classes, routed."""
            classes = tuple(routed(each) for each in super().all_generative_model_classes)
            for each in classes:
                each.calls = calls  # type: ignore[attr-defined]
            return classes

    WithRoutedModels.max_new_tokens = max_new_tokens  # type: ignore[attr-defined]
    return WithRoutedModels


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the output of transformers and the tests."""
    logging.set_verbosity_error()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def run_test(case: type[unittest.TestCase], name: str) -> Recorder:
    """Run a test by its name and return its result."""
    recorder = Recorder()
    torch.manual_seed(0)
    with quiet():
        case(name).run(recorder)
    return recorder


def outcome_of(case: type[Any], name: str, max_new_tokens: int, setting: dict[str, int]) -> Outcome:
    """Run a test unchanged and with routed models; return its outcome.

    Args:
        case: the family's test case.
        name: name of the test.
        max_new_tokens: number of new tokens that the mixin's helpers request.
        setting: keywords for lookahead_generate.
    """
    alone = run_test(case, name)
    if alone.skipped_because is not None:
        return Outcome("left out", f"skipped by transformers: {alone.skipped_because}")
    if alone.error is not None:
        return Outcome("left out", f"fails without lookahead_generate: {first_line(alone.error)}")
    calls = Calls(setting=setting)
    routed_run = run_test(with_routed_models(case, calls, max_new_tokens), name)
    if isinstance(routed_run.error, LookaheadError):
        message = str(routed_run.error)
        return Outcome("refused", message) if "\n" not in message else Outcome("FAILED", f"several lines: {message!r}")
    if routed_run.error is not None:
        return Outcome("FAILED", f"{type(routed_run.error).__name__}: {first_line(routed_run.error)}")
    if calls.differences:
        return Outcome("FAILED", f"{len(calls.differences)} of {calls.greedy} calls: {calls.differences[0]}")
    if not calls.greedy + calls.sampled:
        return Outcome("left out", NO_CALL)
    return Outcome("passed", f"{calls.greedy} greedy calls, {calls.sampled} sampled")


def test_cases(families: list[str], mixin: type) -> Iterator[tuple[str, type[Any]]]:
    """Yield the name and the test case of every subclass of `mixin` in these folders of tests/models."""
    for family in families:
        module = importlib.import_module(f"tests.models.{family}.test_modeling_{family}")
        for name, case in vars(module).items():
            if isinstance(case, type) and issubclass(case, mixin) and case.__module__ == module.__name__:
                yield name.removesuffix("ModelTest"), case


def no_sense(name: str) -> str | None:
    """Return the prefix in NO_SENSE that matches a test's name, or None."""
    return next((beginning for beginning in NO_SENSE if name.startswith(beginning)), None)


def run(args: argparse.Namespace) -> int:
    """Run every test of every family; return 1 if any failed."""
    sys.path[:0] = [str(args.tests)]
    mixin = importlib.import_module("tests.generation.test_utils").GenerationTesterMixin
    names = [name for name in dir(mixin) if name.startswith("test_") and args.only in name]
    setting = dict(zip("WNG", map(int, args.setting.split(",")), strict=True))
    families_by_test: dict[tuple[str, Outcome], list[str]] = {}  # families by test and outcome
    for family, case in test_cases(args.families, mixin):
        for name in names:
            if not callable(getattr(case, name, None)):  # parameterized tests leave None under their own names
                continue
            beginning = None if args.all else no_sense(name)
            if beginning is None:
                key = name, outcome_of(case, name, args.max_new_tokens, setting)
            else:
                key = f"{beginning}*", Outcome("left out", NO_SENSE[beginning])
            print(family, *key, file=sys.stderr, flush=True)
            families_by_test.setdefault(key, []).append(family)
    results = Results("transformers_tests", args.output)
    counts: Counter[str] = Counter()
    for (name, outcome), families in sorted(families_by_test.items(), key=lambda item: (item[0][1].kind, item[0])):
        counts[outcome.kind] += len(families)
        shown = ", ".join(dict.fromkeys(families))
        about: dict[str, str | int] = {"test": name, "outcome": outcome.kind, "times": len(families)}
        results.add(about | {"families": shown, "reason": outcome.reason})
    total = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "refused", "left out", "FAILED"))
    results.finish(f"{total}; (W, N, G) = ({args.setting})")
    return 1 if counts["FAILED"] else 0
