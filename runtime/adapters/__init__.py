"""Scripts as they are: other libraries' training loops under a plan, without a changed line."""
