"""The layer for multi-token prediction (MTP) that checkpoints of some families have.

It predicts the token after the next one. Its input is the embedding of the next token and the
states after the final norm, each with a norm of its own, joined by a matrix:

    x = join(embed_norm(embed(token[i + 1])) | state_norm(states[i]))
    logits[i + 2] = head(norm(layer(x)))

The layer is one of the model's kinds with its own weights. Embedding and head are the model's where
the file has copies of them, or none. Plain data without torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

from exl_core.arch.modules import Container, ModuleRow, module_table
from exl_core.arch.names import GGUF_NEXTN, predicting
from exl_core.arch.spec import ModelConfig

OPTIONAL = frozenset({"mtp_embed", "mtp_head", "mtp_norm"})
"""Roles that a file may lack. The model's own tensors then take their place."""


@lru_cache(maxsize=8)
def mtp_config(config: ModelConfig) -> ModelConfig | None:
    """Numbers of the MTP layer as a model of one layer; None if the family has no such layer."""
    arch = config.arch
    attending = [layer for layer in config.layers if layer.attending is not None]
    if arch.mtp is None or not attending:
        return None
    own = replace(
        arch,
        safetensors=predicting(arch.safetensors, arch.mtp, config.num_layers),
        gguf=predicting(arch.gguf, GGUF_NEXTN, config.num_layers),
        mtp=None,
    )
    return replace(config, arch=own, layers=(replace(attending[-1], is_predicting=True),))


def mtp_rows(
    config: ModelConfig, container: Container, tensor_names: Collection[str]
) -> list[ModuleRow]:
    """Tensors of the MTP layer of `mtp_config`, without the optional ones that the file lacks.
    Empty if the file has no such layer."""
    rows = module_table(config).layers[0]

    def is_stored(row: ModuleRow) -> bool:
        stems = [place.name.removesuffix(".weight") for place in row.places(container)]
        prefixes = tuple(f"{stem}." for stem in stems)
        return any(name.startswith(prefixes) for name in tensor_names)

    if not is_stored(rows["mtp_join"]):
        return []
    wanted = module_table(config).rows_of(0)
    return [row for row in wanted if row.role not in OPTIONAL or is_stored(row)]
