"""Drives text-generation-webui's Exllamav2HF, with its other modules as stubs.

The class says that its tensors are on GPU 0, so a subclass says where they are on this machine.
Run in the checkout with the model's directory as the argument; the last line is JSON.
"""

import json
import sys
from pathlib import Path

import torch
from webui_stubs import install_stubs

install_stubs(model_dir=Path(sys.argv[1]).parent)
sys.path.insert(0, str(Path.cwd()))

from modules.exllamav2_hf import Exllamav2HF

Exllamav2HF.device = property(lambda self: torch.device("cpu"))
model = Exllamav2HF.from_pretrained(Path(sys.argv[1]).name)
ids = torch.tensor([[int(text) for text in sys.argv[2].split(",")]])
held, logits = [], []
for _ in range(8):
    found = model(input_ids=ids, use_cache=True)
    held.append(model.ex_cache.current_seq_len)
    logits.append(list(found.logits.shape))
    ids = torch.cat([ids, found.logits[:, -1:].argmax(-1)], dim=-1)
again = model(input_ids=ids[:, :5])
held_again = model.ex_cache.current_seq_len
whole = model(input_ids=ids, labels=ids)
negative = model(ids[:, :4], use_cache=True)
found = {
    "ids": ids[0].tolist(),
    "held": held,
    "held_again": held_again,
    "shape": logits[0],
    "whole": list(whole.logits.shape),
    "loss": float(whole.loss),
    "negative": list(negative.logits.shape),
    "negative_held": model.ex_cache_negative.current_seq_len,
    "again": int(again.logits[0, -1].argmax()),
}
print(json.dumps(found))
