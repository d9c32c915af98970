"""Calls of the old examples inference and streaming of the base and streaming generators."""

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)

config = ExLlamaV2Config()
config.model_dir = "/mnt/models/some-model"
config.prepare()
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, lazy=True)
model.load_autosplit(cache)
tokenizer = ExLlamaV2Tokenizer(config)
settings = ExLlamaV2Sampler.Settings()
settings.temperature = 0.85
settings.top_k = 50
settings.top_p = 0.8
settings.token_repetition_penalty = 1.01
settings.disallow_tokens(tokenizer, [tokenizer.eos_token_id])

prompt = "Our story begins in the Scottish town of Auchtermuchty, where once"
base = ExLlamaV2BaseGenerator(model, cache, tokenizer)
base.warmup()
output = base.generate_simple(prompt, settings, 24, seed=1234)
again = base.generate_simple(prompt, settings, 24, seed=1234)

generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
generator.warmup()
generator.set_stop_conditions([])
input_ids = tokenizer.encode(prompt, add_bos=True)
generator.begin_stream_ex(input_ids, settings)
held_at_first = cache.current_seq_len
streamed = ""
counts = []
while True:
    res = generator.stream_ex()
    streamed += res["chunk"]
    counts.append(res["chunk_token_ids"].shape[-1])
    if res["eos"] or len(counts) == 30:
        break
