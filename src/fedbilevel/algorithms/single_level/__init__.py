"""Methods of one level: y is trained at the given x."""
