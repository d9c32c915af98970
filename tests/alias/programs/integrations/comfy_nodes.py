"""Drives the nodes of ComfyUI-ExLlama-Nodes, with ComfyUI's modules as stubs.

Run in the checkout with the model's directory as the argument; the last line is JSON.
"""

import json
import sys
from pathlib import Path
from types import ModuleType

folder = Path(sys.argv[1])
updates = []


class ProgressBar:
    def __init__(self, total):
        self.total = total

    def update(self, value):
        updates.append(value)


comfy, management, utils = map(ModuleType, ("comfy", "comfy.model_management", "comfy.utils"))
management.soft_empty_cache = management.unload_all_models = lambda: None
utils.ProgressBar = ProgressBar
folders = ModuleType("folder_paths")
folders.models_dir = str(folder.parent)
folders.add_model_folder_path = lambda name, path: None
folders.get_folder_paths = lambda name: [str(folder.parent)]
for stub in (comfy, management, utils, folders):
    sys.modules[stub.__name__] = stub
sys.path.insert(0, str(Path.cwd()))

import exllama as nodes

names, _ = nodes.Loader.INPUT_TYPES()["required"]["model"]
(loader,) = nodes.Loader().setup(folder.name, 8, True, 1024)
messages = [{"role": "user", "content": "Count to five."}]
(text,) = nodes.Formatter().format(loader, messages, True)
(tokens,) = nodes.Tokenizer().tokenize(loader, text, False, True)
(settings,) = nodes.Settings().set(1.0, 1.0, 1, 0.0, 0.0, 0.0, 0.0, 0.0, True)
(reply,) = nodes.Generator().generate(loader, tokens, False, '"\\n\\n"', 16, 0, settings)
loaded = len(loader.model.modules)
(again,) = nodes.Generator().generate(loader, tokens, True, "", 16, 0)
found = {
    "names": names,
    "text": text,
    "reply": reply,
    "again": again,
    "modules": loaded,
    "updates": len(updates),
    "is_unloaded": loader.model is None,
}
print(json.dumps(found))
