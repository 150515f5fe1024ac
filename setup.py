"""Request a wheel of the stable ABI, except for Python without the GIL, which has no stable ABI."""

import sysconfig

from setuptools import setup

setup(options={} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp311"}})
