"""Read foreign formats: layer profiles, jobs, throughputs and prices of other tools."""
