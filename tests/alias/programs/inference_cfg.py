"""Calls of the old example inference_cfg: pairs of prompts at several scales, -1 included."""

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler

config = ExLlamaV2Config("/mnt/models/some-model")
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=8192, lazy=True)
model.load_autosplit(cache)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
scales = [-1.0, 0.0, 0.25, 1.0, 2.0]
prompts = [("You are kind. Hello!", "You are rude. Hello!") for _ in scales]
outputs = generator.generate(
    prompt=prompts,
    max_new_tokens=12,
    gen_settings=[ExLlamaV2Sampler.Settings.greedy(cfg_scale=s) for s in scales],
    stop_conditions=[tokenizer.eos_token_id],
    completion_only=True,
    encode_special_tokens=True,
)
alone = generator.generate(
    prompt=list(prompts[0]),
    max_new_tokens=12,
    gen_settings=ExLlamaV2Sampler.Settings.greedy(),
    stop_conditions=[tokenizer.eos_token_id],
    completion_only=True,
)
