"""The room of the gRPC service; the wheel ships this name beside mmpos, and never a bare ``server``."""
