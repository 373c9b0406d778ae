"""The records that packages exchange, and their JSON form."""
