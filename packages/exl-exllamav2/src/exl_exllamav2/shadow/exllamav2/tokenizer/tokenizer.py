"""The tokenizer."""

from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer
