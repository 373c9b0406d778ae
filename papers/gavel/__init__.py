"""What Gavel is compared with, and the optimum that its published code ends in."""
