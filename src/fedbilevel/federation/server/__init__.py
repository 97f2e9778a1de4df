"""The server's side of a federation: who takes part, what is asked, what is taken."""
