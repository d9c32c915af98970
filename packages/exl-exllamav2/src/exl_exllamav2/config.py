"""ExLlamaV2Config: reads a model's configuration, and holds the settings that programs change.

`prepare` opens the model's files (headers only). The settings are read when the weights are loaded:
programs change them until then.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from exl_core.arch.layers import Dense, MoE
from exl_core.arch.spec import RopeMethod
from exl_core.errors import ExlError
from exl_core.session.load import LoadOptions, resolve_device
from exl_core.session.open import ModelFiles, open_model
from exl_core.session.resolve import resolve_model
from exl_exllamav2 import environment
from exl_exllamav2.errors import OldAssertionError, OldModelPathError, old_types


class ExLlamaV2Config:
    """Configuration of one model. Attributes that are not listed here are accepted and ignored."""

    model_dir: str | None
    max_seq_len: int
    max_batch_size: int
    max_input_len: int
    max_attention_size: int
    max_output_len: int | None
    scale_pos_emb: float
    scale_alpha_value: float

    def __init__(self, model_dir: str | Path | None = None) -> None:
        self.max_batch_size = 1
        self.max_input_len = 2048
        self.max_attention_size = 2048**2
        self.max_output_len = None
        self.max_dq_size = 512 * 1024**2
        self.scale_pos_emb = 1.0
        self.scale_alpha_value = 1.0
        self.alt_rope_method: str | None = None
        self.yarn_rope_factor: float | None = None
        self.yarn_rope_original_max_position_embeddings: int | None = None
        self.num_experts: int | None = None
        self.num_experts_per_token: int | None = None
        self._native_top_k: int | None = None
        self.load_in_q4 = False
        self.fasttensors = False
        self.no_flash_attn = environment.is_set("EXLLAMA_NO_FLASH_ATTN")
        self.no_xformers = environment.is_set("EXLLAMA_NO_XFORMERS")
        self.no_sdpa = environment.is_set("EXLLAMA_NO_SDPA")
        self.no_graphs = environment.is_set("EXLLAMA_NO_GRAPHS")
        self.generation_config: dict[str, Any] = {}
        self.vision_model_type: str | None = None
        self.files: ModelFiles | None = None
        self.max_seq_len = 2048
        self.model_dir = None if model_dir is None else str(model_dir)
        if model_dir is not None:
            self.prepare()

    def prepare(self, no_tensors: bool = False) -> None:
        """Open the model's files. May be called again; later calls reset `max_seq_len`."""
        if self.model_dir is None:
            raise OldAssertionError("no model_dir is set", next_step="Set config.model_dir first.")
        with old_types():
            self.files = open_model(_resolved(self.model_dir))
        self._read_numbers(self.files)
        self._read_json(self.files.path)
        if environment.device() != "cuda" and not self.is_on_gpu():
            self.no_flash_attn = True

    def set_low_mem(self) -> None:
        """Compute prompts in chunks of 1,024 tokens."""
        self.max_input_len = 1024
        self.max_attention_size = 1024**2
        if self.max_output_len is not None:
            self.max_output_len = min(self.max_output_len, 1024)

    def arch_compat_overrides(self, quiet: bool = False, warn_only: bool = False) -> None:
        """Does nothing: one attention path serves every architecture."""

    def opened(self) -> ModelFiles:
        """The model's files; `prepare` is called if the program has not done so."""
        if self.files is None:
            self.prepare()
        assert self.files is not None, "prepare opens the files"
        return self.files

    def load_options(self) -> LoadOptions:
        """Options of exl for the settings as they are now."""
        factor = self.scale_pos_emb if self.scale_pos_emb != self._native_scale else None
        alpha = self.scale_alpha_value if self.scale_alpha_value != 1.0 else None
        yarn = self.yarn_rope_factor if self.alt_rope_method == "yarn" else None
        if yarn == self._native_yarn:
            yarn = None
        top_k = self.num_experts_per_token
        if self.num_experts is None or top_k == self._native_top_k:
            top_k = None  # programs set a number for models without experts too
        return LoadOptions(
            device=environment.device(),
            max_seq_len=self.max_seq_len,
            rope_factor=None if factor is None else float(factor),
            rope_alpha=None if alpha is None else float(alpha),
            yarn_factor=None if yarn is None else float(yarn),
            load_in_4bit=bool(self.load_in_q4),
            experts_per_token=top_k,
        )

    @property
    def padded_vocab_size(self) -> int:
        """Length of a row of logits."""
        return -(-self.vocab_size // 32) * 32

    def is_on_gpu(self) -> bool:
        """Whether a GPU will run the model."""
        try:
            return resolve_device(environment.device()).startswith("cuda")
        except ExlError:
            return False  # reported when the weights are loaded

    def _read_numbers(self, files: ModelFiles) -> None:
        config = files.config
        attention = config.layers[0].attention
        rope = config.ropes[0]
        is_linear = rope.method is RopeMethod.LINEAR
        is_yarn = rope.method is RopeMethod.YARN
        self._native_scale = self.scale_pos_emb = rope.factor if is_linear else 1.0
        self._native_yarn = self.yarn_rope_factor = rope.factor if is_yarn else None
        self.alt_rope_method = (
            rope.method.value if rope.method.value in ("yarn", "llama3") else None
        )
        self.yarn_rope_original_max_position_embeddings = (
            rope.original_max_seq_len if is_yarn else None
        )
        self.max_seq_len = self.original_max_seq_len = config.max_seq_len
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.num_layers
        self.num_attention_heads = attention.num_q_heads
        self.num_key_value_heads = attention.num_kv_heads
        self.num_key_value_groups = attention.num_q_heads // attention.num_kv_heads
        self.head_dim = attention.head_dim
        self.norm_eps = config.norm_eps
        self.rotary_embedding_base = rope.base
        self.sliding_window = max(layer.attention.window for layer in config.layers)
        self.final_logit_softcapping = config.final_softcap
        self.attn_logit_softcapping = attention.softcap
        parts = [layer.feed_forward for layer in config.layers]
        experts = next((part for part in parts if isinstance(part, MoE)), None)
        dense = next((part for part in parts if isinstance(part, Dense)), None)
        width = 0 if experts is None else experts.intermediate_size
        self.intermediate_size = width if dense is None else dense.inner_size
        self.num_experts = None if experts is None else experts.router.num_experts
        self._native_top_k = None if experts is None else experts.router.top_k
        self.num_experts_per_token = self._native_top_k
        self.bos_token_id = config.bos_id
        self.eos_token_id = config.eos_ids[0] if config.eos_ids else None
        self.eos_token_ids = list(config.eos_ids)
        self.pad_token_id = config.pad_id
        names = config.arch.hf_names
        self.architecture = names[0] if names else config.arch.name
        text = SimpleNamespace(
            requires_bos="Gemma" in self.architecture, supports_tp=True, mrope=False
        )
        self.arch = SimpleNamespace(lm=text, mmp=None, vt=None)
        self.tensor_file_map = {
            name: str(tensor.file) for name, tensor in files.source.tensors.items()
        }
        self.tensor_files = sorted(set(self.tensor_file_map.values()))

    def _read_json(self, path: Path) -> None:
        """Raw JSON of a directory, which programs read for keys of their own."""
        self.model_config = _json_object(path / "config.json") if path.is_dir() else {}
        self.generation_config = (
            _json_object(path / "generation_config.json") if path.is_dir() else {}
        )
        ends = self.generation_config.get("eos_token_id")
        if isinstance(ends, int):
            self.generation_config["eos_token_id"] = [ends]


def _resolved(model_dir: str) -> Path:
    """The path that the program means, after `--model OLD=NEW`."""
    known = environment.model_paths()
    name = known.get(model_dir) or known.get(model_dir.rstrip("/")) or known.get("*") or model_dir
    try:
        return resolve_model(name)
    except ExlError as error:
        raise OldModelPathError(
            error.what,
            where=error.where,
            expected=error.expected,
            got=error.got,
            next_step="'exl exec --model OLD=NEW' replaces a path of the program.",
        ) from error


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with old_types():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}
