"""Calls of the old example inference_lmfe: a filter class of the program's own, and a prefix."""

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator
from exllamav2.generator.filters import (
    ExLlamaV2Filter,
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
)


class Digits(ExLlamaV2Filter):
    """Digits, or the letters of a prefix before them, or EOS after three tokens."""

    def __init__(self, model, tokenizer, also):
        super().__init__(model, tokenizer)
        self.allowed = sorted(tokenizer.single_id(c) for c in "0123456789" + also)
        self.seen = []

    def begin(self, prefix_str):
        self.seen = []

    def feed(self, token):
        self.seen.append(int(token[0][0]))

    def next(self):
        if len(self.seen) >= 5:
            return [self.tokenizer.eos_token_id], []
        return self.allowed, []


config = ExLlamaV2Config("/mnt/models/some-model")
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, lazy=True)
model.load_autosplit(cache)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
digits = Digits(model, tokenizer, "No:")
select = ExLlamaV2SelectFilter(model, tokenizer, ["yes", "no", "nothing"])
outputs = generator.generate(
    prompt=["Free", "A number", "One of three"],
    filters=[None, [digits, ExLlamaV2PrefixFilter(model, tokenizer, ["No:", "No"])], [select]],
    filter_prefer_eos=True,
    max_new_tokens=20,
    seed=1,  # another one may give EOS first
    stop_conditions=[tokenizer.eos_token_id],
    completion_only=True,
)
