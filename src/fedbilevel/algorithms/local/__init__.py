"""Methods of one loop for a shared or personal y: local steps, then the mean."""
