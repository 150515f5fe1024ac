"""Train with each scheme and print the accuracies: python -m mmpos_neighbours."""

from mmpos_neighbours.experiment import main

if __name__ == "__main__":
    main()
