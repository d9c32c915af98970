"""Vocabulary behind the tokenizer."""

from exl_exllamav2.tokenizer import InnerTokenizer as ExLlamaV2TokenizerHF
