"""A job whose workers change while it trains: resizes, and recovery from lost workers."""
