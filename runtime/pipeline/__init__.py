"""Execute pipeline plans: cut the model by the plan's layers and run the schedule."""
