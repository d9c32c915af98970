"""Names of models: hub names and links, quantizations of GGUF files, and files of one model.

Pure functions of texts and lists of file names. Knows neither the disk nor the network.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

DEFAULT_BRANCH = "main"

_REPO = r"\w[\w.-]*/\w[\w.-]*"
_WORD = r"\w[\w./-]*"
_HUB_NAME = re.compile(rf"(?P<repo>{_REPO})(:(?P<tag>{_WORD}))?(@(?P<revision>{_WORD}))?")
_LINK_START = re.compile(r"(https?://)?(www\.)?(hf\.co|huggingface\.co)/", re.IGNORECASE)
_LINK_REST = re.compile(
    rf"(?P<name>{_REPO})/(tree|blob|resolve)/(?P<revision>[^/]+)(/(?P<file>.+))?"
)
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|FP16|F32|MXFP4(?:_MOE)?))$",
    re.IGNORECASE,
)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.IGNORECASE)
_GGUF = ".gguf"
# Files beside the weights of a GGUF model: vision projectors and importance matrices.
_NO_MODEL = re.compile(r"(^|/)(mmproj|imatrix)[-._]|imatrix\.gguf$", re.IGNORECASE)
# Mistral's second copy of the weights, under names of its own.
_OWN_NAMES = "consolidated"
# Side files of safetensors: never pickles, never code.
_SIDE_FILE = re.compile(r"[^/]+\.(json|jinja)|tokenizer\.model")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub: a repository, with a quantization or a branch where it has several."""

    repo: str
    tag: str | None = None
    """Text after the colon: a quantization (`Q4_K_M`), a GGUF file, or a branch (`4.0bpw`)."""
    revision: str | None = None
    """Text after the @: a branch, a tag or a commit."""

    def __str__(self) -> str:
        tag = "" if self.tag is None else f":{self.tag}"
        return self.repo + tag + ("" if self.revision is None else f"@{self.revision}")


@dataclass(frozen=True, slots=True)
class ModelFileSet:
    """Files of one model in a folder or repository."""

    label: str | None
    """Quantization of a GGUF model, or the stem of its file; None for safetensors."""
    files: tuple[str, ...]
    """Paths relative to the folder. The first part of a split GGUF model comes first."""
    missing: int = 0
    """Number of parts that a split GGUF model lacks."""

    @property
    def is_gguf(self) -> bool:
        return self.label is not None


def parse_hub_name(text: str) -> HubName | None:
    """`owner/name[:TAG][@REVISION]`, or a link of the hub. None: neither."""
    start = _LINK_START.match(text)
    if start is None:
        return _parse_plain(text)
    rest = text[start.end() :].partition("?")[0].rstrip("/")
    link = _LINK_REST.fullmatch(rest)
    if link is None:
        return _parse_plain(rest)
    file = link["file"]
    tag = file if file is not None and is_gguf(file) else None
    revision = None if link["revision"] == DEFAULT_BRANCH else link["revision"]
    return HubName(link["name"], tag, revision)


def _parse_plain(text: str) -> HubName | None:
    match = _HUB_NAME.fullmatch(text)
    if match is None or is_gguf(match["repo"]):
        return None
    return HubName(match["repo"], match["tag"], match["revision"])


def is_gguf(file: str) -> bool:
    return file.lower().endswith(_GGUF)


def split_files(file: str) -> tuple[str, ...]:
    """All parts of a split GGUF model, given one of them, in order; the file itself otherwise."""
    match = _SPLIT.fullmatch(file[: -len(_GGUF)]) if is_gguf(file) else None
    if match is None:
        return (file,)
    count, end = int(match["count"]), file[-len(_GGUF) :]
    return tuple(f"{match['stem']}-{n:05d}-of-{match['count']}{end}" for n in range(1, count + 1))


def quantization_label(file: str) -> str:
    """Quantization in the name of a GGUF file, in upper case; the stem if it names none."""
    stem = file.rpartition("/")[2][: -len(_GGUF)]
    split = _SPLIT.fullmatch(stem)
    stem = stem if split is None else split["stem"]
    found = _QUANTIZATION.search(stem)
    return stem if found is None else found[1].upper()


def model_file_sets(files: Iterable[str]) -> list[ModelFileSet]:
    """Models among the files of a folder: safetensors at its top level, and GGUF files anywhere."""
    names = sorted(files)
    found = []
    weights = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    usual = [name for name in weights if not name.startswith(_OWN_NAMES)]
    weights = usual or weights
    if weights and "config.json" in names:
        found.append(ModelFileSet(None, (*weights, *filter(_SIDE_FILE.fullmatch, names))))
    present = set(names)
    for name in names:
        if not is_gguf(name) or _NO_MODEL.search(name):
            continue
        parts = split_files(name)
        if name != next(part for part in parts if part in present):
            continue  # counted with the first part that is there
        here = tuple(part for part in parts if part in present)
        found.append(ModelFileSet(quantization_label(name), here, len(parts) - len(here)))
    return _with_unique_labels(found)


def _with_unique_labels(found: Sequence[ModelFileSet]) -> list[ModelFileSet]:
    """Files of one quantization get the stems of their files as labels."""
    labels = [one.label for one in found]
    return [
        replace(one, label=one.files[0].rpartition("/")[2][: -len(_GGUF)])
        if one.label is not None and labels.count(one.label) > 1
        else one
        for one in found
    ]


def matching_file_set(found: Sequence[ModelFileSet], tag: str) -> ModelFileSet | None:
    """The GGUF model that `tag` names: by quantization, by file name or by its stem."""
    wanted = tag.lower()
    for one in found:
        if one.is_gguf:
            names = {one.label, one.files[0], one.files[0].rpartition("/")[2]}
            names |= {name[: -len(_GGUF)] for name in names if name and is_gguf(name)}
            if wanted in {name.lower() for name in names if name}:
                return one
    return None


def matching_branch(branches: Iterable[str], tag: str) -> str | None:
    """The branch that `tag` names. `4.0bpw`, `4.0`, `4_0` and `4bpw` are spellings of one rate."""
    names = list(branches)
    if tag in names:
        return tag
    alike = [name for name in names if _rate(name) is not None and _rate(name) == _rate(tag)]
    return alike[0] if len(alike) == 1 else None


def _rate(name: str) -> float | None:
    """Bits per weight that a branch name states."""
    match = re.fullmatch(r"(\d+(?:[._]\d+)?)(?:[-_ ]?bpw)?", name, re.IGNORECASE)
    return None if match is None else float(match[1].replace("_", "."))


def unique_prefix(text: str, names: Mapping[str, object]) -> list[str]:
    """Names that begin with `text`, with or without their owner; cases are ignored."""
    wanted = text.lower()
    return [
        name
        for name in names
        if name.lower().startswith(wanted) or name.lower().partition("/")[2].startswith(wanted)
    ]


def near_names(text: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """The names most similar to `text`, with or without their owner, best first."""
    keys: dict[str, str] = {}
    for name in names:
        keys.setdefault(name.lower(), name)
        keys.setdefault(name.lower().partition("/")[2] or name.lower(), name)
    close = difflib.get_close_matches(text.lower(), keys, n=2 * limit, cutoff=0.6)
    return list(dict.fromkeys(keys[key] for key in close))[:limit]


def did_you_mean(near: Sequence[str]) -> str | None:
    """Sentence for an error message; None if there are no near names."""
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else None
