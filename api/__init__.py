"""The public functions of ``import hetflow``, one file each; the command line calls them too."""
