"""The batch split: one global batch over unlike devices (VirtualFlow 5.1.2, EasyScale 3.4)."""
