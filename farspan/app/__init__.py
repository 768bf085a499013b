"""The Python API: a function for each thing that a user does. Nothing here prints; progress goes to
a callback."""
