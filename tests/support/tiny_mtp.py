"""Tiny checkpoints with a layer for multi-token prediction, and the reference of that layer.

The last layer of a tiny model becomes the layer: transformers reads none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from support import gguf_hybrids, gguf_latent, gguf_models
from support.gguf_models import write_file
from support.tiny_hybrids import tiny_qwen3_next, tiny_qwen35, tiny_qwen35_moe
from support.tiny_latent import tiny_deepseek3, tiny_glm4_moe_lite
from support.tiny_models import save, tiny_glm4_moe

_NEXTN = {
    "join": "eh_proj",
    "embed_norm": "enorm",
    "state_norm": "hnorm",
    "norm": "shared_head.norm",
}
_QWEN = {
    "join": "fc",
    "embed_norm": "pre_fc_norm_embedding",
    "state_norm": "pre_fc_norm_hidden",
    "norm": "norm",
}
_HYBRID = {"num_hidden_layers": 6, "full_attention_interval": 3}

MTP_FAMILIES: dict[str, Callable[..., Any]] = {
    "glm4-moe": lambda **more: tiny_glm4_moe(**{"num_hidden_layers": 3, **more}),
    "glm4-moe-head-norm": lambda **more: tiny_glm4_moe(use_qk_norm=True, **more),
    "deepseek3": tiny_deepseek3,
    "glm4.7-flash": tiny_glm4_moe_lite,
    "qwen3.5": lambda **more: tiny_qwen35(**_HYBRID, **more),
    "qwen3.5-moe": lambda **more: tiny_qwen35_moe(**_HYBRID, **more),
    "qwen3-next": lambda **more: tiny_qwen3_next(**_HYBRID, **more),
}
"""Builders by family. The last layer has attention, and experts if the family has them."""


class MtpCheckpoint:
    """A tiny model whose last layer is for multi-token prediction, with its formula in float64."""

    def __init__(self, family: str, **changes: Any) -> None:
        self.is_qwen = family.startswith("qwen")
        self.model = MTP_FAMILIES[family](**changes).double()
        self.model.set_experts_implementation("eager")  # others have no float64
        self.model.set_attn_implementation("eager")
        self.config = self.model.config
        body = self.model.model
        self.layer, body.layers = body.layers[-1], body.layers[:-1]
        self.num_layers = len(body.layers)
        hidden = self.config.hidden_size
        draw = torch.Generator().manual_seed(30)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        first = 0.0 if self.is_qwen else 1.0  # Qwen stores the factors of norms minus one
        self.own = {
            role: first + 0.2 * random(hidden) for role in ("embed_norm", "state_norm", "norm")
        }
        self.own["join"] = random(hidden, 2 * hidden) * (0.6 / hidden**0.5)
        self.head: Tensor | None = None
        """The layer's own head, if it is not the model's."""
        self._known: dict[tuple[int, ...], Tensor] = {}

    def be_right(self) -> None:
        """Makes every token follow from the one before, and the layer predict the same.

        All layers add nothing, and the layer's input is the embedding of the newest token.
        """
        with torch.no_grad():
            for layer in (*self.model.model.layers, self.layer):
                for name, weight in layer.named_parameters():
                    if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                        weight.zero_()
            eye = torch.eye(self.config.hidden_size, dtype=torch.float64)
            self.own["join"] = torch.cat([eye, torch.zeros_like(eye)], dim=1)
            self.own["norm"] = self.model.model.norm.weight.detach().clone()
            self.own["embed_norm"].fill_(0.0 if self.is_qwen else 1.0)

    def save(self, folder: Path) -> Path:
        """Writes the checkpoint as the family's are."""
        body = self.model.model
        body.layers.append(self.layer)
        save(self.model.float(), folder)
        self.model.double()
        body.layers = body.layers[:-1]
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["num_hidden_layers"] = self.num_layers
        for key in ("layer_types", "mlp_layer_types"):
            if config.get(key):
                config[key] = config[key][: self.num_layers]
        config["mtp_num_hidden_layers" if self.is_qwen else "num_nextn_predict_layers"] = 1
        path.write_text(json.dumps(config))
        file = folder / "model.safetensors"
        stored = load_file(file)
        before = f"model.layers.{self.num_layers}."
        inside = "mtp.layers.0." if self.is_qwen else before
        outside, names = ("mtp.", _QWEN) if self.is_qwen else (before, _NEXTN)
        renamed = {
            inside + name.removeprefix(before) if name.startswith(before) else name: value
            for name, value in stored.items()
        }
        for role, value in self.own.items():
            renamed[f"{outside}{names[role]}.weight"] = value.float()
        if not self.is_qwen:  # files of DeepSeek and GLM have copies of the ends
            renamed[f"{before}embed_tokens.weight"] = body.embed_tokens.weight.float()
            head = self.model.lm_head.weight if self.head is None else self.head
            renamed[f"{before}shared_head.head.weight"] = head.float()
        save_file(
            {name: value.detach().contiguous().clone() for name, value in renamed.items()},
            file,
            metadata={"format": "pt"},
        )
        return folder

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], num_drafted: int = 0) -> Tensor:
        """Logits of the layer at each position but the last, float64. The last `num_drafted` of the
        tokens are drafts, before which the layer reads its own states."""
        known = len(token_ids) - num_drafted
        states = self._model_states(token_ids[: known - 1])
        for count in range(known, len(token_ids) + 1):
            own = self._own_states(states, token_ids[1:count])
            states = torch.cat([states, own[-1:]])
        head = self.model.lm_head.weight if self.head is None else self.head
        return own @ head.T

    def draft(self, token_ids: Sequence[int], count: int, vocab_size: int) -> list[int]:
        """The tokens that the layer proposes, most likely first at each position."""
        ids = list(token_ids)
        for number in range(count):
            ids.append(int(self.logits(ids, number)[-1, :vocab_size].argmax()))
        return ids[len(token_ids) :]

    def _model_states(self, token_ids: Sequence[int]) -> Tensor:
        ids = tuple(token_ids)
        for known, states in self._known.items():
            if known[: len(ids)] == ids:
                return states[: len(ids)]
        output = self.model.model(torch.tensor([ids]), use_cache=False)
        self._known[ids] = output.last_hidden_state[0]
        return self._known[ids]

    def _own_states(self, states: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Normed states of the layer for pairs of states and next tokens."""
        body = self.model.model
        embedded = body.embed_tokens(torch.tensor(list(token_ids)))
        both = [self._normed(embedded, "embed_norm"), self._normed(states, "state_norm")]
        x = torch.cat(both, dim=-1) @ self.own["join"].T
        rows = len(token_ids)
        positions = torch.arange(rows)[None]
        mask = torch.full((rows, rows), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        x = self.layer(
            x[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=body.rotary_emb(x[None], positions),
        )
        return self._normed((x[0] if isinstance(x, tuple) else x)[0], "norm")

    def _normed(self, x: Tensor, role: str) -> Tensor:
        eps = self.config.rms_norm_eps
        weight = self.own[role] + (1.0 if self.is_qwen else 0.0)
        return nn.functional.rms_norm(x, (x.shape[-1],), None, eps) * weight


def write_mtp_gguf(family: str, checkpoint: MtpCheckpoint, path: Path) -> Path:
    """Writes the checkpoint as llama.cpp's converter does: the layer is the last block."""
    module, write, arch = _GGUF[family]
    body, own = checkpoint.model.model, checkpoint.own
    added = 1.0 if checkpoint.is_qwen else 0.0

    def complete(writer: Any) -> None:
        writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
        for role, name in {**_NEXTN, "norm": "shared_head_norm"}.items():
            value = own[role] if role == "join" else own[role] + added
            tensor = f"blk.{checkpoint.num_layers}.nextn.{name}.weight"
            writer.add_tensor(tensor, value.float().numpy())
        write_file(writer)

    body.layers.append(checkpoint.layer)
    with mock.patch.object(module, "write_file", complete):
        write(checkpoint.model.float(), path)
    checkpoint.model.double()
    body.layers = body.layers[:-1]
    return path


_GGUF: dict[str, tuple[Any, Callable[[Any, Path], Path], str]] = {
    "glm4-moe": (gguf_models, gguf_models.write_gguf, "glm4moe"),
    "deepseek3": (gguf_latent, gguf_latent.write_latent, "deepseek2"),
    "qwen3.5": (gguf_hybrids, partial(gguf_hybrids.write_hybrid, arch="qwen35"), "qwen35"),
    "qwen3.5-moe": (
        gguf_hybrids,
        partial(gguf_hybrids.write_hybrid, arch="qwen35moe"),
        "qwen35moe",
    ),
    "qwen3-next": (
        gguf_hybrids,
        partial(gguf_hybrids.write_hybrid, arch="qwen3next"),
        "qwen3next",
    ),
}
GGUF_FAMILIES = tuple(_GGUF)
"""Families whose GGUF files are written here."""
