"""The main plots of a page as PNG and SVG, for tickets and papers: light, legible in print and
without colour. Computes nothing.

Every plot is a function of a `Page` (or of one of its details) and axes. Names are drawn as they
are: no mathematics is read in them.
"""

from whence.report.plots.along import along
from whence.report.plots.files import plots, write
from whence.report.plots.style import STYLES

__all__ = ["STYLES", "along", "plots", "write"]
