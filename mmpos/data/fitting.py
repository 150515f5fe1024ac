"""First-fit decreasing: groups of at most so many tokens when all lengths are known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmpos.support.checks import first_bad, int_array, integer

__all__ = ["first_fit_decreasing"]


def first_fit_decreasing(lengths: npt.ArrayLike, max_tokens: int) -> list[list[int]]:
    """Group lengths that are all known: the longest first, each into the first group that has room for it.

    >>> first_fit_decreasing([3, 5, 2, 4], 7)
    [[1, 2], [3, 0]]

    Args:
        lengths: (examples,) tokens of each, 1 to max_tokens.
        max_tokens: most tokens in a group.

    Returns:
        indices into lengths, group by group; every index once.
    """
    lengths = int_array("lengths", lengths, (None,))
    max_tokens = integer("max_tokens", max_tokens, minimum=1)
    first_bad("lengths", lengths, minimum=1, maximum=max_tokens)
    # Two groups in a row hold more than max_tokens together, which bounds how many there are.
    groups: list[list[int]] = [[] for _ in range(min(lengths.size, 2 * int(lengths.sum()) // max_tokens + 1))]
    # A tournament tree: leaves are the room in every group, and inner nodes the most room below them.
    leaves = 1 << max(len(groups) - 1, 0).bit_length()
    room = [max_tokens] * (2 * leaves)
    order = np.argsort(-lengths, kind="stable")
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        groups[node - leaves].append(index)
        left = room[node] = room[node] - length
        while node > 1:
            sibling = room[node ^ 1]
            left = sibling if sibling > left else left
            node //= 2
            if room[node] == left:
                break
            room[node] = left
    return [group for group in groups if group]
