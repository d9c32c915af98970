"""Stubs of the modules that text-generation-webui's loaders import, and its sampler settings."""

import logging
import sys
from types import ModuleType, SimpleNamespace


def install_stubs(model_dir):
    """Put `modules.shared`, `.logging_colors` and `.text_generation` into `sys.modules`."""
    args = SimpleNamespace(
        model_dir=str(model_dir),
        ctx_size=1024,
        compress_pos_emb=1,
        alpha_value=1,
        no_flash_attn=False,
        no_xformers=False,
        no_sdpa=False,
        num_experts_per_token=2,
        gpu_split=None,
        enable_tp=False,
        autosplit=True,
        cache_type="fp16",
        model_draft=None,
        cfg_cache=True,
    )
    shared = ModuleType("modules.shared")
    shared.args, shared.stop_everything = args, False
    colors = ModuleType("modules.logging_colors")
    colors.logger = logging.getLogger("webui")
    colors.logger.setLevel(logging.CRITICAL)
    text = ModuleType("modules.text_generation")
    text.get_max_prompt_length = lambda state: 512
    modules = ModuleType("modules")
    modules.__path__ = ["modules"]
    modules.shared = shared
    for module in (modules, shared, colors, text):
        sys.modules[module.__name__] = module
    sys.modules["traceback"].print_exc = lambda: None  # flash-attn is not installed


def state(**changes):
    """Sampler settings of a greedy reply."""
    return {
        "repetition_penalty": 1.0,
        "repetition_penalty_range": 0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "temperature": 1.0,
        "smoothing_factor": 0.0,
        "dynamic_temperature": False,
        "dynatemp_low": 1.0,
        "dynatemp_high": 1.0,
        "dynatemp_exponent": 1.0,
        "top_k": 1,
        "top_p": 1.0,
        "top_a": 0.0,
        "min_p": 0.0,
        "tfs": 1.0,
        "typical_p": 1.0,
        "temperature_last": False,
        "mirostat_mode": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "ban_eos_token": True,
        "custom_token_bans": "5,6",
        "dry_allowed_length": 2,
        "dry_base": 1.75,
        "dry_multiplier": 0.0,
        "dry_sequence_breakers": '"\\n", ":"',
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "add_bos_token": False,
        "auto_max_new_tokens": False,
        "truncation_length": 1024,
        **changes,
    }
