"""StarCoder2: LayerNorm with a bias, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import Activation, NormKind
from exl_core.arch.names import GGUF, HF
from exl_core.arch.spec import ArchSpec, Window

STARCODER2 = ArchSpec(
    name="starcoder2",
    hf_names=("Starcoder2ForCausalLM",),
    gguf_names=("starcoder2",),
    norm_kind=NormKind.LAYER_BIAS,
    activation=Activation.GELU_TANH,
    has_gated_mlp=False,
    window_pattern=(Window.LOCAL,),
    bias_key="use_bias",
    mlp_bias_key="use_bias",
    has_bias_default=True,
    norm_eps_keys=("norm_epsilon", "layer_norm_epsilon"),
    norm_eps_default=1e-5,
    tie_embeddings_default=True,
    safetensors=replace(HF, names={**HF.names, "up": "mlp.c_fc", "down": "mlp.c_proj"}),
    gguf=GGUF,
)
