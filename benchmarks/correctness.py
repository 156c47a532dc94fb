"""Checks that outputs are right. Exits with 1 if any is wrong.

python benchmarks/correctness.py STUDY [ARGUMENT ...]

equality        greedy decoding in float32 against transformers' `generate`
identity        one seed, one output: random models, settings, numbers of replicas and samplers
constraints     text under a grammar against masked decoding of one token per step
schemas         random JSON schemas through every path that takes one, against masked decoding
forced          steps saved by a grammar, with and without drafting the tokens that it forces
distribution    sampled tokens against the probabilities that transformers gives them
half_precision  outputs in bfloat16 with exactness=fast and exactness=strict
types           every type of transformers' causal LM mapping: exact, or refused in one line
random_configs  greedy decoding of models with randomly configured attention
chains          models with recurrent state, which are fed chains of guesses
shared_model    one model object used by several threads, with interrupts
wrapped_models  adapters, caches, compiled and offloaded models, and other wrappers: exact, or refused in one line
transformers_tests  transformers' own generation tests, with `generate` routed through the drop-in
prefix_cache    turns of conversations with and without the prefix cache; bounded memory
text            text of random tokens, for every kind of tokenizer, against transformers' decode
fuzz            malformed HTTP requests and command lines must be refused
"""

from common import run_command

STUDIES = {
    name: name
    for name in (
        "equality",
        "identity",
        "constraints",
        "schemas",
        "forced",
        "distribution",
        "half_precision",
        "types",
        "random_configs",
        "chains",
        "shared_model",
        "wrapped_models",
        "transformers_tests",
        "prefix_cache",
        "text",
        "fuzz",
    )
}

if __name__ == "__main__":
    run_command("correctness.py", __doc__, STUDIES)
