"""The simulated cluster: devices and servers, the spans of jobs on them, and failures."""
