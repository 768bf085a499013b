"""A run's index as a small web application: a page to search in, and an API for programs."""
