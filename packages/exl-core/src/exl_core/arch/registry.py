"""Table of supported architectures, and the error for one that is not supported."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from exl_core.arch.families.apertus import APERTUS
from exl_core.arch.families.cohere import COHERE, COHERE2
from exl_core.arch.families.dbrx import DBRX
from exl_core.arch.families.deepseek import DEEPSEEK2, DEEPSEEK3, GLM4_MOE_LITE, MISTRAL4
from exl_core.arch.families.ernie import ERNIE4_5, ERNIE4_5_MOE
from exl_core.arch.families.exaone4 import EXAONE4
from exl_core.arch.families.gemma import GEMMA, GEMMOE
from exl_core.arch.families.gemma2 import GEMMA2
from exl_core.arch.families.gemma3 import GEMMA3
from exl_core.arch.families.gemma4 import GEMMA4
from exl_core.arch.families.glm4 import GLM4
from exl_core.arch.families.glm4_moe import GLM4_MOE
from exl_core.arch.families.gpt2 import GPT2, GPT_BIGCODE
from exl_core.arch.families.gpt_oss import GPT_OSS
from exl_core.arch.families.granite import GRANITE, GRANITE4, GRANITE_MOE, MINICPM
from exl_core.arch.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from exl_core.arch.families.internlm2 import INTERNLM2
from exl_core.arch.families.kimi_linear import KIMI_LINEAR
from exl_core.arch.families.lfm2 import LFM2, LFM2_MOE
from exl_core.arch.families.llama import ARCEE, INDEX, LLAMA, ORION, YI
from exl_core.arch.families.llama4 import LLAMA4
from exl_core.arch.families.minimax import MINIMAX_M2
from exl_core.arch.families.mistral import MINISTRAL3, MISTRAL, MIXTRAL
from exl_core.arch.families.nemotron_h import NEMOTRON_H
from exl_core.arch.families.olmo import OLMO2
from exl_core.arch.families.phi3 import PHI3
from exl_core.arch.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_VL_MOE
from exl_core.arch.families.qwen_hybrid import QWEN3_NEXT, QWEN35, QWEN35_MOE
from exl_core.arch.families.seed_oss import SEED_OSS
from exl_core.arch.families.smollm3 import SMOLLM3
from exl_core.arch.families.starcoder2 import STARCODER2
from exl_core.arch.layers import Scores
from exl_core.arch.spec import ArchSpec
from exl_core.errors import UnsupportedModelError

ARCHITECTURES = (
    *(LLAMA, YI, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA, GEMMA2, GEMMA3, SEED_OSS),
    *(ERNIE4_5, INTERNLM2, MINISTRAL3, SMOLLM3, OLMO2, EXAONE4, GRANITE, MINICPM),
    *(GRANITE4, HUNYUAN, APERTUS, GEMMA4, COHERE, COHERE2, STARCODER2, ARCEE, ORION, INDEX),
    *(GLM4, QWEN2_MOE, QWEN3_MOE, MIXTRAL, GLM4_MOE, ERNIE4_5_MOE, HUNYUAN_MOE, MINIMAX_M2),
    *(GEMMOE, GRANITE_MOE, QWEN3_VL_MOE, DBRX, LLAMA4, GPT_OSS, GPT2, GPT_BIGCODE, LFM2),
    *(LFM2_MOE, QWEN35, QWEN35_MOE, QWEN3_NEXT),
    *(DEEPSEEK2, DEEPSEEK3, GLM4_MOE_LITE, MISTRAL4, NEMOTRON_H, KIMI_LINEAR),
)


REFUSED = {
    ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "gemma3n"): (
        "its layers have embeddings of their own, share keys and values, and mix four streams of "
        "states",
        "Gemma 3 and Gemma 4 12B, 26B-A4B and 31B are.",
    ),
    ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "deepseek32", "glm-dsa"): (
        "each query attends to keys that an indexer chooses",
        "DeepSeek V2, V3 and R1 and GLM-4.7-Flash are.",
    ),
}
"""Names of known architectures that are not supported, why, and what is instead."""


def find_by_hf_name(name: str, *, where: object, text_type: str | None = None) -> ArchSpec:
    """The family whose `architectures` entry in `config.json` is `name`.

    `text_type`: `model_type` of the language model of a multimodal model. It decides where several
    families have the same name. Without it, the first of them is meant.
    """
    specs = [spec for spec in ARCHITECTURES if name in spec.hf_names]
    fitting = [spec for spec in specs if not spec.text_types or text_type in spec.text_types]
    if text_type is not None and specs and not fitting:
        raise UnsupportedModelError(
            f"architecture {name!r} with a language model {text_type!r} is not supported",
            where=where,
            expected=f"one of {', '.join(text for spec in specs for text in spec.text_types)}",
        )
    candidates = (fitting or specs) if text_type is not None else specs
    return _find(name, ((spec, spec.hf_names) for spec in candidates or ARCHITECTURES), where)


def find_by_gguf_name(
    name: str, *, where: object, has_experts: bool = False, scores: Scores | None = None
) -> ArchSpec:
    """The family whose `general.architecture` in a GGUF file is `name`. Where several families have
    the same name, `has_experts` and the experts' `scores` decide, if the file says them."""

    def misfit(spec: ArchSpec) -> tuple[bool, bool]:
        own = None if spec.experts is None else spec.experts.scores
        return (own is not None) is not has_experts, scores is not None and own is not scores

    specs = sorted(ARCHITECTURES, key=misfit)
    return _find(name, ((spec, spec.gguf_names) for spec in specs), where)


def _find(
    name: str, candidates: Iterable[tuple[ArchSpec, tuple[str, ...]]], where: object
) -> ArchSpec:
    known: list[str] = []
    for spec, names in candidates:
        if name in names:
            return spec
        known.extend(names)
    for refused, (reason, instead) in REFUSED.items():
        if name in refused:
            raise UnsupportedModelError(
                f"architecture {name!r} is not supported: {reason}",
                where=where,
                next_step=instead,
            )
    known = list(dict.fromkeys(known))
    near = get_close_matches(name, known, n=1)
    guess = f"The nearest name is {near[0]!r}. " if near else ""
    raise UnsupportedModelError(
        f"architecture {name!r} is not supported",
        where=where,
        next_step=f"{guess}Supported: {', '.join(known)}.",
    )
