"""What a DataLoader iterates: shards split, shuffled, read and resumed exactly."""
