"""Foreign formats out: what hetflow knows, in the form that other tools read."""
