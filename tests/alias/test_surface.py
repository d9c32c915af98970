"""Names of the old interface: each imports, and has the parameters that programs pass.

`NAMES` are the names of ranks 1 to 4 by module, `SIGNATURES` the parameters of their callables in
order, with defaults. Where the original's source is at hand (`originals.py`), a second test
compares the table with it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from alias.originals import checkout_of
from exl_core.errors import ExlError
from exl_exllamav2 import errors

NAMES = {
    "exllamav2": "__version__ __exl__ ExLlamaV2 ExLlamaV2CacheBase ExLlamaV2Cache "
    "ExLlamaV2Cache_Q4 ExLlamaV2Cache_Q6 ExLlamaV2Cache_Q8 ExLlamaV2Cache_8bit ExLlamaV2Cache_TP "
    "ExLlamaV2Config ExLlamaV2Tokenizer ExLlamaV2Lora SeqTensor Timer Intervention "
    "ExLlamaV2MultimodalProjector ExLlamaV2VisionTower model_init",
    "exllamav2.generator": "ExLlamaV2Sampler ExLlamaV2BaseGenerator ExLlamaV2StreamingGenerator "
    "ExLlamaV2DynamicGenerator ExLlamaV2DynamicJob ExLlamaV2DynamicGeneratorAsync "
    "ExLlamaV2DynamicJobAsync ExLlamaV2MMEmbedding ExLlamaV2PostSamplingHook "
    "ExLlamaV2PostSamplingResult __version__",
    "exllamav2.generator.filters": "ExLlamaV2Filter ExLlamaV2SelectFilter ExLlamaV2PrefixFilter",
    "exllamav2.generator.filters.base": "ExLlamaV2Filter",
    "exllamav2.generator.filters.select": "ExLlamaV2SelectFilter",
    "exllamav2.generator.filters.prefix": "ExLlamaV2PrefixFilter",
    "exllamav2.generator.base": "ExLlamaV2BaseGenerator ExLlamaV2Filter",
    "exllamav2.generator.streaming": "ExLlamaV2StreamingGenerator",
    "exllamav2.generator.dynamic": "ExLlamaV2DynamicGenerator ExLlamaV2DynamicJob",
    "exllamav2.generator.dynamic_async": "ExLlamaV2DynamicGeneratorAsync ExLlamaV2DynamicJobAsync",
    "exllamav2.generator.dynamic_embeddings": "ExLlamaV2MMEmbedding",
    "exllamav2.generator.sampler": "ExLlamaV2Sampler",
    "exllamav2.generator.hooks": "ExLlamaV2PostSamplingHook ExLlamaV2PostSamplingResult",
    "exllamav2.generator.ngram": "NgramCache",
    "exllamav2.config": "ExLlamaV2Config",
    "exllamav2.model": "ExLlamaV2 ExLlamaV2Config",
    "exllamav2.cache": "ExLlamaV2CacheBase ExLlamaV2Cache ExLlamaV2Cache_8bit ExLlamaV2Cache_Q "
    "ExLlamaV2Cache_Q4 ExLlamaV2Cache_Q6 ExLlamaV2Cache_Q8 ExLlamaV2Cache_TP",
    "exllamav2.lora": "ExLlamaV2Lora",
    "exllamav2.util": "SeqTensor Timer get_basic_progress list_live_tensors print_vram_usage",
    "exllamav2.module": "ExLlamaV2Module Intervention",
    "exllamav2.model_init": "add_args check_args print_options init post_init_load",
    "exllamav2.tokenizer": "ExLlamaV2Tokenizer",
    "exllamav2.tokenizer.tokenizer": "ExLlamaV2Tokenizer",
    "exllamav2.tokenizer.base": "ExLlamaV2TokenizerBase",
    "exllamav2.tokenizer.hf": "ExLlamaV2TokenizerHF",
    "exllamav2.server": "ExLlamaV2WebSocketServer",
    "exllamav2.server.websocket": "ExLlamaV2WebSocketServer",
    "exllamav2.server.websocket_actions": "dispatch",
    "exllamav2.conversion.tokenize": "get_tokens",
    "exllamav2.conversion.quantize": "list_live_tensors",
    "exllamav2.compat": "safe_move_tensor pairwise",
    "exllamav2.version": "__version__",
    "exllamav2.attn": "has_flash_attn has_flash_attn_with_paged has_xformers assert_paged_attn "
    "ExLlamaV2Attention",
    "exllamav2.mlp": "ExLlamaV2MLP",
    "exllamav2.moe_mlp": "ExLlamaV2MoEMLP",
    "exllamav2.parallel_decoder": "ExLlamaV2ParallelDecoder",
    "exllamav2.linear": "ExLlamaV2Linear",
    "exllamav2.rmsnorm": "ExLlamaV2RMSNorm",
    "exllamav2.layernorm": "ExLlamaV2LayerNorm",
    "exllamav2.headnorm": "ExLlamaV2HeadNorm",
    "exllamav2.embedding": "ExLlamaV2Embedding",
    "exllamav2.pos_embedding": "ExLlamaV2PosEmbedding",
    "exllamav2.architecture": "ExLlamaV2ArchParams",
    "exllamav2.device": "",
    "exllamav2.ext": "",
    "exllamav2.stloader": "STFile",
    "exllamav2.tensor_p": "",
    "exllamav2.vlm.vision_tower": "ExLlamaV2VisionTower",
    "exllamav2.vlm.mmprojector": "ExLlamaV2MultimodalProjector",
}

SIGNATURES = {
    ("config", "ExLlamaV2Config"): {
        "__init__": "model_dir=None",
        "prepare": "no_tensors=False",
        "arch_compat_overrides": "quiet=False, warn_only=False",
        "set_low_mem": "",
    },
    ("model", "ExLlamaV2"): {
        "__init__": "config, lazy_load=False",
        "load": "gpu_split=None, lazy=False, stats=False, callback=None, callback_gen=None, "
        "progress=False",
        "load_gen": "gpu_split=None, lazy=False, stats=False, callback=None, callback_gen=None",
        "load_autosplit": "cache, reserve_vram=None, last_id_only=False, callback=None, "
        "callback_gen=None, progress=False",
        "load_autosplit_gen": "cache, reserve_vram=None, last_id_only=False, callback=None, "
        "callback_gen=None",
        "load_tp": "gpu_split=None, callback=None, callback_gen=None, progress=False, "
        "expect_cache_tokens=0, expect_cache_base=None",
        "load_tp_gen": "gpu_split=None, callback=None, callback_gen=None, expect_cache_tokens=0, "
        "expect_cache_base=None",
        "unload": "",
        "forward": "input_ids, cache=None, input_mask=None, preprocess_only=False, "
        "last_id_only=False, loras=None, return_last_state=False, position_offsets=None, "
        "abort_event=None, cpu_logits=False",
        "is_quant": "",
    },
    ("cache", "ExLlamaV2Cache"): {
        "__init__": "model, batch_size=1, max_seq_len=-1, copy_from=None, lazy=False, "
        "num_key_value_heads=None, fixed_device=None",
        "footprint": "",
        "reset": "",
        "clone": "",
        "copy_states": "target, from_column, from_columns, to_column, to_columns, from_row, "
        "from_rows, to_row, to_rows",
    },
    ("cache", "ExLlamaV2Cache_TP"): {
        "__init__": "model, base=ExLlamaV2Cache, batch_size=1, max_seq_len=-1",
    },
    ("tokenizer.tokenizer", "ExLlamaV2Tokenizer"): {
        "__init__": "config, lazy_init=True, force_json=False, force_spm=False",
        "encode": "text, add_bos=False, add_eos=False, encode_special_tokens=False, "
        "return_offsets=False, embeddings=None",
        "decode": "ids, decode_special_tokens=False",
        "single_id": "token",
        "single_token": "token_id",
        "padding_mask": "ids",
        "num_tokens": "text",
        "get_vocab_size": "",
        "get_id_to_piece_list": "include_special_tokens=False",
        "get_piece_to_id_dict": "",
        "get_char_trie": "",
        "cached_encode_str": "text",
    },
    ("lora", "ExLlamaV2Lora"): {
        "from_directory": "model, directory, lora_scaling=1.0",
        "unload": "",
    },
    ("generator.base", "ExLlamaV2BaseGenerator"): {
        "__init__": "model, cache, tokenizer",
        "warmup": "",
        "full": "",
        "generate_simple": "prompt, gen_settings, num_tokens, seed=None, token_healing=False, "
        "encode_special_tokens=False, decode_special_tokens=False, loras=None, stop_token=-1, "
        "add_bos=False, abort_event=None, input_embeddings=None, completion_only=False, "
        "filters=None, filter_prefer_eos=False",
        "_gen_begin_base": "input_ids, mask=None, loras=None, position_offsets=None, "
        "input_embeddings=None",
    },
    ("generator.streaming", "ExLlamaV2StreamingGenerator"): {
        "__init__": "model, cache, tokenizer, draft_model=None, draft_cache=None, "
        "num_speculative_tokens=5",
        "set_stop_conditions": "stop_conditions",
        "begin_stream": "input_ids, gen_settings, token_healing=False, loras=None, "
        "input_mask=None, position_offsets=None, abort_event=None",
        "begin_stream_ex": "input_ids, gen_settings, token_healing=False, loras=None, "
        "input_mask=None, position_offsets=None, return_probabilities=False, "
        "return_top_tokens=0, return_logits=False, abort_event=None, input_embeddings=None, "
        "decode_special_tokens=False, banned_strings=None, filters=None, filter_prefer_eos=False",
        "stream": "",
        "stream_ex": "ban_tokens=None",
        "ngram_preload": "input_ids",
        "get_sd_stats": "",
        "reset_sd_stats": "",
    },
    ("generator.dynamic", "ExLlamaV2DynamicGenerator"): {
        "__init__": "model, cache, tokenizer, max_batch_size=None, max_seq_len=None, "
        "max_chunk_size=None, max_q_size=8, draft_model=None, draft_cache=None, "
        "num_draft_tokens=4, use_ngram_draft=False, max_ngram=4, max_sampling_threads=16, "
        "min_sampling_threads=3, paged=True, filter_background_eval=True",
        "warmup": "",
        "set_loras": "loras",
        "generate": "prompt, max_new_tokens, min_new_tokens=0, seed=None, gen_settings=None, "
        "token_healing=False, encode_special_tokens=False, decode_special_tokens=False, "
        "stop_conditions=None, add_bos=False, abort_event=None, completion_only=False, "
        "filters=None, filter_prefer_eos=False, return_last_results=False, embeddings=None",
        "enqueue": "job",
        "cancel": "job",
        "iterate": "",
        "num_remaining_jobs": "",
        "clear_queue": "",
    },
    ("generator.dynamic", "ExLlamaV2DynamicJob"): {
        "__init__": "input_ids, max_new_tokens, min_new_tokens=0, max_skips=4, gen_settings=None, "
        "seed=None, stop_conditions=None, decode_special_tokens=False, return_top_tokens=0, "
        "return_logits=False, return_probs=False, filters=None, filter_prefer_eos=False, "
        "token_healing=False, identifier=None, banned_strings=None, embeddings=None",
    },
    ("generator.dynamic_async", "ExLlamaV2DynamicGeneratorAsync"): {
        "enqueue": "job",
        "cancel": "job",
        "close": "",
    },
    ("generator.dynamic_async", "ExLlamaV2DynamicJobAsync"): {
        "__init__": "generator",
        "cancel": "",
    },
    ("generator.dynamic_embeddings", "ExLlamaV2MMEmbedding"): {
        "__init__": "model, embeddings, text_alias=None, thw_grid=None, pre_tokens=0, "
        "post_tokens=0",
    },
    ("generator.sampler", "ExLlamaV2Sampler"): {
        "sample": "logits, settings, sequence_ids, random, tokenizer, prefix_token=None, "
        "return_top_tokens=0, blocked_tokens=None, filters=None, filter_prefer_eos=False, "
        "sync=False",
    },
    ("generator.filters.base", "ExLlamaV2Filter"): {
        "__init__": "model, tokenizer",
        "clone": "c=None",
        "begin": "prefix_str",
        "feed": "token",
        "next": "",
        "use_background_worker": "",
        "can_mask_logits": "",
        "prepare_logit_mask": "",
        "mask_logits": "logits",
    },
    ("generator.filters.select", "ExLlamaV2SelectFilter"): {
        "__init__": "model, tokenizer, options, case_insensitive=False",
    },
    ("generator.filters.prefix", "ExLlamaV2PrefixFilter"): {
        "__init__": "model, tokenizer, prefix_strings",
    },
    ("server.websocket", "ExLlamaV2WebSocketServer"): {
        "__init__": "ip, port, model, tokenizer, cache",
        "serve": "",
    },
    ("module", "Intervention"): {"__init__": "inner, pre_forward=None, post_forward=None"},
    ("util", "SeqTensor"): {
        "__init__": "shape, dtype, seq_dim, device='cpu', init_cap=-1",
        "append": "new_data",
        "truncate": "new_len",
        "torch": "",
        "clone": "drop=None",
    },
}
METHODS = [(owner, name) for owner, methods in SIGNATURES.items() for name in methods]


def test_every_name_imports(old: Any) -> None:
    for module, names in NAMES.items():
        found = importlib.import_module(module)
        missing = [name for name in names.split() if not hasattr(found, name)]
        assert not missing, f"{module} lacks {missing}"


def test_modules_that_nobody_imports_are_absent(old: Any) -> None:
    for name in ("conversion.measure", "conversion.optimize", "hadamard", "vlm.processor"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"exllamav2.{name}")


def test_star_imports_give_the_classes(old: Any) -> None:
    names: dict[str, Any] = {}
    exec("from exllamav2 import *\nfrom exllamav2.generator import *", names)
    wanted = (*NAMES["exllamav2"].split(), *NAMES["exllamav2.generator"].split())
    assert {name for name in wanted if not name.startswith("_")} <= names.keys()


@pytest.mark.parametrize(("owner", "name"), METHODS, ids=str)
def test_a_method_has_its_parameters(owner: tuple[str, str], name: str, old: Any) -> None:
    module, kind = owner
    method = getattr(getattr(importlib.import_module(f"exllamav2.{module}"), kind), name)
    parameters = list(inspect.signature(method).parameters.values())
    plain = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    wanted = _parsed(SIGNATURES[owner][name])
    found = [(p.name, _shown(p.default)) for p in plain[: len(wanted)]]
    assert found == wanted


def test_the_table_is_that_of_the_original() -> None:
    """Positions, names and defaults, as in the original's source. Names that the alias gives to a
    positional argument of its own are compared by position only."""
    source = checkout_of("exllamav2") / "exllamav2"
    renamed = {("decode", "ids"), ("single_token", "token_id")}
    for (module, kind), methods in SIGNATURES.items():
        tree = ast.parse((source / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for name, text in methods.items():
            method = _method(classes, kind, name)
            wanted = [(a, d) for a, d in _arguments(method) if a not in ("self", "cls")]
            ours = _parsed(text)
            assert len(ours) <= len(wanted), (kind, name)
            for (a, default), (b, other) in zip(ours, wanted, strict=False):
                assert a == b or (name, a) in renamed, (kind, name, a, b)
                assert default == other, (kind, name, a, default, other)


def _method(classes: list[ast.ClassDef], kind: str, name: str) -> Any:
    """A method of a class or of its bases in the same file."""
    found = next(node for node in classes if node.name == kind)
    for node in found.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    for base in found.bases:
        if isinstance(base, ast.Name) and any(node.name == base.id for node in classes):
            return _method(classes, base.id, name)
    raise AssertionError(f"the original has no {kind}.{name}")


def _arguments(method: Any) -> list[tuple[str, str]]:
    names = [argument.arg for argument in method.args.args]
    values = [ast.unparse(value) for value in method.args.defaults]
    return list(zip(names, [""] * (len(names) - len(values)) + values, strict=True))


def _parsed(text: str) -> list[tuple[str, str]]:
    function = ast.parse(f"def f({text}): pass").body[0]
    return _arguments(function)


def _shown(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    return value.__name__ if inspect.isclass(value) else repr(value)


def test_exceptions_are_of_the_old_type_and_of_exl() -> None:
    kinds = [
        (errors.OldAssertionError, AssertionError),
        (errors.OldValueError, ValueError),
        (errors.OldRuntimeError, RuntimeError),
        (errors.OldModelPathError, AssertionError),
        (errors.OldModelError, ValueError),
        (errors.OldConfigError, AssertionError),
        (errors.OldMemoryError, RuntimeError),
        (errors.RefusedError, NotImplementedError),
    ]
    for kind, old_type in kinds:
        assert issubclass(kind, ExlError)
        assert issubclass(kind, old_type)
    defined = {name for name in vars(errors) if name.startswith("Old")}
    assert defined == {kind.__name__ for kind, _ in kinds if kind.__name__.startswith("Old")}


def test_attributes_that_programs_read(old: Any) -> None:
    """Attributes of ranks 3 and 4, on objects of a loaded model."""
    from exllamav2.attn import ExLlamaV2Attention
    from exllamav2.generator import (
        ExLlamaV2DynamicGenerator,
        ExLlamaV2DynamicJob,
        ExLlamaV2StreamingGenerator,
    )

    config = old.ExLlamaV2Config("/mnt/models/some-model")
    model = old.ExLlamaV2(config)
    cache = old.ExLlamaV2Cache(model, max_seq_len=512, lazy=True)
    model.load_autosplit(cache)
    tokenizer = old.ExLlamaV2Tokenizer(config)
    streaming = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    dynamic = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    job = ExLlamaV2DynamicJob(tokenizer.encode("x"), 1)
    for found, names in (
        (
            config,
            "max_seq_len max_batch_size max_input_len max_attention_size max_output_len "
            "scale_pos_emb scale_alpha_value no_flash_attn no_xformers no_sdpa no_graphs "
            "tensor_file_map generation_config vision_model_type vocab_size hidden_size",
        ),
        (model, "loaded config tp_context modules modules_dict"),
        (cache, "current_seq_len max_seq_len batch_size model"),
        (
            tokenizer,
            "eos_token_id bos_token_id pad_token_id unk_token_id eos_token bos_token "
            "newline_token_id extended_id_to_piece extended_piece_to_id unspecial_piece_to_id "
            "unspecial_id_to_piece tokenizer_config_dict tokenizer tokenizer_model",
        ),
        (streaming, "sequence_ids stop_tokens stop_strings speculative_ngram abort_event"),
        (
            dynamic,
            "max_batch_size current_loras page_size max_pages pending_jobs active_jobs",
        ),
        (job, "full_completion sequences identifier gen_settings new_tokens stop_tokens"),
        (ExLlamaV2Attention, "Params"),
        (tokenizer.tokenizer_model, "vocab vocab_size id_to_piece piece_to_id unk_id"),
        (model.modules[0], "key name layer_idx device device_idx numel is_quant"),
    ):
        missing = [name for name in names.split() if not hasattr(found, name)]
        assert not missing, f"{found} lacks {missing}"
    assert config.arch.lm.requires_bos is False
    assert Path(old.__file__).name == "__init__.py"
    assert model._torch_device(0) == ("cuda:0" if config.is_on_gpu() else "cpu")
