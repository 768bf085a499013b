"""The studies beside farspan: two papers reproduced, matrices of settings measured, and their
pages."""
