"""The version of the package, which reports, journals and ranks tell each other."""

__version__ = "0.1.0"
