"""Plan and run PyTorch training on the devices people really have.

The repository root is this package: every folder beside this file imports as
``hetflow.<folder>``. See docs/ for the file formats and the design decisions.
"""

__version__ = "0.1.0"
