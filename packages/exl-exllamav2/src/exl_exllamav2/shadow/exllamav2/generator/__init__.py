from exllamav2.generator import filters
from exllamav2.generator.base import ExLlamaV2BaseGenerator
from exllamav2.generator.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exllamav2.generator.dynamic_async import (
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2DynamicJobAsync,
)
from exllamav2.generator.dynamic_embeddings import ExLlamaV2MMEmbedding
from exllamav2.generator.hooks import (
    ExLlamaV2PostSamplingHook,
    ExLlamaV2PostSamplingResult,
)
from exllamav2.generator.sampler import ExLlamaV2Sampler
from exllamav2.generator.streaming import ExLlamaV2StreamingGenerator
from exllamav2.version import __version__
