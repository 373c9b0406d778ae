"""Which machines to rent: policies for a job under a deadline, and the least that it can cost."""
