"""Parts of a model."""

from exl_exllamav2.modules import Intervention
from exl_exllamav2.modules import Module as ExLlamaV2Module
