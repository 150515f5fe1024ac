"""Handwritten ids for the layouts of generative models, used by tests."""

from __future__ import annotations

from fractions import Fraction

from mmpos import Grid, Scheme, Text
from mmpos.schemes import (
    Allegro,
    AnyFlowFar,
    CogVideoX,
    Cosmos,
    Cosmos3,
    Flux,
    Flux2,
    Flux3,
    HunyuanImage,
    Ideogram4,
    JoyImage,
    Kandinsky,
    LongCatImage,
    Ltx,
    Ltx2,
    Lumina2,
    MiniMaxH3,
    QwenImage,
    Wan,
)
from mmpos.segments import Thumbnail
from mmpos.segments.kinds import Segment

HALF, THIRD = Fraction(1, 2), Fraction(1, 3)
IMAGE: list[Segment] = [Text(2), Grid(2, 3), Grid(1, 2)]
"""Two text tokens, an image and a reference image."""

# One line per axis: text | image | reference.
ROWS = "0 0 | 0 0 0 1 1 1 | 0 0"
COLUMNS = "0 0 | 0 1 2 0 1 2 | 0 1"
LAYOUTS: dict[str, tuple[str | Scheme, list[Segment], list[str]]] = {
    "flux": ("flux", IMAGE, ["0 0 | 0 0 0 0 0 0 | 1 1", ROWS, COLUMNS]),
    "flux of VisualCloze": (Flux(first=1), IMAGE, ["0 0 | 1 1 1 1 1 1 | 2 2", ROWS, COLUMNS]),
    "flux2": (
        "flux2",
        [*IMAGE, Grid(1, 1)],
        ["0 0 | 0 0 0 0 0 0 | 10 10 | 20", f"{ROWS} | 0", f"{COLUMNS} | 0", "0 1" + " 0" * 9],
    ),
    "flux2, steps of 3": (Flux2(reference_step=3), IMAGE, ["0 0 | 0 0 0 0 0 0 | 3 3", ROWS, COLUMNS, "0 1" + " 0" * 8]),
    "flux3": (
        "flux3",
        IMAGE,
        ["0 " * 10, "0 0 0 0 0 1/2 1/2 1/2 0 0", "0 0 0 1/2 1 0 1/2 1 0 1/2", "0 1 | 0 0 0 0 0 0 | -1 -1"],
    ),
    "flux3, other steps": (
        Flux3(row_step=1, col_step=THIRD),
        IMAGE,
        ["0 " * 10, ROWS, "0 0 0 1/3 2/3 0 1/3 2/3 0 1/3", "0 1 0 0 0 0 0 0 -1 -1"],
    ),
    "qwen-image": (
        "qwen-image",
        IMAGE,
        ["1 2 | 0 0 0 0 0 0 | 1 1", "1 2 | -1 -1 -1 0 0 0 | -1 -1", "1 2 | -2 -1 0 -2 -1 0 | -1 0"],
    ),
    "qwen-image with layers": (
        QwenImage(layered=True),
        [Text(1), Grid(1, 1), Grid(1, 1), Grid(1, 1), Grid(2, 2)],
        ["3 | 0 | 1 | 2 | -1 -1 -1 -1", "3 | -1 | -1 | -1 | -1 -1 0 0", "3 | -1 | -1 | -1 | -1 0 -1 0"],
    ),
    "qwen-image-2.1": (
        "qwen-image-2.1",
        [*IMAGE, Text(1)],
        ["0 1 | 2 2 2 2 2 2 | 5 5 | 7", "0 1 | -1 -1 -1 0 0 0 | -1 -1 | 7", "0 1 | -2 -1 0 -2 -1 0 | -1 0 | 7"],
    ),
    "lumina2": ("lumina2", IMAGE[:2], ["0 1 | 2 2 2 2 2 2", ROWS[:17], COLUMNS[:17]]),
    "lumina2 of Z-Image": (
        Lumina2(first=1),
        [Text(2), Grid(1, 2, frames=2)],
        ["1 2 | 3 3 4 4", "0 0 0 0 0 0", "0 0 0 1 0 1"],
    ),
    "lumina2 of ERNIE-Image": (
        Lumina2(image_first=True),
        [Grid(2, 1), Text(3)],
        ["3 3 | 0 1 2", "0 1 | 0 0 0", "0 0 0 0 0"],
    ),
    "lumina2 of BriaFibo 2": (Lumina2(first=1, image_at=9), IMAGE, ["1 2 | 9 9 9 9 9 9 | 10 10", ROWS, COLUMNS]),
    "longcat-image": (
        "longcat-image",
        IMAGE,
        ["0 0 | 1 1 1 1 1 1 | 2 2", "0 1 | 2 2 2 3 3 3 | 2 2", "0 1 | 2 3 4 2 3 4 | 2 3"],
    ),
    "longcat-image at 512": (LongCatImage(image_at=512), [Text(1), Grid(1, 2)], ["0 1 1", "0 512 512", "0 512 513"]),
    "ovis-image": ("ovis-image", IMAGE[:2], ["0 0 0 0 0 0 0 0", "0 1 | 0 0 0 1 1 1", "0 1 | 0 1 2 0 1 2"]),
    "ideogram4": ("ideogram4", [Text(2), Grid(1, 2)], ["0 1 65536 65536", "0 1 65536 65536", "0 1 65536 65537"]),
    "ideogram4 elsewhere": (Ideogram4(image_at=7), [Text(1), Grid(2, 1)], ["0 7 7", "0 7 8", "0 7 7"]),
    "wan": ("wan", [Grid(1, 2, frames=3)], ["0 0 1 1 2 2", "0 0 0 0 0 0", "0 1 0 1 0 1"]),
    "wan with keyframes": (
        "wan",
        [Grid(1, 2, frames=3), Grid(2, 1, first_frame=0), Grid(1, 1, frames=2, first_frame=2)],
        ["0 0 1 1 2 2 | 0 0 | 2 3", "0 0 0 0 0 0 | 0 1 | 0 0", "0 1 0 1 0 1 | 0 0 | 0 0"],
    ),
    "wan of ChronoEdit": (
        Wan(skip_length=8),
        [Grid(1, 1, frames=2), Grid(1, 1, frames=3, first_frame=4)],
        ["0 7 | 4 5 6", "0 0 0 0 0", "0 0 0 0 0"],
    ),
    "wan of Wan-Animate 2": (
        Wan(beside=True),
        [Grid(1, 2, frames=2), Grid(1, 3)],
        ["0 0 1 1 | 1 1 1", "0 " * 7, "0 1 0 1 | 3 4 5"],
    ),
    "anyflow-far": (
        "anyflow-far",
        [Grid(1, 2, frames=2), Grid(2, 2), Grid(2, 2)],
        ["0 0 1 1 | 2 2 2 2 | 2 2 2 2", "1/2 1/2 1/2 1/2 | 0 0 1 1 | 0 0 1 1", "1/2 5/2 1/2 5/2 | 0 1 0 1 | 0 1 0 1"],
    ),
    "anyflow-far by 3": (AnyFlowFar(ratio=3), [Grid(1, 2), Grid(1, 1)], ["0 0 1", "1 1 0", "1 4 0"]),
    "hunyuan-video": (
        "hunyuan-video",
        [Grid(1, 2, frames=2), Text(2)],
        ["0 0 1 1 | 0 0", "0 0 0 0 | 0 0", "0 1 0 1 | 0 0"],
    ),
    "hunyuan-image": ("hunyuan-image", [Grid(2, 2), Text(1)], ["0 0 1 1 0", "0 1 0 1 0"]),
    "hunyuan-image, 3 axes": (HunyuanImage(axes=3), [Grid(1, 1, frames=2), Text(1)], ["0 1 0", "0 0 0", "0 0 0"]),
    # 3 × 2 on a base of 2 × 4: 2 rows, round(2/3·2) = 1 column from round(3/2) = 2 to 3.
    "cogvideox": (
        CogVideoX(base_height=2, base_width=4),
        [Text(1), Grid(3, 2, frames=2)],
        ["0" + " 0" * 6 + " 1" * 6, "0" + " 0 0 2/3 2/3 4/3 4/3" * 2, "0" + " 2 3/2" * 6],
    ),
    "cogvideox as meant": (
        CogVideoX(base_height=2, base_width=4, as_released=False),
        [Grid(3, 2)],
        ["0 " * 6, "0 0 2/3 2/3 4/3 4/3", "2 5/2 2 5/2 2 5/2"],
    ),
    "allegro": ("allegro", [Grid(1, 2, frames=2)], ["0 0 5/11 5/11", "0 0 0 0", "0 1/2 0 1/2"]),
    "allegro, other steps": (Allegro(1, THIRD, 2), [Grid(2, 2)], ["0 0 0 0", "0 0 1/3 1/3", "0 2 0 2"]),
    "ltx": (
        "ltx",
        [Grid(1, 2, frames=3, seconds_per_frame=Fraction(1, 2))],
        ["-1 -1 -19/20 -19/20 -11/20 -11/20", "-1 " * 6, "-1 -31/32 " * 3],
    ),
    "ltx, 25 frames a second": (
        "ltx",
        [Grid(2, 1, frames=2, seconds_per_frame=Fraction(1, 25))],
        ["-1 -1 -249/250 -249/250", "-1 -31/32 -1 -31/32", "-1 -1 -1 -1"],
    ),
    "ltx with a keyframe at 80 before the video": (
        "ltx",
        [
            Grid(1, 1, frames=2, seconds_per_frame=Fraction(1, 25), first_frame=80),
            Grid(1, 2, seconds_per_frame=Fraction(1, 25)),
        ],
        ["-17/25 -169/250 | -1 -1", "-1 " * 4, "-1 -1 | -1 -31/32"],
    ),
    "ltx without a first frame": (
        Ltx(causal_offset=8, tokens_per_second=1),
        [Grid(1, 1, frames=3, seconds_per_frame=1)],
        ["-1 7 15", "-1 " * 3, "-1 " * 3],
    ),
    "ltx2": (
        "ltx2",
        [Grid(1, 2, frames=3, seconds_per_frame=1)],
        ["-19/20 -19/20 -1/2 -1/2 3/10 3/10", "-63/64 " * 6, "-63/64 -61/64 " * 3],
    ),
    "ltx2 with keyframes of one latent and of two": (
        "ltx2",
        [
            Grid(1, 1, frames=2, seconds_per_frame=1),
            Grid(1, 1, seconds_per_frame=1, first_frame=9),
            Grid(1, 1, frames=2, seconds_per_frame=1, first_frame=9),
        ],
        ["-19/20 -1/2 | -1/20 | 3/10 11/10", "-63/64 " * 5, "-63/64 " * 5],
    ),
    "ltx2 of audio": (
        Ltx2(axes=1, frames_per_latent=4, tokens_per_second=1),
        [Grid(1, 1, frames=3, seconds_per_frame=2)],
        ["0 5 13"],
    ),
    "ltx2 without a first frame": (
        Ltx2(axes=1, causal_offset=0, tokens_per_second=1),
        [Grid(1, 1, frames=2, seconds_per_frame=1)],
        ["-1 3"],
    ),
    "cosmos": (
        "cosmos",
        [Grid(1, 2, frames=3, seconds_per_frame=Fraction(1, 30))],
        ["0 0 4/5 4/5 8/5 8/5", "0 " * 6, "0 1 0 1 0 1"],
    ),
    "cosmos of images": (
        Cosmos(tokens_per_second=3),
        [
            Grid(2, 1, frames=2, seconds_per_frame=Fraction(1, 3)),
            Grid(1, 1, frames=2, seconds_per_frame=1, first_frame=2),
        ],
        ["0 0 1 1 | 6 9", "0 1 0 1 0 0", "0 " * 6],
    ),
    "cosmos3": (
        "cosmos3",
        [Text(2), *(Grid(1, n, frames=2, seconds_per_frame=Fraction(1, fps)) for n, fps in ((2, 30), (1, 24)))],
        ["0 1 | 15002 15002 75014/5 75014/5 | 15002 15003", "0 1 0 0 0 0 0 0", "0 1 0 1 0 1 0 0"],
    ),
    "cosmos3 without a margin": (Cosmos3(margin=0), [Text(2), Grid(2, 1)], ["0 1 2 2", "0 1 0 1", "0 1 0 0"]),
    "kandinsky": ("kandinsky", [Grid(1, 2, frames=2)], ["0 0 1 1", "0 0 0 0", "0 1 0 1"]),
    "kandinsky with a last frame": (
        Kandinsky(frame_step=HALF),
        [Grid(1, 1, frames=2), Grid(1, 1, first_frame=5), Grid(1, 1, first_frame=-1)],
        ["0 1/2 | 5/2 | -1/2", "0 " * 4, "0 " * 4],
    ),
    "cosmos3 with actions, which count from 1": (
        "cosmos3",
        [Text(1), Grid(1, 1, frames=2, seconds_per_frame=Fraction(1, 12), first_frame=1)],
        ["0 15003 15005", "0 0 0", "0 0 0"],
    ),
    "kandinsky, scaled": (
        Kandinsky(row_step=HALF, col_step=THIRD),
        [Grid(2, 2)],
        ["0 0 0 0", "0 0 1/2 1/2", "0 1/3 0 1/3"],
    ),
    "joyimage": (
        "joyimage",
        [Grid(1, 2, frames=2), Grid(1, 1), Text(1)],
        ["0 0 1 1 | 2 | 0", "0 " * 6, "0 1 0 1 | 0 | 0"],
    ),
    "joyimage with running text": (
        JoyImage(text_runs=True),
        [Grid(1, 4), Text(2), Text(1)],
        ["0 0 0 0 | 4 5 6", "0 0 0 0 | 4 5 6", "0 1 2 3 | 4 5 6"],
    ),
    # √(1·4) = 2: rows from 16·(1 − 1/2) = 8, columns from 16·(1 − 4/2) = −16 by 16.
    "minimax-h3": (
        MiniMaxH3(),
        [Text(1), Grid(1, 4, frames=8)],
        [
            "0" + "".join(f" {1 + Fraction(5 * t, 3)}" * 4 for t in (0, 1, 5, 9, 13, 17, 18, 22)),
            "0" + " 8" * 32,
            "0" + " -16 0 16 32" * 8,
        ],
    ),
    "bagel": ("bagel", [Text(2), Thumbnail(1, 2), Grid(1, 2), Text(2)], ["0 1 | 2 2 2 2 | 3 3 | 4 5"]),
    "omnigen2": (
        "omnigen2",
        [*IMAGE, Text(1)],
        ["0 1 | 2 2 2 2 2 2 | 5 5 | 7", "0 1 | 0 0 0 1 1 1 | 0 0 | 7", "0 1 | 0 1 2 0 1 2 | 0 1 | 7"],
    ),
}


def numbers(line: str) -> list[Fraction]:
    """Parse a line of ids."""
    return [Fraction(word) for word in line.replace("|", " ").split()]


NEXT = {"qwen-image-2.1": 8, "bagel": 6, "omnigen2": 8}
"""The next position of each document that has one."""
