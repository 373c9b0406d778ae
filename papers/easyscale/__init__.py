"""EasyScale (SC 2023): the mapping of its threads to devices that wastes the least (3.4)."""
