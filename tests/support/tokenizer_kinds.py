"""Small tokenizers of every kind that transformers loads, by name; built here, without the hub.

Each has pieces that are awkward for an incremental detokenizer: parts of characters, spaces at either end, added tokens
with non-ASCII content. Vocabularies are small, so that random token ids are often awkward, too.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from lp_runtime.config.settings import DEMO_MODEL

CORPUS = """\
def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\n\tclass Stop(Exception):\n        pass\n
The answer is yes, isn't it? I do not think so! They've said: "we're done", and that's all 's well.
x = ' a ' ;  two  spaces
Grüße aus Köln, naïve café, Ærø, ﬁn; здравствуй мир, γειά σου Κόσμε;
北京是中国的首都，东京是日本的首都。日本語の文章です。
한국어 문장입니다 مرحبا بالعالم שלום עולם नमस्ते दुनिया ภาษาไทย ∑∫√ ½ © ® ™ “quotes” ‘single’ – — … ½
🙂🙃😀 👩‍👩‍👧 🏳️‍🌈 🇩🇪🇫🇷 é ñ \u00a0nbsp\u2028ls\ufffd \ufeffbom 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀𒀁
0123456789 3.14 1,000 {"ße": "ä", 'k': [1, 2]} <a href='b'>
the cat sat on the mat. the dog, the house; the man said hello world and stop stop STOP stopped nonstop
"""
BYTES = bytes_to_unicode()
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
# Pieces of byte-level vocabularies that begin or end within characters; each becomes a merge of two known pieces.
CROSSING = ["\xa9|\xc3", "a|\xe2", "\x80|\x99", "\xf0|\x9f", "\x99|\x82"]
CROSSING += ["\x82|\xf0", "\xef|\xbf", "\xbd|\xef", " |\xe5", "\xad|a"]
SPLIT = (  # the pieces of Llama 3's texts
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED = [  # with unusual contents, and with flags that change how text is encoded
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("é", normalized=False),
    AddedToken("北", normalized=False),
    AddedToken("ü ber", normalized=False),
    AddedToken(" lead", normalized=False),
    AddedToken("trail ", normalized=False),
    AddedToken("##odd", normalized=False),
    AddedToken("▁meta", normalized=False),
    AddedToken("</w>", normalized=False),
]
ADDED_SPECIAL = [
    AddedToken("<tool>", special=True, normalized=False),
    AddedToken("ß", special=True, normalized=False),
    AddedToken("<|é|>", lstrip=True, rstrip=True, special=True, normalized=False),
]


def _model_of(tokenizer: Tokenizer) -> dict:
    """Return a trained model's fields, as in tokenizer.json."""
    return json.loads(tokenizer.to_str())["model"]


def _numbered(pieces: list[str]) -> dict[str, int]:
    """Return a vocabulary of pieces in order, each once."""
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}


def _wrapped(tokenizer: Tokenizer, **options) -> PreTrainedTokenizerFast:
    """Return a tokenizer as transformers wraps it."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def _with_added(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer with added tokens, special and not."""
    tokenizer.add_tokens(ADDED)
    tokenizer.add_tokens(ADDED_SPECIAL, special_tokens=True)
    return tokenizer


# Byte-level vocabularies


@cache
def _byte_level_pieces() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return (pieces, merges) of a byte-level vocabulary, as printable characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=sorted(BYTES.values()), show_progress=False)
    tokenizer.train_from_iterator([CORPUS] * 2, trainer)
    model = _model_of(tokenizer)
    pieces, merges = list(model["vocab"]), [tuple(merge) for merge in model["merges"]]
    for crossing in CROSSING:
        left, right = ("".join(BYTES[ord(byte)] for byte in part) for part in crossing.split("|"))
        if left + right not in pieces:
            pieces.append(left + right)
            merges.append((left, right))
    return tuple(pieces), tuple(merges)


def byte_level() -> PreTrainedTokenizerBase:
    """GPT-2's class."""
    pieces, merges = _byte_level_pieces()
    return transformers.GPT2Tokenizer(vocab=_numbered([*pieces, "<|endoftext|>"]), merges=list(merges))


def byte_level_added() -> PreTrainedTokenizerBase:
    """GPT-2's class with added tokens; those that consist of byte characters are decoded as bytes."""
    return _with_added(byte_level())


def llama3() -> PreTrainedTokenizerBase:
    """Byte-level with a regex, a template with BOS, and many special tokens."""
    pieces, merges = _byte_level_pieces()
    tokenizer = Tokenizer(models.BPE(_numbered(list(pieces)), list(merges), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    names = ["begin_of_text", "end_of_text", "eot_id", "start_header_id", "end_header_id"]
    names += [f"reserved_special_token_{i}" for i in range(64)]
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names])
    bos = "<|begin_of_text|>"
    template = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return _wrapped(tokenizer, bos_token=bos, eos_token="<|eot_id|>")


def tiktoken() -> PreTrainedTokenizerBase:
    """Transformers' conversion of a tiktoken file: ranks of byte strings, no list of merges."""
    unicode_bytes = {character: byte for byte, character in BYTES.items()}
    pieces, _ = _byte_level_pieces()
    ranks = {bytes(unicode_bytes[character] for character in piece): i for i, piece in enumerate(pieces)}

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:  # as in tiktoken, which is not required
            lines = Path(tiktoken_url).read_bytes().splitlines()
            return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tiktoken.model"
        file.write_bytes(b"\n".join(base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()))
        specials = ["<|endoftext|>", "<|fim_prefix|>", "<|im_start|>", "<|im_end|>"]
        converted = Converter(vocab_file=str(file), extra_special_tokens=specials).converted()
    return _wrapped(converted, eos_token="<|endoftext|>")


def clip() -> PreTrainedTokenizerBase:
    """CLIP's class: byte-level with a suffix at the end of words; decoding strips spaces at both ends."""
    pieces, merges = _byte_level_pieces()
    vocabulary = [*pieces, *(f"{piece}</w>" for piece in pieces), "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(vocab=_numbered(vocabulary), merges=list(merges))


# Vocabularies of text pieces, with ▁ for a space


@cache
def _text_pieces() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return (pieces, merges) of a vocabulary of Latin, Greek, Cyrillic and very few other characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    corpus = "".join(character for character in CORPUS if character < "\u0500")
    tokenizer.train_from_iterator([corpus] * 2, trainers.BpeTrainer(vocab_size=340, show_progress=False))
    model = _model_of(tokenizer)
    merges = [tuple(merge) for merge in model["merges"]]
    pairs = [("▁", "▁"), ("▁▁", "▁▁"), ("\n", "\n"), ("e", "▁"), ("s▁", "t")]
    merges += [pair for pair in pairs if pair not in merges]
    extra = ["▁▁", "▁▁▁▁", "\n", "\n\n", "\t", "e▁", "s▁", "s▁t", "é", "北", "🙂", "\ufffd"]
    extra += [" ", " x", "x ", "▁.", "'", "@@"]
    return tuple(dict.fromkeys([*model["vocab"], *extra])), tuple(merges)


def _vocabulary(*first: str, byte_pieces: bool = True) -> dict[str, int]:
    """Return the vocabulary of text pieces after special pieces and, if wanted, those of single bytes."""
    return _numbered([*first, *(BYTE_PIECES if byte_pieces else ()), *_text_pieces()[0]])


def _byte_fallback(decoder: list, normalizer: list, **options) -> PreTrainedTokenizerBase:
    """Return a BPE tokenizer of text pieces that falls back on bytes."""
    merges = list(_text_pieces()[1])
    vocabulary = _vocabulary("<unk>", "<s>", "</s>")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    tokenizer.decoder = decoders.Sequence(decoder)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options)


def llama2() -> PreTrainedTokenizerBase:
    """Llama 2's tokenizer.json: its decoder strips one space at the beginning of the text."""
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _byte_fallback(decoder, [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def llama2_added() -> PreTrainedTokenizerBase:
    """Llama 2's kind with added tokens."""
    return _with_added(llama2())


def llama_class() -> PreTrainedTokenizerBase:
    """Llama's class as transformers builds it from a vocabulary."""
    vocabulary = _vocabulary("<unk>", "<s>", "</s>")
    return transformers.LlamaTokenizer(vocab=vocabulary, merges=list(_text_pieces()[1]), add_bos_token=True)


def gemma() -> PreTrainedTokenizerBase:
    """Gemma's class: byte fallback, and spaces are kept at the beginning of the text."""
    vocabulary = _vocabulary("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    return transformers.GemmaTokenizer(vocab=vocabulary, merges=list(_text_pieces()[1]), add_bos_token=True)


def bytes_unfused() -> PreTrainedTokenizerBase:
    """Byte fallback before a Metaspace decoder, which drops each ▁ of the first piece."""
    decoder = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    return _byte_fallback(decoder, [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def strip_right() -> PreTrainedTokenizerBase:
    """A decoder that strips a space at the end of pieces; `tokenizers` 0.23 cannot strip an empty text."""
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 0, 1)]
    return _byte_fallback(decoder, [normalizers.Replace(" ", "▁")])


def fused_replace() -> PreTrainedTokenizerBase:
    """A decoder that replaces text across tokens."""
    decoder = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Replace(" ,", ","), decoders.Replace("st", "ſt")]
    return _byte_fallback(decoder, [normalizers.Replace(" ", "▁")])


def _metaspace(scheme: str, **options) -> PreTrainedTokenizerBase:
    """Return a BPE tokenizer with Metaspace as pre-tokenizer and decoder."""
    vocabulary = _vocabulary("<unk>", "<s>", "</s>", byte_pieces=False)
    tokenizer = Tokenizer(models.BPE(vocabulary, list(_text_pieces()[1]), unk_token="<unk>", fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _wrapped(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options)


def bpe_cleaned() -> PreTrainedTokenizerBase:
    """Metaspace with the setting by which transformers removes spaces before punctuation even for BPE."""
    return _metaspace(
        "first",
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )


def metaspace_always() -> PreTrainedTokenizerBase:
    """Metaspace that drops each ▁ of the first piece."""
    return _metaspace("always")


def metaspace_first() -> PreTrainedTokenizerBase:
    """Metaspace that drops each ▁ of the first piece."""
    return _metaspace("first")


def metaspace_never() -> PreTrainedTokenizerBase:
    """Metaspace that turns each ▁ into a space."""
    return _metaspace("never")


def _unigram_pieces(*first: str) -> list[tuple[str, float]]:
    """Return pieces with scores: longer pieces are likelier than their parts."""
    return [(piece, 0.0) for piece in first] + [(piece, -12.0 + len(piece)) for piece in _vocabulary(byte_pieces=False)]


def t5() -> PreTrainedTokenizerBase:
    """T5's class: Unigram with Metaspace."""
    return transformers.T5Tokenizer(vocab=_unigram_pieces("<pad>", "</s>", "<unk>"), extra_ids=8)


def unigram_cleaned() -> PreTrainedTokenizerBase:
    """Unigram with Metaspace; transformers removes spaces before punctuation and contractions."""
    tokenizer = Tokenizer(models.Unigram(_unigram_pieces("<unk>", "<s>", "</s>"), 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    options = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return _wrapped(tokenizer, clean_up_tokenization_spaces=True, **options)


# Vocabularies of words and their parts


def _words() -> list[str]:
    """Return words and single characters, in lower case."""
    normalizer = normalizers.BertNormalizer(lowercase=True)
    words = [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalizer.normalize_str(CORPUS))]
    return sorted(set(words)) + sorted({character for word in words for character in word})


def wordpiece(**options) -> PreTrainedTokenizerBase:
    """BERT's class, lower-casing; the decoder removes spaces before punctuation inside a piece."""
    characters = [word for word in _words() if len(word) == 1]
    parts = ["##ing", "##s", "##'", "##.", "##'s", "n't", "'s", "'m", "##▁", "do not", "## ,"]
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*specials, *_words(), *(f"##{character}" for character in characters), *parts]
    return transformers.BertTokenizer(vocab=_numbered(vocabulary), **options)


def wordpiece_cleaned() -> PreTrainedTokenizerBase:
    """BERT's class with added tokens; transformers removes spaces before punctuation across pieces, too."""
    return _with_added(wordpiece(clean_up_tokenization_spaces=True))


def _suffixed_pieces() -> list[str]:
    """Return words that end in </w>, and parts of words."""
    words = _words()
    parts = [word[:length] for word in words for length in (1, 2, 3) if length <= len(word)]
    return [*parts, *(f"{piece}</w>" for piece in (*words, *parts, "")), "a</w>b", "x</w></w>"]


def openai_gpt() -> PreTrainedTokenizerBase:
    """OpenAI GPT's class: the suffix </w> becomes a space in each piece except the last."""
    return transformers.OpenAIGPTTokenizer(vocab=_numbered(["<unk>", *_suffixed_pieces()]), merges=[])


def no_decoder() -> PreTrainedTokenizerBase:
    """A tokenizer without a decoder, so that spaces join its pieces."""
    tokenizer = Tokenizer(models.WordLevel(_numbered(["<unk>", "<eos>", *_words(), "a ", " b", "é"]), "<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _wrapped(tokenizer, unk_token="<unk>", eos_token="<eos>")


def ctc() -> PreTrainedTokenizerBase:
    """A decoder that shows a repeated piece only once."""
    letters = sorted({character for character in CORPUS.lower() if character.isascii() and character.isprintable()})
    tokenizer = Tokenizer(models.WordLevel(_numbered(["<pad>", "<unk>", "|", *letters, "ab", "é"]), "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.CTC(pad_token="<pad>", word_delimiter_token="|", cleanup=True)
    return _wrapped(tokenizer, unk_token="<unk>", pad_token="<pad>")


# Tokenizers in Python


def byt5() -> PreTrainedTokenizerBase:
    """ByT5's class, in Python: bytes; decoding ignores those that are not UTF-8."""
    return transformers.ByT5Tokenizer(extra_ids=4)


def ctrl() -> PreTrainedTokenizerBase:
    """CTRL's class, in Python: "@@ " joins pieces, and decoding strips white space at both ends."""
    words = _words()
    parts = [f"{word[:length]}@@" for word in words for length in (1, 2, 3) if length <= len(word)]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        pieces = ["<unk>", *words, *parts, "@@", "@", "a\n", "\n"]
        vocabulary.write_text(json.dumps(_numbered(pieces)), encoding="utf-8")
        merges.write_text("#version: 0.2\nt h\nth e</w>\nc a\n", encoding="utf-8")
        return transformers.CTRLTokenizer(str(vocabulary), str(merges))


# Tokenizers of trained models, such as that of scripts/get_real_model.sh: REAL_MODELS lists their folders, separated as
# in PATH.
FOLDERS = [Path(each) for each in os.environ.get("REAL_MODELS", "").split(os.pathsep) if each]
TRAINED = {"demo_model": DEMO_MODEL} | {
    f"real_{folder.name}": folder for folder in FOLDERS if (folder / "tokenizer.json").exists()
}
BUILDERS = [
    *(byte_level, byte_level_added, llama3, tiktoken, clip),
    *(llama2, llama2_added, llama_class, gemma, bytes_unfused, strip_right, fused_replace),
    *(metaspace_always, metaspace_first, metaspace_never, bpe_cleaned, t5, unigram_cleaned),
    *(wordpiece, wordpiece_cleaned, openai_gpt, no_decoder, ctc, byt5, ctrl),
]
KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {builder.__name__: builder for builder in BUILDERS}
KINDS |= {name: partial(AutoTokenizer.from_pretrained, folder) for name, folder in TRAINED.items()}


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a kind; built once."""
    return KINDS[kind]()
