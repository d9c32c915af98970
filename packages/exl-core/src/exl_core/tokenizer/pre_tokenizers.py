"""Pre-tokenizers: how a text is split into words before byte-level BPE, by the name in GGUF files.

Maps the names of `tokenizer.ggml.pre` to the steps of the model's own `tokenizer.json`. A GGUF file
stores only the name, so an unknown name is an error. A wrong split would give token sequences that
are rare in training, and silently worse replies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from exl_core.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SYMBOLS}|{_SPACES}"

_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_PATH_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_PATH_SYMBOLS}|{_SPACES}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_PATH_SYMBOLS}|{_SPACES}"
)
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN
_KIMI = (
    rf"[\p{{Han}}]+|{_LEAD}{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?"
    rf"|{_LEAD}{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
)
_SEED_CODER = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_DEEPSEEK3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_SPACES}"
)

_CASED = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
"""Code points of the letters with case that DeepSeek's first tokenizers list."""


def _ranges(code_points: str) -> str:
    """Inside of a character class, of hexadecimal code points and ranges of them."""
    ends = (one.split("-") for one in code_points.split())
    return "".join("-".join(rf"\x{{{end}}}" for end in pair) for pair in ends)


_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_ranges(_CASED)}]+",
    rf"\s?[{_ranges('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
    r"\s+$",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")
_DEEPSEEK_CJK = rf"[{_ranges('4E00-9FA5 800-4E00 AC00-D7FF')}]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Steps of a pre-tokenizer, in order.

    patterns       regular expressions, applied one after the other; each match becomes a word
    single_digits  then every digit becomes a word
    gpt2_words     then GPT-2's own pattern splits
    whole_words    a word that is in the vocabulary is one token, regardless of the merges
    is_nfc         the text is normalized to NFC first
    adds_bos       default if the file does not state whether BOS is added
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    gpt2_words: bool = False
    whole_words: bool = False
    is_nfc: bool = False
    adds_bos: bool = False


_GPT2 = PreTokenizer(gpt2_words=True)
_DIGITS_GPT2 = PreTokenizer(single_digits=True, gpt2_words=True)
_LLAMA3_STYLE = PreTokenizer(patterns=(_LLAMA3,), whole_words=True, adds_bos=True)
_DEEPSEEK3_STYLE = PreTokenizer(
    patterns=(
        r"\p{N}{1,3}",
        r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
        _DEEPSEEK3,
    )
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "exaone4": _GPT2,
    "granite-docling": _GPT2,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "command-r": PreTokenizer(single_digits=True, gpt2_words=True, is_nfc=True),
    "codeshell": _DIGITS_GPT2,
    "llama3": _LLAMA3_STYLE,
    "llama-v3": _LLAMA3_STYLE,
    "llama-bpe": _LLAMA3_STYLE,
    "falcon3": _LLAMA3_STYLE,
    "pixtral": _LLAMA3_STYLE,
    "lfm2": _LLAMA3_STYLE,
    "dbrx": PreTokenizer(patterns=(_LLAMA3,)),
    "smaug-bpe": PreTokenizer(patterns=(_LLAMA3,)),
    "chatglm-bpe": PreTokenizer(patterns=(_LLAMA3,)),
    "glm4": PreTokenizer(patterns=(_LLAMA3,)),
    "qwen2": PreTokenizer(patterns=(_QWEN2,), is_nfc=True),
    "qwen35": PreTokenizer(patterns=(_QWEN35,), is_nfc=True),
    "kimi-k2": PreTokenizer(patterns=(_KIMI,)),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), whole_words=True),
    "gpt-4o": PreTokenizer(patterns=(_GPT4O,)),
    "llama4": PreTokenizer(patterns=(_GPT4O,)),
    "seed-coder": PreTokenizer(patterns=(_SEED_CODER,)),
    "deepseek-llm": PreTokenizer((*_DEEPSEEK_LLM, _DEEPSEEK_CJK), single_digits=True),
    "deepseek-coder": PreTokenizer((*_DEEPSEEK_CODER, _DEEPSEEK_CJK), single_digits=True),
    "deepseek-v3": _DEEPSEEK3_STYLE,
    "hunyuan-dense": _DEEPSEEK3_STYLE,
}


def find_pre_tokenizer(name: str, where: str) -> PreTokenizer:
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise TokenizerError(
            "unknown pre-tokenizer in the GGUF file (tokenizer.ggml.pre)",
            where=where,
            expected=f"one of {', '.join(sorted(PRE_TOKENIZERS))}",
            got=repr(name),
            next_step="Use the model's safetensors files, which carry a tokenizer.json",
        )
    return found


def install(pre: PreTokenizer, backend: Backend) -> None:
    """Sets the normalizer and the pre-tokenizer of a byte-level BPE backend."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns
    ]
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.is_nfc:
        backend.normalizer = normalizers.NFC()
