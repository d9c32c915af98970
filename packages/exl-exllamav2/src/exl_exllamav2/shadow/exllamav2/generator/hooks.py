"""Post-sampling hooks."""

from exl_exllamav2.engines import (
    ExLlamaV2PostSamplingHook,
    ExLlamaV2PostSamplingResult,
)
