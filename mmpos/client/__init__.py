"""A client of the service: the same arguments, results and exceptions as the calls in process."""

try:
    import google.protobuf  # noqa: F401
    import grpc  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError('mmpos.client needs grpc: pip install "mmpos[client]"') from error

from mmpos.client.aio import AsyncClient
from mmpos.client.info import Limits, ProfileInfo, SchemeInfo, ServerInfo
from mmpos.client.sync import Client
from mmpos.client.tls import Tls

__all__ = ["AsyncClient", "Client", "Limits", "ProfileInfo", "SchemeInfo", "ServerInfo", "Tls"]
