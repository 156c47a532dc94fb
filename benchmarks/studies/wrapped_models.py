"""Checks `lookahead_generate` on wrapped models, and with caches and arguments that it does not use.

    python benchmarks/correctness.py wrapped_models

Models are small, random, in float32, and on the CPU; other libraries have wrapped some of them. Every case makes one
call of `generate` twice, without and with `custom_generate=lookahead_generate`, greedily, and compares token ids and
the state after the call. Outcomes:

exact
refused               by lookahead_generate, with the line
refused by generate   transformers raised before it called lookahead_generate
cannot be compared    the call also fails without lookahead_generate
WRONG                 a different output, or an error that is not a one-line refusal

A case whose library is not installed (peft, optimum-quanto, accelerate) is reported as left out. The exit status is 1
if a case is WRONG.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import Results
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoConfig,
    BartForConditionalGeneration,
    DynamicCache,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLForConditionalGeneration,
    StopStringCriteria,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

from lp_runtime.dropin.lookahead_generate import lookahead_generate
from lp_runtime.errors import LookaheadError, first_line

VOCABULARY_SIZE = 97
SETTING = {"W": 7, "N": 5, "G": 7}
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads")
VISION = {name: TEXT[name] for name in SIZES} | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
PROMPT = torch.tensor([[1, 17, 23, 42, 17, 23, 42, 17, 9, 30, 77, 5]])

Call = Callable[[dict[str, Any]], Any]  # calls `generate` for a case with some keywords; returns its output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    parser.add_argument("--max-new-tokens", type=int, default=48)


def small(model_class: type[PreTrainedModel], model_type: str, **fields: Any) -> Any:
    """Return a random model in eval mode; every call returns an equal one.

    Args:
        model_class: class of the model.
        model_type: its type in AutoConfig.
        fields: fields of the config.
    """
    torch.manual_seed(0)
    model: Any = model_class(AutoConfig.for_model(model_type, **fields))
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model.eval()


def llama(**fields: Any) -> Any:
    """Return a small Llama."""
    return small(LlamaForCausalLM, "llama", **TEXT | fields)


def caller(model: Any, prompt: torch.Tensor = PROMPT, **given: Any) -> Call:
    """Return a Call of a model's `generate`.

    Args:
        model: any object with `generate`.
        prompt: [1, L] token ids.
        given: keywords of every call. A callable named `fresh` is called, and its result passed instead.
    """

    def call(keywords: dict[str, Any]) -> Any:
        values = {
            name: value() if getattr(value, "__name__", "") == "fresh" else value for name, value in given.items()
        }
        return model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **values, **keywords)

    return call


def peft_cases() -> Iterator[tuple[str, Call]]:
    """Yield the cases of PEFT: adapters on, off, switched, and learned prompts."""
    import peft

    def lora(seed: int) -> Any:
        torch.manual_seed(seed)
        return peft.LoraConfig(
            r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
        )

    model: Any = peft.get_peft_model(llama(), lora(1), "first").eval()
    model.add_adapter("second", lora(2))
    model.eval()

    def with_adapter(name: str) -> Call:
        def call(keywords: dict[str, Any]) -> Any:
            model.set_adapter(name)
            return caller(model)(keywords)

        return call

    def without(keywords: dict[str, Any]) -> Any:
        with model.disable_adapter():
            return caller(model)(keywords)

    yield "PEFT LoRA, first adapter", with_adapter("first")
    yield "PEFT LoRA, set_adapter(second)", with_adapter("second")
    yield "PEFT LoRA, back to the first", with_adapter("first")
    yield "PEFT LoRA, disable_adapter()", without
    yield "PEFT LoRA, enabled again", with_adapter("first")
    yield "PEFT LoRA, get_base_model()", caller(model.get_base_model())
    for name, config in (
        ("prompt tuning", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6)),
        ("prefix tuning", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6)),
        ("P-tuning", peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=6, encoder_hidden_size=32)),
        (
            "IA3",
            peft.IA3Config(
                task_type="CAUSAL_LM",
                init_ia3_weights=False,
                target_modules=["k_proj", "v_proj", "down_proj"],
                feedforward_modules=["down_proj"],
            ),
        ),
    ):
        torch.manual_seed(3)
        yield f"PEFT {name}", caller(peft.get_peft_model(llama(), config).eval())


def filled_cache(model: Any) -> Callable[[], DynamicCache]:
    """Return a function that makes a cache with all tokens of PROMPT except the last."""

    def fresh() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(PROMPT[:, :-1], past_key_values=cache)
        return cache

    return fresh


def cache_cases() -> Iterator[tuple[str, Call]]:
    """Yield the cases of caches that the caller requests or passes."""
    model = llama()
    for name in ("dynamic", "static", "offloaded", "offloaded_static", "quantized"):
        yield f"cache_implementation={name}", caller(model, cache_implementation=name)
    yield "use_cache=False", caller(model, use_cache=False)
    yield "prefill_chunk_size=5", caller(model, prefill_chunk_size=5)

    def empty_cache(keywords: dict[str, Any]) -> Any:
        cache = DynamicCache(config=model.config)
        ids = caller(model, past_key_values=cache)(keywords)
        return ids, f"the caller's cache has {cache.get_seq_length()} tokens afterwards"

    yield "an empty DynamicCache", empty_cache
    yield "a filled DynamicCache", caller(model, past_key_values=filled_cache(model))


def family_cases() -> Iterator[tuple[str, Call]]:
    """Yield encoder-decoder models, and vision-language models with text only."""
    sizes = {"vocab_size": VOCABULARY_SIZE, "d_model": 32, "decoder_start_token_id": 0, "eos_token_id": None}
    heads = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    layers = {f"{half}_{name}": 2 for half in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    yield "T5", caller(small(T5ForConditionalGeneration, "t5", **sizes, **heads))
    yield (
        "Bart",
        caller(small(BartForConditionalGeneration, "bart", **sizes, **layers, encoder_ffn_dim=48, decoder_ffn_dim=48)),
    )
    yield (
        "Llava, text alone",
        caller(
            small(
                LlavaForConditionalGeneration,
                "llava",
                text_config={"model_type": "llama", **TEXT},
                vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **VISION},
                image_token_index=96,
            )
        ),
    )
    yield (
        "Gemma 3, text alone",
        caller(
            small(
                Gemma3ForConditionalGeneration,
                "gemma3",
                text_config=TEXT | {"head_dim": 8, "sliding_window": 8},
                vision_config=VISION,
                mm_tokens_per_image=4,
                image_token_index=96,
                boi_token_index=95,
                eoi_token_index=94,
            )
        ),
    )
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    tokens = {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}
    text = TEXT | {"rope_parameters": rope}
    qwen = small(Qwen2VLForConditionalGeneration, "qwen2_vl", text_config=text, vision_config=vision, **tokens)
    yield "Qwen2-VL, text alone", caller(qwen)


def wrapper_cases() -> Iterator[tuple[str, Call]]:
    """Yield models whose forward is compiled or hooked, and a model in train mode."""
    for backend in ("eager", "aot_eager"):
        compiled = llama()
        compiled.forward = torch.compile(compiled.forward, backend=backend, dynamic=True)
        yield f"model.forward compiled, backend {backend}", caller(compiled)
    yield "torch.compile(model), backend eager", caller(torch.compile(llama(), backend="eager", dynamic=True))
    checkpointing = llama()
    checkpointing.gradient_checkpointing_enable()
    yield "gradient checkpointing, eval mode", caller(checkpointing)

    dropping = small(GPT2LMHeadModel, "gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY_SIZE)

    def train_mode(keywords: dict[str, Any]) -> Any:
        dropping.train("custom_generate" in keywords)  # transformers' own call is made in eval mode
        ids = caller(dropping)(keywords)
        assert dropping.training == ("custom_generate" in keywords), "the mode is not as it was"
        return ids

    yield "GPT-2 in train mode with dropout 0.1, against eval mode", train_mode


def accelerate_cases() -> Iterator[tuple[str, Call]]:
    """Yield models with hooks of accelerate."""
    import accelerate

    yield "accelerate, device_map cpu", caller(accelerate.dispatch_model(llama(), {"": "cpu"}, force_hooks=True))
    yield "accelerate, cpu_offload", caller(accelerate.cpu_offload(llama(), execution_device=torch.device("cpu")))


def characters() -> PreTrainedTokenizerFast:
    """Return a tokenizer of printable ASCII: token n is the character n + 30, and the last one is "#$"."""
    vocabulary = {"<pad>": 0, "<s>": 1} | {chr(token + 30): token for token in range(2, VOCABULARY_SIZE - 1)}
    vocabulary["#$"] = VOCABULARY_SIZE - 1  # begins with token 5, the last one of PROMPT
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[("#", "$")]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>")


def tokenizer_cases() -> Iterator[tuple[str, Call]]:
    """Yield cases of generation arguments that need a tokenizer."""
    model, tokenizer = llama(), characters()
    plain = model.generate(PROMPT, max_new_tokens=20, do_sample=False)[0].tolist()
    stop = [str(tokenizer.decode(plain[-8:-6]))]
    config = copy.deepcopy(model.generation_config)
    config.stop_strings = stop
    yield "stop_strings=..., tokenizer=...", caller(model, stop_strings=stop, tokenizer=tokenizer)
    yield "stop_strings=... without tokenizer", caller(model, stop_strings=stop)
    yield "config.stop_strings, tokenizer=...", caller(model, generation_config=config, tokenizer=tokenizer)
    yield "config.stop_strings without tokenizer", caller(model, generation_config=config)
    criterion = StopStringCriteria(tokenizer, stop[0])
    yield "stopping_criteria=[StopStringCriteria(...)]", caller(model, stopping_criteria=[criterion])
    yield "token_healing=True, tokenizer=...", caller(model, token_healing=True, tokenizer=tokenizer)
    yield "token_healing=True without tokenizer", caller(model, token_healing=True)


def attempt(call: Call, keywords: dict[str, Any]) -> tuple[list[int] | None, str, BaseException | None]:
    """Return the token ids of a call, the note that it returned, and its exception."""
    try:
        torch.manual_seed(0)
        output = call(keywords)
    except Exception as error:
        return None, f"{type(error).__name__}: {first_line(error)}", error
    ids, note = output if isinstance(output, tuple) else (output, "")
    return ids[0].tolist(), note, None


def outcome(call: Call, max_new_tokens: int) -> dict[str, str]:
    """Return a row: the results of transformers and lookahead_generate, and whether they are equal."""
    asked = {"max_new_tokens": max_new_tokens, "do_sample": False}
    theirs, note, _ = attempt(call, asked)
    ours, our_note, error = attempt(call, asked | SETTING | {"custom_generate": lookahead_generate})
    row = {"generate": note if theirs is None else f"{len(theirs)} tokens {note}".strip()}
    if isinstance(error, LookaheadError):
        is_one_line = "\n" not in str(error)
        return row | {"outcome": "refused" if is_one_line else "WRONG: several lines", "lookahead_generate": our_note}
    if error is not None:
        files = [str(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
        reached = any("lp_runtime" in Path(file).parts for file in files)
        kind = "WRONG: fails" if reached else "refused by generate" if theirs else "cannot be compared"
        return row | {"outcome": kind, "lookahead_generate": our_note}
    assert ours is not None
    row["lookahead_generate"] = f"{len(ours)} tokens {our_note}".strip()
    if theirs is None:
        return row | {"outcome": "cannot be compared"}
    if ours == theirs:
        return row | {"outcome": "exact" if our_note == note else "WRONG: tokens exact"}
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return row | {"outcome": f"WRONG from token {first} on"}


def run(args: argparse.Namespace) -> int:
    """Run every case; return 1 if any is wrong."""
    logging.set_verbosity_error()
    results = Results("wrapped_models", args.output)
    for make_cases in (peft_cases, cache_cases, family_cases, wrapper_cases, accelerate_cases, tokenizer_cases):
        try:
            for name, call in make_cases():
                if args.only in name:
                    results.add({"case": name} | outcome(call, args.max_new_tokens))
        except ImportError as error:
            about = (inspect.getdoc(make_cases) or "").removeprefix("Yield ")
            results.add({"case": about, "outcome": f"left out: {first_line(error)}"})
    wrong = sum(str(row["outcome"]).startswith("WRONG") for row in results.rows)
    results.finish(f"{len(results.rows)} cases, {wrong} wrong; greedy, float32, {args.max_new_tokens} new tokens")
    return 1 if wrong else 0
