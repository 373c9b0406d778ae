"""One policy a file, registered as it is imported; ``policy.POLICIES`` finds the files."""
