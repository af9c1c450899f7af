"""Other libraries' calls of this block, served by programs of cakegen. Imports runtime; each module stands alone."""
