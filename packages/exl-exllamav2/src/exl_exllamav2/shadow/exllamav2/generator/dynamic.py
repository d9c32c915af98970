"""Dynamic generator."""

from exl_exllamav2.dynamic import ExLlamaV2DynamicGenerator
from exl_exllamav2.job import ExLlamaV2DynamicJob
