"""Dynamic generator for asyncio."""

from exl_exllamav2.dynamic_async import (
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2DynamicJobAsync,
)
