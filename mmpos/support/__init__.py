"""Helpers of every room: checks of arguments, the native extension, files, optional packages, the installation."""
