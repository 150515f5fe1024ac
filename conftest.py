"""Import mmpos once, before doctests collect its modules one by one."""

import mmpos  # noqa: F401
