"""Least attained service, allocated thousands of times: for the simulator."""
