"""The room of the gRPC service; the wheel ships this name beside mmpos, so that no bare ``server`` is ever installed."""
