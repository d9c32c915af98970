"""Calls of the old example inference_async: three jobs in an event loop, one cancelled."""

import asyncio

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync


async def main():
    config = ExLlamaV2Config("/mnt/models/some-model")
    model = ExLlamaV2(config)
    cache = ExLlamaV2Cache(model, lazy=True)
    model.load_autosplit(cache, progress=True)
    tokenizer = ExLlamaV2Tokenizer(config)
    generator = ExLlamaV2DynamicGeneratorAsync(model=model, cache=cache, tokenizer=tokenizer)
    markers = []

    async def run_job(prompt, marker):
        job = ExLlamaV2DynamicJobAsync(
            generator, input_ids=tokenizer.encode(prompt, add_bos=False), max_new_tokens=40
        )
        completion = ""
        async for result in job:
            completion += result.get("text", "")
            markers.append(marker)
            if marker == "1" and len(completion) > 5:
                await job.cancel()
                break
        return completion

    outputs = await asyncio.gather(*(run_job(f"Prompt {i}", str(i)) for i in range(3)))
    await generator.close()
    return outputs, markers


outputs, markers = asyncio.run(main())
