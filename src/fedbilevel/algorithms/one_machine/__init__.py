"""Methods for one machine; on K clients their directions are averaged."""
