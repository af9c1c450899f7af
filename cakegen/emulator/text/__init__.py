"""PTX text, and what it is translated into."""
