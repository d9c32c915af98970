"""Base generator."""

from exl_exllamav2.base_generator import ExLlamaV2BaseGenerator
from exl_exllamav2.filters import ExLlamaV2Filter
