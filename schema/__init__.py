"""The values that flow between the parts, and their JSON form."""
