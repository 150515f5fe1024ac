"""The module of a user with schemes, right and wrong ones."""

OWN = '''
from dataclasses import dataclass
from typing import ClassVar

from mmpos.schemes import Flatten, Placement, Scheme


@dataclass(frozen=True)
class Wide(Scheme):
    """Columns a stride apart."""

    name: ClassVar[str] = "wide"
    stride: int = 2
    axes = 2

    def advance(self, grids):
        return grids.width * self.stride

    def place(self, grids, cursor):
        return Placement([cursor, cursor], step_row=[1, 0], step_col=[0, self.stride])


@dataclass(frozen=True)
class Plain(Wide):
    name = "plain"
    linear_in = ("cursor",)
    unused: int = 0  # which the protocol does not have


class Taken(Flatten):
    pass


WIDER = Wide(stride=3)
NUMBER = 3


class Half(Scheme):
    name = "half"


class Failing(Wide):
    def __init__(self):
        raise KeyError("size")


class Nameless(Scheme):
    axes = 2
    advance = place = None


class Axisless(Scheme):
    name = "axisless"
    advance = place = None
'''
