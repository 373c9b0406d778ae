"""One job under a deadline that may move between zones."""
