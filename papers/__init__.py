"""What reproduces a paper and no user would choose for work: a file or folder a paper.

The product does not import this. Formats enter it by the registries that plug-ins use.
"""
