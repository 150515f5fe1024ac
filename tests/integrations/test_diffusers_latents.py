"""pack_latents and unpack_latents: latents of mixed sizes in one tensor, and back."""

from __future__ import annotations

import torch
from refusals import assert_refused

from mmpos.integrations.diffusers import pack_latents, unpack_latents


def test_latents_of_mixed_sizes_are_packed_and_unpacked() -> None:
    latents = [torch.arange(2 * 4 * 6.0).reshape(2, 4, 6), 100 + torch.arange(2 * 2 * 2.0).reshape(2, 2, 2)]
    packed = pack_latents(latents, 2)
    assert packed.shape == (1, 2, 2, 14)
    assert packed[0, 0].tolist() == [
        [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 100, 101],
        [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23, 102, 103],
    ]
    rows = pack_latents(latents, 2, batch=True)
    assert rows.shape == (2, 2, 2, 12)
    assert not rows[1, :, :, 2:].any()
    videos = [torch.randn(3, 4, 2, 6), torch.randn(3, 2, 4, 3)]
    for inputs, size in ((latents, 2), (videos, (2, 2, 3))):
        for batch in (False, True):
            back = unpack_latents(pack_latents(inputs, size, batch=batch), [x.shape[1:] for x in inputs], size)
            assert all(torch.equal(one, other) for one, other in zip(back, inputs, strict=True))
    for call, message in (
        (lambda: pack_latents([], 2), "latents: got none, want at least one"),
        (lambda: pack_latents([latents[0], videos[0]], 2), "latents[1]: got shape (3, 4, 2, 6), want (channels"),
        (lambda: pack_latents(latents, 4), "latents[0]: got size (4, 6), want multiples of the patch (4, 4)"),
        (
            lambda: unpack_latents(packed, [(4, 6)], 2),
            "sizes: got 1 size with 12 columns, want the sizes of the strips",
        ),
        (lambda: unpack_latents(packed, [(4, 6, 2)], 2), "sizes[0]: got (4, 6, 2), want 2 numbers"),
        (lambda: unpack_latents(rows, [(4, 4), (2, 2)], 2), "sizes: got 2 sizes with 8 and 2 columns, want the sizes"),
        (lambda: unpack_latents(rows, [(4, 6), (8, 6)], 2), "sizes: got 2 sizes with 12 and 24 columns, want the si"),
        (lambda: unpack_latents(packed, [(4, 3)] * 2, 1), "packed: got shape (1, 2, 2, 14), want (rows, channels, "),
        (lambda: unpack_latents(packed[0], [(4, 6)], 2), "packed: got shape (2, 2, 14), want (rows, channels, patch"),
        (lambda: unpack_latents(packed, [(-4, 7), (2, 2)], 2), "sizes[0]: got size (-4, 7), want multiples of"),
        (lambda: pack_latents(latents, 0), "patch_size: got 0, want >= 1"),
        (lambda: pack_latents(videos, (2, 2)), "patch_size: got (2, 2), want one side, or frames, height and width"),
    ):
        assert_refused(message, call)
