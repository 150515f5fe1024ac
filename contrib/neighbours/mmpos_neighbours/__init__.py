"""An experiment: train a small transformer with each scheme to find the neighbour of a patch."""
