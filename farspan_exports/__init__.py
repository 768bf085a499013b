"""Plans in the words of other training systems: the exports beside farspan."""
