"""Helpers for all packages: argument checks, the native extension, files, optional packages and the installation."""
