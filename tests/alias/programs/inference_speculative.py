"""Calls of the old example inference_speculative: two generators take turns on one cache."""

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)

draft_config = ExLlamaV2Config("/mnt/models/draft-model")
draft_model = ExLlamaV2(draft_config)
draft_cache = ExLlamaV2Cache(draft_model, max_seq_len=4096, lazy=True)
draft_model.load_autosplit(draft_cache)
config = ExLlamaV2Config("/mnt/models/some-model")
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=4096, lazy=True)
model.load_autosplit(cache)
tokenizer = ExLlamaV2Tokenizer(config)
settings = ExLlamaV2Sampler.Settings.greedy()
request = {"prompt": "Implement QuickSort", "max_new_tokens": 30, "gen_settings": settings}

generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
generator.warmup()
plain = generator.generate(**request)
generator = ExLlamaV2DynamicGenerator(
    model=model,
    cache=cache,
    draft_model=draft_model,
    draft_cache=draft_cache,
    tokenizer=tokenizer,
    num_draft_tokens=4,
)
generator.warmup()
drafted, last = generator.generate(**request, return_last_results=True)

streams = []
for kind in ("plain", "draft", "ngram"):
    draft = (draft_model, draft_cache) if kind == "draft" else (None, None)
    stream = ExLlamaV2StreamingGenerator(model, cache, tokenizer, *draft)
    stream.speculative_ngram = kind == "ngram"
    stream.reset_sd_stats()
    stream.set_stop_conditions([])
    stream.begin_stream_ex(tokenizer.encode("Implement QuickSort"), settings)
    text = ""
    for _ in range(30):
        text += stream.stream_ex()["chunk"]
    streams.append(text)
stats = stream.get_sd_stats()
