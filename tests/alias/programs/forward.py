"""Calls of web interfaces and evaluation programs: forward, rewinds, masks, sampling by hand."""

import random

import torch
from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2Sampler

config = ExLlamaV2Config("/mnt/models/some-model")
config.max_batch_size = 2
model = ExLlamaV2(config)
steps = []
model.load(callback=lambda i, n: steps.append((i, n)))
tokenizer = ExLlamaV2Tokenizer(config)
cache = ExLlamaV2Cache(model, batch_size=2, max_seq_len=512)
texts = ["Hello there, how are you", "Hi"]
ids, offsets = tokenizer.encode(texts, return_offsets=True)
mask = tokenizer.padding_mask(ids)

whole = model.forward(ids, input_mask=mask, position_offsets=offsets)
assert model.forward(ids[:, :-1], cache, input_mask=mask, preprocess_only=True) is None
held = cache.current_seq_len
last = model.forward(ids[:, -1:], cache, input_mask=mask).float().cpu()
last += 0.0  # an ordinary tensor
cache.current_seq_len -= 1
again = model.forward(ids[:, -1:], cache, input_mask=mask, last_id_only=True)
logits, state = model.forward(ids[:1], return_last_state=True)

settings = ExLlamaV2Sampler.Settings.greedy()
token, *_ = ExLlamaV2Sampler.sample(last[:, -1:, :], settings, ids, random.random(), tokenizer)
expected = last[:, -1, : tokenizer.get_vocab_size()].argmax(-1, keepdim=True)
assert torch.equal(token, expected)
