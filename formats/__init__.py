"""What comes in and goes out: other tools' files, other launchers, tables and pictures."""
