"""Steps of the text generation workflow of the old library: load, batch, speculate, end."""

from exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler

# Model configuration
config = ExLlamaV2Config("/mnt/models/some-model")
config.arch_compat_overrides()
config.max_seq_len = 512
config.scale_alpha_value = 1.0

# Three ways to load: auto split with a lazy cache, a manual split, tensor parallel
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=2048, lazy=True)
reports = []
model.load_autosplit(cache, callback=lambda done, total: reports.append((done, total)))
manual = ExLlamaV2(config)
manual.load(gpu_split=[0, 20, 24])
parallel = ExLlamaV2(config)
parallel.load_tp(progress=True, expect_cache_tokens=1024)
parallel_cache = ExLlamaV2Cache_TP(parallel, max_seq_len=1024)
classes = [ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8]

# Tokenizer
tokenizer = ExLlamaV2Tokenizer(config)
ids = tokenizer.encode("Once upon a time", add_bos=True)

# Generators
generator = ExLlamaV2DynamicGenerator(
    model=model, cache=cache, tokenizer=tokenizer, max_batch_size=4, max_q_size=2
)
generator.warmup()
draft = ExLlamaV2(config)
draft_cache = ExLlamaV2Cache(draft, max_seq_len=2048, lazy=True)
draft.load_autosplit(draft_cache)

# Completions: one prompt, a list, settings per prompt, stop conditions, token healing
greedy = ExLlamaV2Sampler.Settings.greedy()
warm = ExLlamaV2Sampler.Settings(temperature=0.9, top_k=20, token_repetition_penalty=1.1)
single = generator.generate("Once upon a time", 12, gen_settings=greedy, add_bos=True)
prompts = ["Once upon a time", "The weather", "A list:", "Yes or no?"]
several = generator.generate(
    prompts,
    12,
    gen_settings=[greedy, warm, warm, greedy],
    stop_conditions=[tokenizer.eos_token_id, "never"],
    token_healing=True,
    seed=5,
    completion_only=True,
)
again = generator.generate(
    prompts,
    12,
    gen_settings=[greedy, warm, warm, greedy],
    token_healing=True,
    seed=5,
    completion_only=True,
    stop_conditions=[tokenizer.eos_token_id, "never"],
)
drafted = ExLlamaV2DynamicGenerator(
    model=model, cache=cache, tokenizer=tokenizer, draft_model=draft, draft_cache=draft_cache
).generate("Once upon a time", 12, gen_settings=greedy, add_bos=True)
on_parallel = ExLlamaV2DynamicGenerator(parallel, parallel_cache, tokenizer).generate(
    "Once upon a time", 12, gen_settings=greedy, add_bos=True
)
