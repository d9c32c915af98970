"""Filter for one of several texts."""

from exl_exllamav2.filters import ExLlamaV2SelectFilter
