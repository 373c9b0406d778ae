"""Execute pipeline plans: cut the model by the plan's layers, run the schedule's lists."""
