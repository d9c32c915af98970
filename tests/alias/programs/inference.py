"""Calls of the old example inference: one completion, then a batch, with times."""

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer, Timer
from exllamav2.generator import ExLlamaV2DynamicGenerator

config = ExLlamaV2Config("/mnt/models/some-model")
config.arch_compat_overrides()
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=4096, lazy=True)
model.load_autosplit(cache, progress=True)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
max_new_tokens = 24
generator.warmup()

prompt = "Once upon a time,"
with Timer() as t_single:
    output = generator.generate(prompt=prompt, max_new_tokens=max_new_tokens, add_bos=True)
print(output)

prompts = [prompt, "The secret to success is", "There's no such thing as", "Here's why you should:"]
with Timer() as t_batched:
    outputs = generator.generate(prompt=prompts, max_new_tokens=max_new_tokens, add_bos=True)
for output in outputs:
    print(output)
print(f"speed, bsz 1: {max_new_tokens / t_single.interval:.2f} tokens/second")
print(f"speed, bsz {len(prompts)}: {max_new_tokens * 4 / t_batched.interval:.2f} tokens/second")
