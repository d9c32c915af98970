"""Drives text-generation-webui's loader Exllamav2Model, with its other modules as stubs.

Run in the checkout with the model's directory as the argument; the last line is JSON.
"""

import json
import sys
from pathlib import Path

from webui_stubs import install_stubs, state

install_stubs(model_dir=Path(sys.argv[1]).parent)
sys.path.insert(0, str(Path.cwd()))

from modules.exllamav2 import Exllamav2Model

model, tokenizer = Exllamav2Model.from_pretrained(Path(sys.argv[1]).name)
ids = tokenizer.encode("One, two, three,", add_bos=False)
logits = model.get_logits(ids)
texts = list(model.generate_with_streaming("One, two, three,", state(max_new_tokens=12)))
drys = model.generate("One, two, three,", state(dry_multiplier=0.8, max_new_tokens=12))
found = {
    "shape": list(logits.shape),
    "dtype": str(logits.dtype),
    "decoded": tokenizer.decode(ids),
    "texts": texts,
    "dry": drys,
    "greedy": int(logits[0, -1].argmax()),
}
print(json.dumps(found))
