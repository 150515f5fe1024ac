"""Provide mmpos as a gRPC service for clients in other languages, in other processes and on other machines."""

import os

# gRPC's C++ core reads this when it is imported. Otherwise callers could make it write a line per call to stderr, which
# is not JSON, and for which it waits if nobody reads stderr.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
