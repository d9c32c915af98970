"""Start of the sequences of one request: all of them get memory, or none does."""

from __future__ import annotations

from exl_core.cache.page_pool import PagePool
from exl_core.cache.sequence_state import Prefix
from exl_core.engine.sequence import RequestSequence


def start(members: tuple[RequestSequence, ...], pool: PagePool, *, spare: int) -> bool:
    """Get memory for all of these sequences, sharing known prefixes.

    False, without any change, unless `spare` pages remain available afterwards.
    """
    found = _prefixes(members)
    distinct = {page_id for prefix in found for page_id in prefix.page_ids}
    wanted = [
        member.state.num_wanted() - len(prefix.page_ids)
        for member, prefix in zip(members, found, strict=True)
    ]
    taken = len(distinct) - pool.num_held_among(distinct) + sum(wanted)
    if taken + spare > pool.num_available:
        return False
    for member, prefix in zip(members, found, strict=True):
        member.state.share(prefix, member.reusable_len)  # before `extend`, which may evict pages
    for member, prefix, count in zip(members, found, wanted, strict=True):
        is_extended = member.state.extend(count)
        assert is_extended, "the pages were counted before"
        if member.cached_tokens is None:
            member.cached_tokens = member.past_len
            member.cached_pages = len(prefix.page_ids)
    return True


def _prefixes(members: tuple[RequestSequence, ...]) -> list[Prefix]:
    """Known prefix of each sequence, which stays known while the other one gets memory."""
    is_alone = len(members) == 1
    found = [
        member.state.known_prefix(member.reusable_len, allow_partial=is_alone) for member in members
    ]
    states = members[0].state.memory.states
    if states is None or is_alone:
        return found
    snapshots = {prefix.snapshot for prefix in found if prefix.snapshot is not None}
    if states.num_available - len(snapshots) < len(members):
        return [Prefix()] * len(members)
    for key in snapshots:
        states.touch(key)  # the slots that the sequences get are then those of others
    return found
