"""Interface of exllamav2, provided by exl."""

import torch as _torch

from exl_core import __version__ as __exl__
from exllamav2 import (
    attn,
    compat,
    embedding,
    generator,
    headnorm,
    layernorm,
    linear,
    mlp,
    model_init,
    moe_mlp,
    parallel_decoder,
    pos_embedding,
    rmsnorm,
)
from exllamav2.cache import (
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2CacheBase,
)
from exllamav2.config import ExLlamaV2Config
from exllamav2.lora import ExLlamaV2Lora
from exllamav2.model import ExLlamaV2
from exllamav2.module import Intervention
from exllamav2.tokenizer import ExLlamaV2Tokenizer
from exllamav2.util import SeqTensor, Timer
from exllamav2.version import __version__
from exllamav2.vlm.mmprojector import ExLlamaV2MultimodalProjector
from exllamav2.vlm.vision_tower import ExLlamaV2VisionTower

_torch.set_num_threads(1)  # exl's kernels have their own threads
