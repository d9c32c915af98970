"""Start of the sequences of one request: all of them get memory, or none does."""

from __future__ import annotations

from exl_core.cache.page_pool import PagePool
from exl_core.engine.sequence import RequestSequence


def start(members: tuple[RequestSequence, ...], pool: PagePool, *, spare: int) -> bool:
    """Get memory for all of these sequences, sharing known prefixes.

    False, without any change, unless `spare` pages remain available afterwards.
    """
    found = [member.state.known_prefix(member.reusable_len) for member in members]
    distinct = {page_id for page_ids in found for page_id in page_ids}
    wanted = [
        member.state.num_wanted() - len(page_ids)
        for member, page_ids in zip(members, found, strict=True)
    ]
    taken = len(distinct) - pool.num_held_among(distinct) + sum(wanted)
    if taken + spare > pool.num_available:
        return False
    for member, page_ids in zip(members, found, strict=True):
        member.state.share(page_ids, member.reusable_len)  # before `extend`, which may evict pages
    for member, page_ids, count in zip(members, found, wanted, strict=True):
        is_extended = member.state.extend(count)
        assert is_extended, "the pages were counted before"
        if member.cached_tokens is None:
            member.cached_tokens = member.past_len
            member.cached_pages = len(page_ids)
    return True
