"""The server's side of a federation: participants, requests, and replies."""
