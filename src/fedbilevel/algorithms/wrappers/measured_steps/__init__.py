"""Steps that follow the curvature, and a run that survives steps that are too long."""
