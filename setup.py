"""Ask for a wheel of the stable ABI, which builds of Python without the GIL do not have."""

import sysconfig

from setuptools import setup

setup(options={} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp311"}})
