"""The main plot of a page as PNG and SVG, for tickets and papers: light, legible in print and
without colour. Computes nothing. Names are drawn as they are: no mathematics is read in them.
"""

from whence.report.plots.along import along, write
from whence.report.plots.style import STYLES

__all__ = ["STYLES", "along", "write"]
