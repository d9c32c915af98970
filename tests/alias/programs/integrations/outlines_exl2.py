"""Drives the exllamav2 model of outlines 0.0.46, loaded from its file alone.

The package itself needs others that are not installed; the module needs one class of it, which a
stub replaces. Run in the checkout with the model's directory as the argument; the last line is
JSON.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import torch

for name in ("outlines", "outlines.models"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = []
transformers = ModuleType("outlines.models.transformers")
transformers.TransformerTokenizer = lambda tokenizer: tokenizer
sys.modules["outlines.models.transformers"] = transformers
spec = importlib.util.spec_from_file_location(
    "outlines.models.exllamav2", Path("outlines/models/exllamav2.py")
)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

model = module.exl2(sys.argv[1], "cpu", max_seq_len=512, cache_q4=False, low_mem=True)
split = module.exl2(sys.argv[1], "cpu", max_seq_len=512, gpu_split="20", cache_8bit=True)
ids = torch.tensor([[int(text) for text in sys.argv[2].split(",")]])
chosen, held = [], []
for _ in range(6):
    logits, _ = model(ids)
    held.append(model.cache.current_seq_len)
    chosen.append(int(logits[0].argmax()))
    ids = torch.cat([ids, torch.tensor([[chosen[-1]]])], dim=-1)
again = int(model(ids[:, :-1])[0][0].argmax())
other = int(split(ids[:, :-1])[0][0].argmax())
print(json.dumps({"chosen": chosen, "held": held, "again": again, "fp8": other}))
