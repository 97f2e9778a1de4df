"""The founding paper's theory: constants, conditions, bounds, plans."""
