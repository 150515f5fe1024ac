"""Conversion of rotations, and of the positions that they use, to and from messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.rotary.allocation import MAX_HEAD_DIM, MAX_HEADS
from mmpos.rotary.config import Rotary
from mmpos.rpc.beside import Beside
from mmpos.rpc.positions import get_table, put_table
from mmpos.rpc.tensors import chosen, enum, get_torch, path, put_tensor
from mmpos.rpc.v1 import rotary_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor

_PAIRINGS = {pb.PAIRING_UNSPECIFIED: "half", pb.PAIRING_HALF: "half", pb.PAIRING_ADJACENT: "adjacent"}
_PRECISIONS = {pb.PRECISION_UNSPECIFIED: "exact", pb.PRECISION_EXACT: "exact", pb.PRECISION_HF: "hf"}
_LISTS = ("mrope_section", "inv_freq", "axes_dim", "head_axes")


def put_rotary(message: pb.Rotary, rotary: Rotary) -> None:
    """Fill a message with a rotation."""
    values = rotary.to_dict()
    theta, allocation, scaling = (values.pop(name) for name in ("theta", "allocation", "scaling"))
    if rotary.inv_freq is None:
        values["theta"] = [theta] if isinstance(theta, float) else theta
    values["allocation" if isinstance(allocation, str) else "pair_axis"] = allocation
    values["pairing"] = pb.PAIRING_ADJACENT if rotary.pairing == "adjacent" else pb.PAIRING_HALF
    values["precision"] = pb.PRECISION_HF if rotary.precision == "hf" else pb.PRECISION_EXACT
    _put_values(message, values)
    if isinstance(scaling, list):
        for each in scaling:
            _put_values(message.axis_scaling.add(), each or {})
    elif scaling is not None:
        _put_values(message.scaling, scaling)


def _put_values(message: pb.Rotary | pb.Scaling, values: dict[str, Any]) -> None:
    for field, value in values.items():
        if isinstance(value, list):
            getattr(message, field).extend(value)
        elif value is not None:
            setattr(message, field, value)


def get_rotary(name: str, message: pb.Rotary) -> Rotary:
    """Read the rotation from a message.

    Raises:
        InvalidInputError: a field is unknown or an argument of Rotary is wrong; the error text names it.
    """
    _check_lists(name, message)
    values: dict[str, Any] = {"head_dim": message.head_dim} | {
        field.name: list(value) if field.is_repeated else value for field, value in message.ListFields()
    }
    for one, each in (("allocation", "pair_axis"), ("scaling", "axis_scaling")):
        if one in values and each in values:
            raise InvalidInputError(f"{path(name, one)} cannot be combined with {each}")
    if len(message.theta) == 1:
        values["theta"] = message.theta[0]
    if message.pair_axis:
        values["allocation"] = values.pop("pair_axis")
    values["pairing"] = enum(name, message, "pairing", _PAIRINGS)
    values["precision"] = enum(name, message, "precision", _PRECISIONS)
    if "scaling" in values:
        values["scaling"] = _get_scaling(message.scaling)
    elif "axis_scaling" in values:
        values["scaling"] = [_get_scaling(each) or None for each in values.pop("axis_scaling")]
    return Rotary.from_dict(values)


def _get_scaling(message: pb.Scaling) -> dict[str, Any]:
    return {
        field.name: list(value) if field.name.endswith("_factor") and not isinstance(value, float) else value
        for field, value in message.ListFields()
    }


def _check_lists(name: str, message: pb.Rotary) -> None:
    """Refuse lists that are too long for a rotation of this size, before they are used."""
    most = max(message.head_dim, 2)
    if message.kv_heads > 1:
        most = min(most * message.kv_heads, MAX_HEAD_DIM)
    lists = {field: getattr(message, field) for field in ("theta", "pair_axis", "axis_scaling", *_LISTS)}
    per_axis = {f"axis_scaling[{axis}]": scaling for axis, scaling in enumerate(message.axis_scaling[: most + 1])}
    for whose, scaling in {"scaling": message.scaling, **per_axis}.items():
        lists |= {f"{whose}.{field}": getattr(scaling, field) for field in ("short_factor", "long_factor")}
    for field, numbers in lists.items():
        limit = MAX_HEADS if field == "head_axes" else most
        if len(numbers) > limit:
            raise InvalidInputError(f"{path(name, field)}: got {len(numbers)} numbers, want at most {limit}")


def put_rotary_positions(message: pb.RotaryPositions, positions: PositionTable | Tensor | npt.NDArray[Any]) -> None:
    """Fill a message with a PositionTable, or with ids in a torch tensor or an array."""
    if isinstance(positions, PositionTable):
        put_table(message.table, positions)
    elif hasattr(positions, "dtype") and hasattr(positions, "shape"):
        put_tensor(message.ids, positions)
    else:
        want = "a PositionTable or a tensor of ids for a service"
        raise InvalidInputError(f"positions: got {type(positions).__name__}, want {want}")


def get_rotary_positions(
    name: str, message: pb.RotaryPositions, beside: Beside | None = None
) -> PositionTable | Tensor:
    """Read the positions from a message, with ids as a torch tensor; see ``get_tensor`` for beside."""
    kind = chosen(name, message, "positions")
    if kind == "table":
        return get_table(path(name, "table"), message.table)
    return get_torch(path(name, "ids"), message.ids, beside)
