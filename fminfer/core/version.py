"""The version of the package, which reports, journals and ranks tell each other."""

__version__ = "0.1.0"
DRAWING = "the way of drawing"  # in a fingerprint; versions before Gumbel-max name none
