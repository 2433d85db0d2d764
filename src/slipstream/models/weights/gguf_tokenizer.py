"""Builds the tokenizer of a GGUF file: the split of text before merging, tokens matched whole, and tokens that end an
answer.

A file with byte-level BPE names its splitting rule in `tokenizer.ggml.pre`; the rules are those of the original
tokenizers, under llama.cpp's names (src/llama-vocab.cpp). SentencePiece has no such rule. The specification is the
tokenizer that transformers builds from the same files.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from slipstream.errors import SlipstreamError, one_line
from slipstream.models.weights.gguf_file import GGUFHeader
from slipstream.tokenization.file_tokenizer import FileTokenizer
from slipstream.tokenization.hf_byte_tokens import SPACE, byte_alphabet

# ruff: noqa: RUF001 (characters of other scripts that look like Latin ones)


log = logging.getLogger("slipstream")

KINDS = ("gpt2", "llama", "gemma4")  # byte-level BPE, and two of SentencePiece
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens
MAX_SHOWN = 60  # characters of a name, in messages
MARK = "an answer of 7919"  # content of a message in a rendered conversation

# building blocks of the patterns
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SIGNS_OR_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
ONE, THREE, ANY = r"\p{N}", r"\p{N}{1,3}", r"\p{N}+"  # digits


def _choice(*patterns: str) -> str:
    return "|".join(patterns)


def _cased(ending: str, without: str = "") -> str:
    """A pattern for words that end where a capital letter follows lowercase ones. without: excluded letters."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"


QWEN2 = _choice(ENGLISH, WORDS, ONE, SIGNS, SPACES)
LLAMA3 = _choice(ENGLISH, WORDS, THREE, SIGNS, SPACES)
GPT4O = _choice(_cased(f"{ENGLISH}?"), THREE, SIGNS_OR_SLASHES, SPACES)
CHINESE = "[一-龥぀-ゟ゠-ヿ]+"
DEEPSEEK_WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
DEEPSEEK_SIGNS = r" ?[\p{P}\p{S}]+[\r\n]*"
CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class Split:
    """A rule for splitting text before merging."""

    patterns: tuple[str, ...]  # each in turn cuts all pieces into its matches and the text between them
    composes: bool = False  # converts text to Unicode's normal form C first
    whole_words: bool = False  # takes a piece that is a token as it is, without merging
    adds_bos: bool = False  # texts begin with the BOS token, unless the file says otherwise


def _named(names: str, split: Split) -> dict[str, Split]:
    return dict.fromkeys(names.split(), split)


SPLITS: dict[str, Split] = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, ANY, "[0-9][0-9][0-9]")),
    **_named(
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        Split((GPT2,)),
    ),
    **_named("smollm starcoder refact codeshell exaone minerva-7b mellum2", Split((ONE, GPT2))),
    "command-r": Split((ONE, GPT2), composes=True),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Split((LLAMA3,), whole_words=True, adds_bos=True),
    ),
    **_named("dbrx smaug-bpe glm4 chatglm-bpe", Split((LLAMA3,))),
    "minicpm5": Split((THREE, _choice(ENGLISH, WORDS, ANY, SIGNS, SPACES)), whole_words=True),
    **_named("qwen2 deepseek-r1-qwen f2llmv2 megrez", Split((QWEN2,), composes=True)),
    **_named("kormo stablelm2 hunyuan solar-open grok-2", Split((QWEN2,))),
    "qwen35": Split(
        (
            _choice(
                *(ENGLISH, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", ONE, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", SPACES),
            ),
        ),
        composes=True,
    ),
    "ufakzeka": Split((_choice(WORDS, ONE, SIGNS, SPACES),)),
    "laguna": Split((r"[^\n]+|[\n]+", QWEN2)),
    "seed-coder": Split((_choice(ENGLISH, WORDS, ONE, r" ?[^\s\p{L}\p{N}\r\n]+", SPACES),)),
    "exaone-moe": Split(
        (
            _choice(
                *(ENGLISH, r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", ONE),
                *(r" ?[^\s\p{L}\p{N}]+[\r\n/]?", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
            ),
        )
    ),
    **_named(
        "bailingmoe bailingmoe2 llada-moe",
        Split(
            (
                _choice(
                    *("'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?+\p{L}+", ONE, r" ?[^\s\p{L}\p{N}]++[\r\n]*"),
                    *(r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
                ),
            )
        ),
    ),
    "jais-2": Split(
        (
            _choice(
                *(ENGLISH, WORDS, THREE, SIGNS, r"\s*[\r\n]+"),
                *(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)),
                *(r"\s{1,2}(?!\S)", r"\s{1}"),
            ),
        )
    ),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", Split((GPT4O,))),
    "granite-embed-multi-97m": Split((GPT4O,), whole_words=True),
    "tekken": Split((_choice(_cased(""), ONE, SIGNS_OR_SLASHES, SPACES),), whole_words=True, adds_bos=True),
    **_named("tiny_aya cohere2moe", Split((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O))),
    "kimi-k2": Split((_choice(r"\p{Han}+", _cased(f"{ENGLISH}?", r"&&[^\p{Han}]"), THREE, SIGNS, SPACES),)),
    "youtu": Split(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            _choice(_cased(f"{ENGLISH}?"), ONE, SIGNS_OR_SLASHES, SPACES),
        ),
        whole_words=True,
    ),
    **_named(
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        Split((THREE, CHINESE, _choice(DEEPSEEK_WORDS, DEEPSEEK_SIGNS, SPACES))),
    ),
    "afmoe": Split(
        (
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            _choice(DEEPSEEK_WORDS, DEEPSEEK_SIGNS, SPACES),
        )
    ),
    "spark2_5": Split(
        (
            *(THREE, CHINESE),
            _choice(DEEPSEEK_WORDS, r" ?[\p{P}\p{S}]+", r"[\r\n]", r"\s+(?!\S)", r"\s+"),
            ONE,
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", ONE)),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?[{CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            ANY,
        )
    ),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    **_named("poro-chat bloom gpt3-finnish", Split((BLOOM,))),
    "viking": Split((BLOOM, ONE)),
    "chameleon": Split(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            ONE,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        adds_bos=True,
    ),
    "superbpe": Split((ANY, r"(?=(\d{3})+(?!\d))")),
}

# tokens that end an answer or a turn, where a vocabulary has them; as in llama.cpp, those with a bar are always special
ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
    *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)


def read_tokenizer(header: GGUFHeader) -> FileTokenizer | None:
    """The tokenizer of a model; None if the file has no vocabulary."""
    kind = header.values.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in KINDS:
        raise header.wrong(f"tokenizer.ggml.model is {str(kind)[:MAX_SHOWN]!r}", ", ".join(KINDS))
    tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(header.array("tokenizer.ggml.tokens"))]
    types = header.array("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    marks = {text for text in ENDS if "|" in text}
    unsplit = {
        text: CONTROL if text in marks else kind
        for text, kind in zip(tokens, types, strict=False)
        if kind in (CONTROL, USER_DEFINED) or text in marks
    }
    split = _split(header) if kind == "gpt2" else None
    if header.architecture.startswith("gemma"):  # its files spell runs of spaces literally
        tokens = [SPACE * len(text) if " " in text and not text.strip() else text for text in tokens]
    try:
        backend = _sentencepiece(header, tokens) if split is None else _byte_level(header, tokens, unsplit, split)
        for special, kind_of_token in ((True, CONTROL), (False, USER_DEFINED)):
            texts = (text for text in unsplit if unsplit[text] == kind_of_token)
            texts = (text for text in texts if backend.token_to_id(text) is not None)
            added = [_whole(header, text, special=special) for text in texts]
            (backend.add_special_tokens if special else backend.add_tokens)(added)
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers package raises plain Exception
            raise
        raise ValueError(f"its tokenizer: {one_line(error)}") from error
    named = {
        f"{name}_token": tokens[number]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (number := _token_id(header, key, len(tokens))) is not None
    }
    # the second of each pair is the older name of the key
    infill = [
        next((number for key in keys if (number := _token_id(header, key, len(tokens))) is not None), None)
        for keys in (("fim_pre", "prefix"), ("fim_suf", "suffix"), ("fim_mid", "middle"))
    ]
    infill_names = [tokens[number] for number in infill if number is not None]
    tokenizer = FileTokenizer(
        backend,
        named,
        header.text("tokenizer.chat_template"),
        infill_names if len(infill_names) == len(infill) else (),
    )
    by_default = kind == "llama" if split is None else split.adds_bos  # as llama.cpp does
    tokenizer.enclose(
        begins=bool(header.values.get("tokenizer.ggml.add_bos_token", by_default)),
        ends=bool(header.values.get("tokenizer.ggml.add_eos_token", False)),
    )
    return tokenizer


def token_settings(header: GGUFHeader, tokenizer: FileTokenizer | None) -> dict[str, Any]:
    """The BOS, padding and end tokens, as fields of a configuration."""
    size = 0 if tokenizer is None else len(tokenizer)
    return {
        "bos_token_id": _token_id(header, "bos", size),
        "pad_token_id": _token_id(header, "padding", size),
        "eos_token_id": None if tokenizer is None else _end_ids(header, tokenizer),
    }


def check_split(header: GGUFHeader) -> None:
    """Raise `SlipstreamError` for an unknown splitting rule, and warn of a file that names none."""
    name = header.values.get("tokenizer.ggml.pre") or None
    if header.values.get("tokenizer.ggml.model") != "gpt2" or name in SPLITS:
        return
    if name is not None:
        near = get_close_matches(str(name)[:MAX_SHOWN], SPLITS, 1)
        raise SlipstreamError(
            f"model {str(header.file)!r}: tokenizer.ggml.pre is {str(name)[:MAX_SHOWN]!r}, an unknown splitting "
            f"rule; {f'did you mean {near[0]!r}? ' if near else ''}allowed: {', '.join(sorted(SPLITS))}"
        )
    log.warning(
        "model %s does not say how text is split (no tokenizer.ggml.pre): llama.cpp's default is used, which "
        "probably differs from the model's training",
        header.file,
    )


def _split(header: GGUFHeader) -> Split:
    """The rule that the file names, or llama.cpp's default."""
    name = header.values.get("tokenizer.ggml.pre") or "default"
    if name not in SPLITS:
        check_split(header)
    return SPLITS[name]


def _byte_level(header: GGUFHeader, tokens: Sequence[str], unsplit: Container[str], split: Split) -> Tokenizer:
    """Byte-level BPE. unsplit: tokens that are matched whole."""
    merges = [_halves(merge) for merge in header.array("tokenizer.ggml.merges")]
    vocabulary = {_spelled(text, text in unsplit): number for number, text in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole_words))
    by_words = split.patterns[-1] == GPT2  # built into `ByteLevel`, which matches it faster
    patterns = split.patterns[:-1] if by_words else split.patterns
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    if split.composes:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(header: GGUFHeader, tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece's BPE, with bytes for characters that no token spells, as published with Llama 2 and Gemma."""
    gemma = header.architecture.startswith("gemma")
    vocabulary = {text: number for number, text in enumerate(tokens)}
    merges = [_halves(merge) for merge in header.array("tokenizer.ggml.merges")]
    if not merges:
        # Gemma's merges are ordered by token number, not by score
        scores = [-number for number in range(len(tokens))] if gemma else header.array("tokenizer.ggml.scores")
        merges = _merges(tokens, scores, vocabulary)
    unknown = {"unk_token": "<unk>"} if gemma else {}
    backend = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True, **unknown))
    prefix = not gemma and header.values.get("tokenizer.ggml.add_space_prefix") is not False
    if gemma:
        backend.normalizer = normalizers.Replace(" ", SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:  # each piece between whole tokens gets a space in front, even if it begins with one
        first = [normalizers.Prepend(SPACE)] if prefix else []
        backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1)] if prefix else parts)
    usual = ("<unk>", "<bos>", "<eos>", "<pad>", "<mask>") if gemma else ("<unk>", "<s>", "</s>")
    backend.add_special_tokens([_whole(header, text) for text in usual if text in vocabulary])
    return backend


def _whole(header: GGUFHeader, text: str, *, special: bool = True) -> AddedToken:
    """A token that is matched whole. After Phi-3's special tokens, white space is dropped."""
    is_phi3 = header.architecture == "phi3" and header.values.get("tokenizer.ggml.model") == "llama"
    ignores_space = is_phi3 and (special or text == "</s>") and text not in ("<unk>", "<s>", "<|endoftext|>")
    return AddedToken(text, normalized=False, special=special, rstrip=ignores_space)


def _merges(tokens: Sequence[str], scores: Sequence[float], vocabulary: Container[str]) -> list[tuple[str, str]]:
    """All pairs of tokens that form another token, ordered by that token's score."""
    if len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores has {len(scores)} numbers for {len(tokens)} tokens")
    merges = list[tuple[str, str]]()
    by_score = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)
    for _, numbers in groupby(by_score, key=scores.__getitem__):
        texts = (tokens[number] for number in numbers)
        pairs = ((text[:place], text[place:]) for text in texts for place in range(1, len(text)))
        halves = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(halves, key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
    return merges


def _halves(merge: str) -> tuple[str, str]:
    space = merge.find(" ", 1)
    return merge[:space], merge[space + 1 :]


def _spelled(text: str, is_unsplit: bool) -> str:
    """A token spelled in the characters that represent bytes, as in most files; tokens matched whole do not change."""
    if is_unsplit or byte_alphabet().keys() >= set(text):
        return text
    return "".join(_byte_letters()[byte] for byte in text.encode())


@cache
def _byte_letters() -> dict[int, str]:
    return {byte: letter for letter, byte in byte_alphabet().items()}


def _token_id(header: GGUFHeader, name: str, vocab_size: int) -> int | None:
    """The id of a token that the metadata name; None if they do not, or if the vocabulary lacks it."""
    number = header.values.get(f"tokenizer.ggml.{name}_token_id")
    return number if isinstance(number, int) and 0 <= number < vocab_size else None


def _end_ids(header: GGUFHeader, tokenizer: FileTokenizer) -> Any:
    """The tokens at which generation ends, as in llama.cpp: the file's, and those that end a turn.

    Returns one id, a list of several, or None.
    """
    # special tokens only: Gemma's vocabulary has HTML's </s> as an ordinary token, which a user's text may contain
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = [_token_id(header, name, len(tokenizer)) for name in ("eos", "eot", "eom")]
    ids += [special[text] for text in (*ENDS, *_turn_end(tokenizer, special)) if text in special]
    names = special.keys()
    calls = not names.isdisjoint(("<|call|>", "<|calls|>"))
    if calls and not names.isdisjoint(("<|return|>", "<|flush|>")):
        ids = [number for number in ids if number != special.get("<|end|>")]  # it ends a message, not an answer
    if "<|tool_response>" in names:
        ids = [number for number in ids if number != special.get("</s>")]  # Gemma 4's vocabulary has it unused
    ids = list(dict.fromkeys(number for number in ids if number in range(len(tokenizer))))
    return ids if len(ids) > 1 else next(iter(ids), None)


def _turn_end(tokenizer: FileTokenizer, special: Iterable[str]) -> list[str]:
    """The token that the chat template puts after an answer, if it puts one there."""
    if not tokenizer.chat_template:
        return []
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": MARK}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # if a template rejects these messages, its end token stays unknown
        return []
    after = text.rpartition(MARK)[2].lstrip() if MARK in text else ""
    return sorted((token for token in special if after.startswith(token)), key=len)[-1:]
