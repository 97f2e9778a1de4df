"""Methods of two loops: lower updates, a federated inverse, an upper update."""
