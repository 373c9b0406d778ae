"""A job whose workers change while it trains: resizes, and failures that others survive."""
