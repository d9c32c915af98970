"""Filter for the beginning of a text."""

from exl_exllamav2.filters import ExLlamaV2PrefixFilter
