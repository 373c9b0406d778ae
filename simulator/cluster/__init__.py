"""What is simulated: devices and servers, the jobs on them, and what fails."""
