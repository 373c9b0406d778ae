"""What ``import hetflow`` offers, one file a verb; the command line calls these too."""
