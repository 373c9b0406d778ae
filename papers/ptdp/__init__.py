"""PTD-P (thesis chapter 4): its closed forms, which planners do not use."""
