"""Drives tabbyAPI's own backend for exllamav2: load, four requests, unload.

Run in the checkout with the model's directory as the argument; the last line is JSON.
"""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path.cwd()))

import common.model  # noqa: F401 - first, because the backend and it import each other
from backends.exllamav2.model import ExllamaV2Container
from common.sampling import BaseSamplerRequest
from common.transformers_utils import HFModel

SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "who": {"enum": ["man", "bird"]}},
    "required": ["sure", "who"],
}


class Handler:
    """Stands for the connection of a client, which stays."""

    request = SimpleNamespace()

    async def add_cleanup_task(self, key, call, args):
        pass

    async def poll(self):
        pass

    async def finish(self, key):
        pass


async def main(folder):
    steps = []
    hf_model = await HFModel.from_directory(folder)
    container = await ExllamaV2Container.create(folder, hf_model, max_seq_len=1024, cache_mode="Q8")
    await container.load(lambda done, total: iter([steps.append((done, total))]))

    async def ask(name, **values):
        params = BaseSamplerRequest(max_tokens=60, temperature=0, **values)
        return await container.generate(name, "Superman is a", params, Handler())

    plain = await ask("plain", logprobs=3)
    schema = await ask("schema", json_schema=SCHEMA, frequency_penalty=2.0)
    regex = await ask("regex", regex_pattern="(yes|no){2}")
    penalized = await ask("penalized", frequency_penalty=0.5, penalty_range=-1)
    both = await asyncio.gather(ask("a"), ask("b"))
    stream = container.stream_generate(
        "stopped", "Count:", BaseSamplerRequest(max_tokens=500), Handler()
    )
    chunks = 0
    async for _ in stream:
        chunks += 1
        await container.active_job_ids["stopped"].cancel()
    ids = container.encode_tokens("Superman is a")
    found = {
        "steps": len(steps),
        "plain": plain["text"],
        "prompt_tokens": plain["prompt_tokens"],
        "logprobs": len(plain["logprobs"]),
        "finish": plain["finish_reason"],
        "schema": schema["text"],
        "regex": regex["text"],
        "penalized": penalized["text"],
        "both": [one["text"] for one in both],
        "chunks": chunks,
        "decoded": container.decode_tokens(ids),
        "special": container.get_special_tokens(),
    }
    await container.unload()
    print(json.dumps(found))


asyncio.run(main(Path(sys.argv[1])))
