"""Checks that a tokenizer fits a model, by comparing the sizes and ids of both."""

from __future__ import annotations

from exl_core.errors import TokenizerError
from exl_core.tokenizer.base import ControlIds, Tokenizer


def check_vocab(tokenizer: Tokenizer, vocab_size: int, where: object) -> None:
    """Requires that every id of the tokenizer is a row of the model's embedding.

    Fewer ids than rows is normal, because models pad their vocabulary.
    """
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has more tokens than the model's vocabulary, from {tokenizer.where}",
            where=where,
            expected=f"at most {vocab_size}",
            got=tokenizer.vocab_size,
            next_step="The tokenizer belongs to another model",
        )


def check_control_ids(control: ControlIds, vocab_size: int, where: str) -> None:
    """Requires that the ids of the control tokens are ids of the tokenizer.

    PAD is not checked: `Tokenizer.pad_id` ignores an id outside the vocabulary.
    """
    roles = [("BOS", control.bos_id), ("UNK", control.unk_id)]
    roles += [("EOS", number) for number in control.eos_ids]
    for role, number in roles:
        if number is not None and not 0 <= number < vocab_size:
            raise TokenizerError(
                f"the {role} id is not an id of the tokenizer",
                where=where,
                expected=f"0 to {vocab_size - 1}",
                got=number,
                next_step="The tokenizer and the model's configuration do not belong together",
            )
