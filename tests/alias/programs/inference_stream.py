"""Calls of the old example inference_stream: a job with token healing, iterated by hand."""

import pprint

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob

config = ExLlamaV2Config("/mnt/models/some-model")
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, lazy=True)
model.load_autosplit(cache, progress=True)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
prompt = "Our story begins in the Scottish town of Auchtermuchty, where "
input_ids = tokenizer.encode(prompt, add_bos=False)
job = ExLlamaV2DynamicJob(input_ids=input_ids, max_new_tokens=20, token_healing=True)
generator.enqueue(job)

text = ""
stages = []
eos = False
while not eos:
    for result in generator.iterate():
        assert result["job"] == job
        stages.append(result["stage"])
        if result["stage"] == "streaming":
            text += result.get("text", "")
            if result["eos"]:
                pprint.pprint(result, indent=4)
                last = result
                eos = True
