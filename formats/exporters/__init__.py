"""Write hetflow's records in the formats of other tools."""
