"""Base class of filters."""

from exl_exllamav2.filters import ExLlamaV2Filter
